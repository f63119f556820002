"""A request on its way in and out: a checked prompt becomes token ids, and drawn tokens become text."""
