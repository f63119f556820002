"""The interface to the hardware: memory, staged copies and the order in which stages run."""
