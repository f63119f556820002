"""The arguments that every part of the GPU's figures takes, and how a part goes on when one of its figures fails."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable

from benchmarks.gpu.sizes import Sizes, sizes_of
from benchmarks.shared.report import emit

ERROR_CHARACTERS = 600  # the end of what is told of an error


def device_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, to try the script")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    return parser


def parse_device(description: str | None) -> tuple[str, Sizes]:
    args = device_parser(description).parse_args()
    return args.device, sizes_of(args.device, quick=args.quick)


def measured(figure: str, measure: Callable[[], None]) -> None:
    """`measure` emits its figures; if it raises, that is emitted as the figure's error, and the part goes on."""
    try:
        measure()
    except Exception:  # whatever a figure fails with, the others are still to be had
        emit(figure=figure, error=traceback.format_exc()[-ERROR_CHARACTERS:])
