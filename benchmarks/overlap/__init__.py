"""What runs at the same time: pipeline stages with each other, and the engine's work with the model's?"""
