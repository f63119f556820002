"""How fast does a model compute, and what does each feature add to its speed?"""
