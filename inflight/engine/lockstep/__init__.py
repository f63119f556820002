"""Replicas that divide the experts of a mixture, and so run the same steps. docs/moe.md explains it."""
