"""What a serving engine reports about itself: Prometheus metrics, traces and log lines."""
