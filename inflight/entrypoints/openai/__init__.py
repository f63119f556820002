"""OpenAI's HTTP interface: request models, one validated request, answers streamed or whole."""
