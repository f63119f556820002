"""Proposers of drafts: they guess the next tokens, and a later step verifies the guesses (`sample/verification.py`)."""
