"""`WorkloadOptions`: the options of every command that runs workloads, and the engine for them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.command import start_engine
from inflight.entrypoints.cli.workloads import BY_NAME, MAX_TOKEN_ID, WARM_UP, Workload, select
from inflight.errors import ConfigError

if TYPE_CHECKING:
    from inflight.engine.llm_engine import LLMEngine  # loads torch

MAX_NUM_SEQS = 64
SIZES = "Sizes of your own"


def _size(help: str) -> Any:  # Any: typer's own type of an option
    return typer.Option(help=help, min=1, metavar="N", rich_help_panel=SIZES, show_default=False)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Workloads by their names, or one of the user's own sizes."""

    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            "-w",
            metavar="NAMES",
            help=f"Names, with commas: all (the first five), long, {', '.join(BY_NAME)}.",
        ),
    ] = None
    batch_size: Annotated[int | None, _size("Requests at once.")] = None
    input_len: Annotated[int | None, _size("Prompt tokens of each.")] = None
    output_len: Annotated[int | None, _size("Output tokens of each.")] = None

    def chosen(self, default: str) -> list[Workload]:
        """Without any option, those that `default` names.

        Raises:
            typer.BadParameter: there is no such workload, or both names and sizes are given.
        """
        if (self.batch_size, self.input_len, self.output_len) == (None, None, None):
            try:
                return select(self.workload or default)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
        if self.workload is not None:
            raise typer.BadParameter("give --workload, or sizes of your own, not both")
        return [Workload("custom", self.batch_size or 1, self.input_len or 128, self.output_len or 128)]


def start_for(
    context: typer.Context, engine: EngineArgs, verbose: bool, workloads: list[Workload]
) -> tuple[LLMEngine, int]:
    """An engine that takes these workloads and the warm-up, and the bound of its token ids for `workloads.run`."""
    longest = max(each.input_len + each.output_len for each in (*workloads, WARM_UP))
    args = dataclasses.replace(
        engine,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=engine.max_num_seqs or max(MAX_NUM_SEQS, *(each.batch_size for each in workloads)),
        max_model_len=engine.max_model_len or longest,
    )
    max_token_id = _max_token_id(engine) if context.obj is None else MAX_TOKEN_ID
    return start_engine(context, args, verbose), max_token_id


def _max_token_id(engine: EngineArgs) -> int:
    """The shared one, unless the model's vocabulary is smaller."""
    from inflight.config.gguf_config import read_model_config  # not for `--help`
    from inflight.hub import resolve_model_folder

    vocab_size = read_model_config(resolve_model_folder(engine.model, engine.revision)).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(f"config.json: vocab_size={vocab_size!r} is not an integer")
    return min(MAX_TOKEN_ID, vocab_size)
