"""OpenAI's HTTP interface: request models, what they become when they are checked, and answers, streamed or whole."""
