"""Paged attention: one ABC, and one file for each backend."""
