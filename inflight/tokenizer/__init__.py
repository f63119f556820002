"""Text to token ids and back, and chats to text: tokenizer.json and chat templates, without transformers."""
