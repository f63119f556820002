"""The way of a request in and out: prompts are checked and become token ids, and drawn tokens become text."""
