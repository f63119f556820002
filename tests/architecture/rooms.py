"""The rooms of the package, and which of them may import which, as data. The code and docs/architecture.md follow this table.

A room imports from rooms of a lower rank, and of its own rank only from those that are named beside it. A room is a folder
`inflight/<room>/` or a single module `inflight/<room>.py`; one that is not in the table must not exist.
"""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    rank: str
    name: str
    same_rank: frozenset[str]  # rooms of its own rank that it may import


# rank  room               rooms of the same rank that it may import
_TABLE = """
  0     errors
  0     envs               errors
  0     event_buffer
  0     foreign_parameters
  0     foreign_variables  envs
  0     counted_warning
  0     damaged_files      errors
  0     fair_queue
  0     handshake
  0     line_writer
  0     list_checks        errors
  0     logs               envs line_writer
  0     model_advice
  0     model_name         errors
  0     setting
  0     setting_text
  0     sockets
  0     strangers          handshake
  0     thread_priority
  0     timeline           errors
  0     version

  1     hub
  1     hub_cache          hub
  1     python_schema
  1     structured_outputs_params  python_schema
  1     sampling_params    structured_outputs_params
  1     pooling_params     sampling_params
  1     config             hub sampling_params
  1     interface          sampling_params pooling_params config structured_outputs_params
  1     outputs            sampling_params interface

  2a    tokenizer
  2a    kv_cache
  2a    structured_output  tokenizer
  2a    parsers            tokenizer structured_output
  2a    scheduler          kv_cache structured_output

  2b    device
  2b    kernels            device
  2b    distributed        device kernels
  2b    attention          device kernels distributed
  2b    layers             device kernels distributed attention
  2b    models             device kernels distributed attention layers
  2b    weight_cache       kernels distributed layers models
  2b    model_loader       device kernels distributed attention layers models weight_cache
  2b    sample             device kernels
  2b    spec_decode        device kernels distributed attention layers models weight_cache model_loader sample
  2b    kv_connector       device
  2b    worker    device kernels distributed attention layers models weight_cache model_loader sample spec_decode kv_connector

  2c    processes

  3     executor
  3     multimodal

  4     metrics
  4     engine             metrics

  5     entrypoints        (api)
  5     __main__           entrypoints
"""

# The ranks below each rank. 2a, 2b and 2c are side by side: they meet in `interface`.
LOWER_RANKS = {
    "0": "",
    "1": "0",
    "2a": "0 1",
    "2b": "0 1",
    "2c": "0 1",
    "3": "0 1 2a 2b 2c",
    "4": "0 1 2a 2b 2c 3",
    "5": "0 1 2a 2b 2c 3 4",
}

# `from inflight import LLM`: the root is above every room, so only a room that uses the public API may import it.
PUBLIC_API = "(api)"

# Rooms that only some files may import, whatever their rank; files of the room itself always may.
GATES = {
    "worker": frozenset({"executor/uniproc.py", "executor/external_launcher.py"}),
    "scheduler": frozenset(
        {
            "engine/core/engine_core.py",
            "engine/core/step_loop.py",
            "engine/core/step_records.py",
            "engine/lockstep/core.py",
            "engine/process/engine_watch.py",
            "engine/start/make_core.py",
            "engine/start/step_times.py",
            "engine/start/pipeline_tuning.py",
        }
    ),
}

# The rooms inside a room, and which of the others each of them may import. A room that is named here has no files of its own.
INNER = {
    "engine": {
        "core": frozenset[str](),
        "lockstep": frozenset({"core"}),
        "start": frozenset({"core", "lockstep"}),
        "request": frozenset({"start"}),
        "process": frozenset({"core", "start"}),
        "serving": frozenset({"process", "request", "start"}),
    }
}

# These ranks never import torch, directly or through each other.
CONTROL_PLANE_RANKS = frozenset({"0", "1", "2a"})


def _parse(table: str) -> dict[str, Room]:
    rooms = {}
    for line in table.split("\n"):
        if fields := line.split():
            rooms[fields[1]] = Room(fields[0], fields[1], frozenset(fields[2:]))
    return rooms


ROOMS = _parse(_TABLE)


def may_import(importer: str, imported: str) -> bool:
    """Whether room `importer` may import room `imported`. Both are in `ROOMS`; `PUBLIC_API` stands for the root."""
    room = ROOMS[importer]
    if imported == importer or imported in room.same_rank:
        return True
    return imported != PUBLIC_API and ROOMS[imported].rank in LOWER_RANKS[room.rank].split()
