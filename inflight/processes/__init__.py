"""Processes that the engine starts on this machine: how they begin, are watched, talk, and end."""
