"""What `inflight serve` has around the HTTP app: settings, checks, middlewares, sockets, signals, shutdown. Loads no torch."""
