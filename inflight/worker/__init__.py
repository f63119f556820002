"""One rank: the `Worker`, its `ModelRunner` and the persistent batch."""
