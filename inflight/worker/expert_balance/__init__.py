"""What keeps ranks that divide the experts of a mixture equally busy. docs/moe.md explains it."""
