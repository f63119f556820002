"""The load generator behind `inflight bench serve`: what to send, when to send it, how long the answers took."""
