"""What benchmarks of several rooms use: models, mock parts, a server in a process of its own, and reports."""
