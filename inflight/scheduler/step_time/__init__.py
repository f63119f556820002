"""How long a step may take, and how long it will take: a scheduler without a time limit uses only the budget of tokens."""
