"""Turns text into token ids and back, and chats into text: tokenizer.json and chat templates, without transformers."""
