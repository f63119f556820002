"""`vllm bench serve` without the rest of vLLM's command line, which imports the packages of the whole engine."""

from __future__ import annotations

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser(description=__doc__)
add_cli_args(parser)
main(parser.parse_args())
