"""Anthropic's HTTP interface (/v1/messages). Requests become chats of `entrypoints/openai`."""
