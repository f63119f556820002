"""OpenAI's HTTP interface: chats, completions and models."""
