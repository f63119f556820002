"""Ollama's HTTP interface (/api/...). Requests become chats and completions of `entrypoints/openai`."""
