"""How long a step may take, and how long it is predicted to take. Without a time limit, only the token budget limits a step."""
