"""The load generator behind `inflight bench serve`: what it sends, when it sends it, and how long the answers take."""
