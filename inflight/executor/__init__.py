"""One model replica: an `Executor` that drives one `Worker` per rank, whatever carries the bytes between them."""
