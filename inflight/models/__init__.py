"""The model families, one file each."""
