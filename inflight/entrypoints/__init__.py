"""Where users come in."""
