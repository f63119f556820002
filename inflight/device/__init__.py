"""The interface to the hardware: memory, copies, and the order in which the parts of a step run."""
