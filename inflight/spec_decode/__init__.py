"""Drafts: guesses at the next tokens, that a later step verifies (`sample/verification.py`)."""
