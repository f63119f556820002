"""A cache of packed weights on the disk: a later start maps a file instead of reading, converting and packing the weights."""
