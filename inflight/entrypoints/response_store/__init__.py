"""Responses that the server keeps: one SQLite file for all processes of a server."""
