"""Proposers of drafts: guesses at the next tokens, which a later step verifies (`sample/verification.py`)."""
