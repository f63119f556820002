"""`working_folder`: the folder in which a new process starts."""

from pathlib import Path


def working_folder() -> str:
    """This process's working folder, or "/" if it was deleted. In a deleted folder, MKL does not find torch's libraries."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "/"
