"""A small model that reads drawings: the drawings, the questions, training and evaluation. MODEL_CARD.md has the results."""
