"""`inflight serve` around the app: settings, checks, middlewares, sockets, signals and shutdown. Nothing here loads torch."""
