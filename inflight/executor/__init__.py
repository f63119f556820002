"""Runs the model on all ranks: an `Executor` drives one `Worker` per rank, in threads, in processes or on several machines."""
