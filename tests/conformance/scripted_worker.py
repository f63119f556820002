"""`ScriptedWorker`: a worker without a model that does in each step what it was told to.

It is driven by calls only, never by closures, so that it can run in another process: construct it by its import path, and
tell it what to do through `collective_rpc("script", (rank, step_id, action, value))`. Actions:

    sleep  seconds              answer late
    hold   path                 answer when this file exists (200 s at most)
    raise  message              raise RuntimeError
    die    reason               raise SystemExit, which ends a thread's rank or a process
    masks  None                 end the step when its masks have come

A step's token is `1000 * step_id + rank`, so that a test sees which rank's tokens it got. The model's name in the config may
tell a rank to fail at start-up: "<rank>:config", "<rank>:bug", "<rank>:exit", "<rank>:kill" or (in `initialize_from_config`)
"<rank>:memory". "slow:<seconds>" slows all.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.errors import ConfigError, OutOfMemoryError
from inflight.interface.codec import encode
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.messages import RpcReply
from inflight.interface.start_up import Ready
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import Rendezvous, WorkerBase
from tests.support.deaf import deafen

MAX_HOLD_SECONDS = 200.0


class ScriptedWorker(WorkerBase):
    def __init__(self, config: EngineConfig, place: Place, rendezvous: Rendezvous | None) -> None:
        self._rank, self._place = place.rank, place
        self._rendezvous = rendezvous
        self._calls: list[str] = []
        self._script: dict[int, list[tuple[str, Any]]] = {}
        self._awaiting_masks: dict[int, tuple[ModelRunnerOutput, Future[ModelRunnerOutput]]] = {}
        self._join_action = ""
        self._start_up_fault = config.model.name

    # -- the worker --------------------------------------------------------------------------------------------

    def load_model(self) -> None:
        self._calls.append("load_model")
        if self._start_up_fault == f"{self._rank}:config":
            raise ConfigError("no such model")
        if self._start_up_fault == f"{self._rank}:bug":
            raise KeyError("a bug in load_model")
        if self._start_up_fault == f"{self._rank}:exit":
            raise SystemExit("left while loading")
        if self._start_up_fault == f"{self._rank}:kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._start_up_fault.startswith("slow:"):
            start = time.monotonic()
            time.sleep(float(self._start_up_fault.removeprefix("slow:")))
            self._load_time = start, time.monotonic()

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        self._calls.append("get_kv_cache_specs")
        spec = KVCacheSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32", itemsize=4)
        return {f"layers.{self._rank}": spec}

    def determine_available_memory(self) -> int:
        self._calls.append("determine_available_memory")
        return 1000 + self._rank

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._calls.append(f"initialize_from_config({kv_cache_config.num_blocks})")
        if self._start_up_fault == f"{self._rank}:memory":
            raise OutOfMemoryError("the KV cache cannot be allocated")

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        self._calls.append(f"masks({step_id}, {grammar_output.num_masks.tolist()}, {grammar_output.masks.shape})")
        output, future = self._awaiting_masks.pop(step_id)
        assert not grammar_output.masks.any() or (grammar_output.masks == step_id + 1).all()
        future.set_result(output)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        step_id = scheduler_output.step_id
        self._calls.append(f"execute_model({step_id})")
        awaits_masks = False
        for action, value in self._script.pop(step_id, ()):
            if action == "masks":
                awaits_masks = True
            else:
                getattr(self, action if action != "raise" else "fail")(self._rank, value)
        tokens = np.array([1000 * step_id + self._rank], dtype=np.int32)
        result = ModelRunnerOutput(step_id=step_id, sampled_token_ids=tokens)
        if not awaits_masks:
            return result
        future: Future[ModelRunnerOutput] = Future()
        self._awaiting_masks[step_id] = result, future
        return future

    def end_steps(self) -> None:
        self._awaiting_masks.clear()

    def join_epoch(self, rendezvous: Rendezvous | None) -> None:
        self._calls.append("join_epoch")
        action, self._join_action = self._join_action, ""
        if action == "die" and threading.current_thread() is threading.main_thread():  # a process of its own
            os.kill(os.getpid(), signal.SIGKILL)
        if action:
            self.fail(self._rank, "cannot join")

    def execute_dummy_batch(self) -> None:
        self._calls.append("execute_dummy_batch")

    def check_health(self) -> None:
        self._calls.append("check_health")
        if "sick" in self._calls:
            raise RuntimeError("this rank is sick")

    # -- what tests call; `rank` None means every rank -----------------------------------------------------------

    def script(self, rank: int | None, step_id: int, action: str, value: Any) -> None:
        if rank in (None, self._rank):
            self._script.setdefault(step_id, []).append((action, value))

    def on_join(self, rank: int, action: str) -> None:
        """What this rank does when it joins the next epoch: "die" or "fail"."""
        if rank == self._rank:
            self._join_action = action

    def calls(self) -> list[str]:
        return list(self._calls)

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        return self._rank, args, kwargs

    def load_time(self) -> tuple[float, float]:
        return self._load_time

    def pid(self) -> int:
        return os.getpid()

    def collector(self) -> tuple[bool, int]:
        """Whether the garbage collector is on, and how many objects it does not visit."""
        return gc.isenabled(), gc.get_freeze_count()

    def told(self) -> tuple[int, int, int]:
        """What the executor has told it about its place."""
        return self._place.local_rank, self._place.num_local_ranks, self._place.device_index

    def place(self) -> tuple[tuple[tuple[str, int], ...], int, float] | None:
        """The rendezvous: addresses, epoch, seconds."""
        meeting = self._rendezvous
        return None if meeting is None else (meeting.addresses, meeting.epoch, meeting.timeout_seconds)

    def give(self, what: str) -> Any:
        return {"a set": {1}, "an object": object(), "a lambda": lambda: 0}[what]

    def freeze(self) -> None:
        """Keeps the interpreter's lock in a call into C, for an hour."""
        ctypes.PyDLL(None).sleep(3600)

    def babble(self, rank: int) -> None:
        """Writes what is no frame into the stream of a worker process."""
        if rank == self._rank:
            with socket.socket(fileno=os.dup(int(sys.argv[2]))) as stream:
                stream.sendall(b"GET / HTTP/1.1\r\n\r\n")

    def forge(self, rank: int, what: str) -> None:
        """Sends, from a worker process, a reply in the name of rank 0, or says a second time that it is ready."""
        if rank == self._rank:
            message = RpcReply(epoch=0, call_id=10**6, rank=0) if what == "reply" else Ready(rank=rank)
            with socket.socket(fileno=os.dup(int(sys.argv[2]))) as stream:
                stream.sendall(b"".join(bytes(buffer) for buffer in encode(message).buffers()))
            time.sleep(1)

    def deafen(self, rank: int, num_epochs: int) -> None:
        if rank == self._rank:
            deafen(num_epochs)

    def log(self, text: str) -> None:
        logging.getLogger("inflight.scripted").info(text)

    def note(self, rank: int | None, text: str) -> None:
        if rank in (None, self._rank):
            self._calls.append(text)

    def sleep(self, rank: int | None, seconds: float) -> int:
        if rank in (None, self._rank):
            time.sleep(seconds)
        return self._rank

    def hold(self, rank: int | None, path: str) -> int:
        end = time.monotonic() + MAX_HOLD_SECONDS
        while rank in (None, self._rank) and not Path(path).exists() and time.monotonic() < end:
            time.sleep(0.001)
        return self._rank

    def begin(self, rank: int | None, path: str) -> Future[int]:
        """What `hold` does, in a thread of its own."""
        future: Future[int] = Future()
        threading.Thread(target=lambda: future.set_result(self.hold(rank, path)), daemon=True).start()
        return future

    def begin_to_fail(self, rank: int | None) -> Future[int]:
        future: Future[int] = Future()
        if rank in (None, self._rank):
            future.set_exception(RuntimeError("failed later"))
        else:
            future.set_result(self._rank)
        return future

    def fail(self, rank: int | None, message: str) -> int:
        if rank in (None, self._rank):
            raise RuntimeError(message)
        return self._rank

    def die(self, rank: int | None, reason: str) -> int:
        if rank in (None, self._rank):
            raise SystemExit(reason)
        return self._rank
