"""Metrics: what a serving engine reports of itself."""
