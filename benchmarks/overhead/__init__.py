"""How long does the engine's own work take, without the model's: planning, grammars, messages between processes?"""
