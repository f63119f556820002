"""`Outbox`: sends the engine's outputs to one front end, in a thread of its own, and merges outputs that are not sent yet.

So a front end that reads slowly, or does not read, delays no step. The next message to it has at most one output for each
sequence, with all tokens of this sequence that were not sent yet.
"""

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from inflight.engine.core.step_clock import MAX_GAPS
from inflight.interface.codec import Message
from inflight.interface.expert_counts import sum_of_experts
from inflight.interface.images import sum_of
from inflight.interface.parts import join_results
from inflight.interface.request import EngineCoreOutput, LogprobsColumns
from inflight.interface.serving import CachedBlocks, EngineOutputs
from inflight.interface.statistics import SchedulerStats
from inflight.logs import exit_now
from inflight.processes.streams import BlockingStream

logger = logging.getLogger(__name__)

EXIT_FAILED = 1  # exit code of an engine core that cannot continue


class Outbox:
    """Any thread may call `put` and `send`. They never wait."""

    def __init__(self, stream: BlockingStream, name: str) -> None:
        self._stream = stream
        self._outputs: dict[str, list[EngineCoreOutput]] = {}
        self._stats: SchedulerStats | None = None
        self._num_received = 0
        self._messages: list[Message] = []
        self._names: dict[bytes, bool] = {}  # see `put_names`
        self._has_lost_names = False
        self._is_closed = False
        self._wakes = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, outputs: Sequence[EngineCoreOutput], num_received: int, stats: SchedulerStats | None) -> None:
        """Send the outputs of a step, and the engine's state `stats` if there is a new one. `EngineOutputs` explains them, and
        `num_received`."""
        with self._wakes:
            for output in outputs:
                pieces = self._outputs.setdefault(output.request_id, [])
                pieces.append(output)
                if len(pieces) >= MAX_PIECES:
                    self._outputs[output.request_id] = [merge_outputs(pieces)]
            if stats is not None:
                self._stats = stats if self._stats is None else merge_stats(self._stats, stats)
                self._num_received = num_received
            self._wakes.notify()

    def put_names(self, names: Mapping[bytes, bool], kinds: tuple[int, ...] = ()) -> None:
        """Tell the front end which names of blocks are in the prefix cache (True) and which are not (False). If more than
        MAX_NAMES wait because the front end does not read, they are dropped, and it is told to forget all names. `kinds`: given
        with the first names (`CachedBlocks`)."""
        with self._wakes:
            if kinds:
                self._messages.append(CachedBlocks(stored=b"", removed=b"", is_first=True, kinds=kinds))
            self._names.update(names)
            if len(self._names) > MAX_NAMES:
                self._names = {}
                self._has_lost_names = True
            self._wakes.notify()

    def send(self, message: Message) -> None:
        """Send a message after the outputs that are not sent yet."""
        with self._wakes:
            self._messages.append(message)
            self._wakes.notify()

    def close(self, seconds: float) -> None:
        """Send the outputs and messages that are not sent yet. Wait at most `seconds` for this. Later outputs and messages are
        not sent."""
        with self._wakes:
            self._is_closed = True
            self._wakes.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while True:
                with self._wakes:
                    while not (self._outputs or self._stats or self._messages or self._names or self._is_closed):
                        self._wakes.wait()
                    outputs, self._outputs = self._outputs, {}
                    stats, self._stats = self._stats, None
                    messages, self._messages = self._messages, []
                    names, self._names = self._names, {}
                    has_lost, self._has_lost_names = self._has_lost_names, False
                    num_received, is_closed = self._num_received, self._is_closed
                if outputs or stats is not None:
                    merged = tuple(merge_outputs(pieces) for pieces in outputs.values())
                    self._stream.send(EngineOutputs(outputs=merged, num_received=num_received, stats=stats))
                for message in (*messages, *_name_messages(names, has_lost)):
                    self._stream.send(message)
                if is_closed:
                    return
        except OSError as error:  # the front end is gone; the thread that reads from it reports this to the step loop
            logger.debug("a front end's stream was lost: %s", error)
        except Exception:  # a defect; the process ends, because otherwise the front end would wait for ever
            logger.critical("the engine's outputs cannot be sent, so its process ends", exc_info=True)
            exit_now(EXIT_FAILED)


# At most so many names of blocks wait to be sent (16 MB), and one message has at most NAMES_OF_MESSAGE of them.
MAX_NAMES, NAMES_OF_MESSAGE = 2**18, 2**13


def _name_messages(names: Mapping[bytes, bool], has_lost: bool) -> Iterator[CachedBlocks]:
    if has_lost:
        yield CachedBlocks(stored=b"", removed=b"", is_first=True)
    items = iter(names.items())
    while some := list(itertools.islice(items, NAMES_OF_MESSAGE)):
        stored = b"".join(name for name, is_cached in some if is_cached)
        yield CachedBlocks(stored=stored, removed=b"".join(name for name, is_cached in some if not is_cached))


# When so many outputs of a sequence wait, they are merged into one output. They are not merged earlier, because a merge copies
# all their tokens.
MAX_PIECES = 256


def merge_outputs(pieces: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Merge consecutive outputs of one sequence into one output."""
    if len(pieces) == 1:
        return pieces[0]
    return replace(
        pieces[-1],
        new_token_ids=tuple(token for piece in pieces for token in piece.new_token_ids),
        logprobs=_join([piece.logprobs for piece in pieces]),
        parts=join_results([part for piece in pieces for part in piece.parts]),
    )


def merge_stats(earlier: SchedulerStats, later: SchedulerStats) -> SchedulerStats:
    """Returns the later report, with the counts of both reports added up."""
    return replace(
        later,
        counts=earlier.counts + later.counts,
        step_tokens=(earlier.step_tokens + later.step_tokens)[-MAX_GAPS:],
        step_gaps=(earlier.step_gaps + later.step_gaps)[-MAX_GAPS:],
        step_time_ratios=(earlier.step_time_ratios + later.step_time_ratios)[-MAX_GAPS:],
        hidden_share=earlier.hidden_share if later.hidden_share is None else later.hidden_share,
        transfers=earlier.transfers and later.transfers and earlier.transfers + later.transfers,
        encoder=sum_of(earlier.encoder, later.encoder),
        experts=sum_of_experts(earlier.experts, later.experts),
    )


def _join(columns: Sequence[LogprobsColumns | None]) -> LogprobsColumns | None:
    found = [column for column in columns if column is not None]
    return LogprobsColumns.joined(found) if found else None
