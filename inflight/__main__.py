"""`python -m inflight` is the command `inflight`."""

from inflight.entrypoints.cli.main import main

main()
