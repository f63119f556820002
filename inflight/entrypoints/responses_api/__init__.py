"""POST /v1/responses, and what is stored of it: OpenAI's Responses API."""
