"""OpenAI's HTTP interface: the models of requests, the checks of requests, and the answers, streamed or whole."""
