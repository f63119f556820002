"""What a rank does for request parts: it reads hidden states, or changes the input of the model, for single rows of a step."""
