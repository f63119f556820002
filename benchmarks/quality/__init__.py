"""How close are answers to the truth: which models run, and what does each format or constraint cost in accuracy?"""
