"""Endpoints that make vectors and scores of texts, as clients of OpenAI, vLLM, Cohere and Jina call them."""
