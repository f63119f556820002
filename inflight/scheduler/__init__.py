"""Decides which tokens of which requests are computed in each step. Imports no torch."""
