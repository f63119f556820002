"""Agents: sessions of many turns that together need four times the arena. Each turn is a new message after all that was said.

The embedded model and a small one with recurrent layers show times. A mock device shows hits at lengths that are too long for
a processor: up to 80,000 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.kv_tiers.setting import BLOCK_SIZE, Row, Setting, drain, tell
from benchmarks.kv_tiers.steps import mock_engine
from benchmarks.shared.models import model_folder
from inflight.config.engine_args import EngineArgs
from inflight.engine.start.model_files import resolve_config
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.outputs import RequestOutput
from inflight.sampling_params import SamplingParams

HITS_BAR, TIME_BAR = 0.9, 1.15
NUM_SESSIONS, NUM_TURNS, OUTPUT_LEN = 8, 30, 16
TIMES_THE_ARENA = 4
SHORT, LONG = 64, 80_000 // NUM_TURNS  # tokens of a turn with its answer: of real models, and of the mock device
MOCK_BLOCK_BYTES = 2 * BLOCK_SIZE * 4  # a key and a value of one float32, see `MockTokensWorker`


@dataclass
class Turn:
    """
    Attributes:
        num_said: tokens of the session before this turn.
        num_new: tokens of the new message.
        num_found: tokens of the prompt that were not computed.
        seconds: until the first token.
    """

    num_said: int
    num_new: int
    num_found: int
    seconds: float


class Agents:
    def __init__(self, setting: Setting, num_turns: int, turn_len: int) -> None:
        self._messages = [[setting.draw(turn_len - OUTPUT_LEN) for _ in range(num_turns)] for _ in range(NUM_SESSIONS)]
        self._num_turns = num_turns
        self.length = num_turns * turn_len
        self.total_tokens = NUM_SESSIONS * self.length

    def run(self, engine: LLMEngine) -> tuple[list[Turn], list[list[int]]]:
        """Run turn 1 of all sessions one after the other, then turn 2, and so on. Returns the turns, and what was said in each
        session. After each turn it waits for the turn's copies: an agent's tools leave time for them, too."""
        turns, said = [], [list[int]() for _ in self._messages]
        for number in range(self._num_turns):
            for session, messages in zip(said, self._messages, strict=True):
                before = len(session)
                session += messages[number]
                seconds, output = _answer(engine, session)
                turns.append(Turn(before, len(messages[number]), output.num_cached_tokens, seconds))
                session += output.outputs[0].token_ids
                drain(engine)
        return turns, said


def _answer(engine: LLMEngine, prompt: Sequence[int]) -> tuple[float, RequestOutput]:
    """Returns the seconds until the first token, and the answer."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    start, seconds, outputs = time.perf_counter(), 0.0, list[RequestOutput]()
    engine.add_request("turn", {"prompt_token_ids": list(prompt)}, params)
    while engine.has_unfinished_requests():
        outputs += engine.step()
        seconds = seconds or (time.perf_counter() - start if outputs else 0.0)
    return seconds, outputs[-1]


def rows(setting: Setting, *, is_quick: bool) -> list[Row]:
    num_turns = 6 if is_quick else NUM_TURNS
    embedded = replace(setting, model=resolve_config(EngineArgs()).model.folder)
    hybrid = replace(setting, model=model_folder("qwen3.5-tiny", setting.folder))
    return [
        *_real(setting, embedded, "embedded model", num_turns),
        *_real(setting, hybrid, "recurrent layers", num_turns),
        *_mock(setting, num_turns),
    ]


def _real(setting: Setting, own: Setting, name: str, num_turns: int) -> list[Row]:
    """Measures in `own`, and counts in `setting` what differs."""
    with own.engine(16384, max_model_len=64) as probe:
        config = probe.core.kv_cache_config
        num_states = sum(group.spec.is_state for group in config.groups)
        own.block_bytes = config.block_bytes * (len(config.groups) - num_states)
    agents = Agents(own, num_turns, SHORT)
    arena, length = agents.total_tokens // TIMES_THE_ARENA, agents.length + 1
    host_pool = (4 if num_states else 2) * agents.total_tokens
    with (
        own.engine(host_pool, max_model_len=length) as unbounded,
        own.engine(arena, host_pool, max_model_len=length) as engine,
    ):
        agents.run(unbounded)  # what is made at first use
        unbounded.core.reset_prefix_cache()
        all_there, truth = agents.run(unbounded)
        turns, said = agents.run(engine)
    setting.num_compared += len(truth)
    setting.num_differing += sum(ours != theirs for ours, theirs in zip(said, truth, strict=True))
    # the second half: in the first one, everything may still be in the arena
    late = range(len(turns) // 2, len(turns))
    times = [turns[index].seconds / all_there[index].seconds for index in late]
    what = f"agents, {name}, {num_turns} turns up to {agents.length:,} tokens"
    more = Row(f"{what}: first token / with everything in the arena", times, TIME_BAR)
    return [*_hits(what, turns), more]


def _mock(setting: Setting, num_turns: int) -> list[Row]:
    agents = Agents(setting, num_turns, LONG)
    blocks = agents.total_tokens // BLOCK_SIZE
    with mock_engine(
        setting,
        2 * blocks * MOCK_BLOCK_BYTES,
        max_model_len=agents.length + 1,
        kv_cache_memory_bytes=blocks // TIMES_THE_ARENA * MOCK_BLOCK_BYTES,
        hf_overrides={"max_position_embeddings": agents.length + 1},
    ) as engine:
        turns, _ = agents.run(engine)
    return _hits(f"agents, mock device, {num_turns} turns up to {agents.length:,} tokens", turns)


def _hits(what: str, turns: Sequence[Turn]) -> list[Row]:
    said = [turn for turn in turns if turn.num_said]
    found = sum(min(turn.num_found, turn.num_said) for turn in said) / sum(turn.num_said for turn in said)
    most = max(turn.num_said - turn.num_found for turn in said)
    tell("agents", what=what, turns=len(turns), found=found, most_computed_again=most)
    return [
        Row(f"{what}: tokens found / said before", [found], HITS_BAR, False),
        Row(f"{what}: most tokens that a turn computed again", [most], BLOCK_SIZE),
    ]
