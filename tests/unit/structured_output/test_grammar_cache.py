"""The cache of compiled grammars: what goes, what is shared, and who waits for whom."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from inflight.errors import InvalidRequestError, OverloadedError
from inflight.structured_output import grammar_cache
from inflight.structured_output.backend import CompiledGrammar
from inflight.structured_output.grammar_cache import LONG_TEXT, GrammarCache
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.support.waits import wait_until
from tests.unit.structured_output.grammar_case import backend, walk
from tests.unit.structured_output.slow_backend import SlowBackend

GRAMMAR = backend("embedded")


def cache(
    create: Callable[[], Any], max_count: int = 100, max_bytes: int = 10**9, num_threads: int = 2
) -> GrammarCache:
    return GrammarCache(create, num_threads=num_threads, max_count=max_count, max_bytes=max_bytes)


def choice(i: int) -> GrammarSpec:
    return GrammarSpec.from_params(StructuredOutputsParams(choice=[f"choice {i}"]))


def test_the_least_recently_used_grammar_goes() -> None:
    slow = SlowBackend()
    slow.gate.set()
    grammars = cache(lambda: slow, max_count=2)
    try:
        for i in (0, 1, 0, 2, 0, 1):
            grammars.get(choice(i)).result(timeout=300)
        assert slow.compiled == [choice(0), choice(1), choice(2), choice(1)]
        assert len(grammars) == 2
    finally:
        grammars.close()


def test_the_cache_is_bounded_in_bytes() -> None:
    size = GRAMMAR.compile(choice(0)).size_bytes
    grammars = cache(lambda: GRAMMAR, max_bytes=4 * size)
    try:
        for i in range(20):
            grammars.get(choice(i % 10)).result(timeout=300)
            assert 1 <= len(grammars) <= 4
        assert len(grammars) >= 2
    finally:
        grammars.close()


def test_what_is_being_compiled_is_not_evicted() -> None:
    slow = SlowBackend()
    grammars = cache(lambda: slow, max_count=1)
    try:
        futures = [grammars.get(choice(i)) for i in range(3)]
        assert [grammars.get(choice(i)) for i in range(3)] == futures
        slow.gate.set()
        for future in futures:
            future.result(timeout=300)
        assert sorted(spec.text for spec in slow.compiled) == sorted(choice(i).text for i in range(3))
    finally:
        slow.gate.set()
        grammars.close()


def test_a_grammar_costs_the_same_however_many_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    done = Future.done

    def counted(future: Future[CompiledGrammar]) -> bool:
        nonlocal looks
        looks += 1
        return done(future)

    slow = SlowBackend()
    grammars = cache(lambda: slow, num_threads=1)
    try:
        for i in range(200):
            grammars.get(choice(i))
        monkeypatch.setattr(Future, "done", counted)
        for i in range(190, 210):
            grammars.get(choice(i))
        assert looks <= 20
    finally:
        slow.gate.set()
        grammars.close()


def test_a_failure_is_cached_and_a_close_cancels() -> None:
    slow = SlowBackend()
    grammars = cache(lambda: slow, num_threads=1)
    bad = GrammarSpec.from_params(StructuredOutputsParams(regex="("))
    running = grammars.get(bad)
    waiting: Future[CompiledGrammar] = grammars.get(choice(1))
    opener = threading.Thread(target=lambda: (wait_until(waiting.cancelled), slow.gate.set()))
    opener.start()
    grammars.close()
    opener.join()
    assert isinstance(running.exception(), InvalidRequestError)
    assert waiting.cancelled()
    assert grammars.get(bad) is running


def test_many_threads_compile_and_match_at_once() -> None:
    """Each thread has matchers of its own, of grammars that all share."""
    grammars = cache(lambda: GRAMMAR, num_threads=3)
    specs = [GrammarSpec.from_params(StructuredOutputsParams(regex=f"[a-{end}]{{2,6}}")) for end in "bcdefg"]
    alone = [walk(GRAMMAR.compile(spec).matcher(), GRAMMAR, random.Random(1), 30) for spec in specs]
    failures: list[str] = []

    def work(offset: int) -> None:
        for i in range(len(specs)):
            index = (i + offset) % len(specs)
            matcher = grammars.get(specs[index]).result(timeout=300).matcher()
            if walk(matcher, GRAMMAR, random.Random(1), 30) != alone[index]:
                failures.append(f"thread {offset}, grammar {index}")

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(6)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
    finally:
        grammars.close()
    assert failures == []


def long_choice(i: int) -> GrammarSpec:
    return GrammarSpec.from_params(StructuredOutputsParams(choice=[f"choice {i}" + "x" * LONG_TEXT]))


def test_the_backend_is_made_once() -> None:
    made: list[SlowBackend] = []
    both_ask = threading.Barrier(2)

    def create() -> SlowBackend:
        time.sleep(0.05)  # time enough for the other thread to come
        made.append(SlowBackend())
        made[-1].gate.set()
        return made[-1]

    grammars = cache(create)
    compile_grammar = grammars._compile

    def compile_together(spec: GrammarSpec) -> CompiledGrammar:
        both_ask.wait(timeout=300)
        return compile_grammar(spec)

    grammars._compile = compile_together  # type: ignore[method-assign]
    try:
        for future in [grammars.get(choice(i)) for i in range(2)]:
            future.result(timeout=300)
        assert len(made) == 1
    finally:
        grammars.close()


def test_a_short_grammar_does_not_wait_for_long_ones() -> None:
    slow = SlowBackend()
    grammars = cache(lambda: LongOnesAreSlow(slow), num_threads=1)
    try:
        long = [grammars.get(long_choice(i)) for i in range(3)]
        grammars.get(choice(0)).result(timeout=300)
        assert not any(future.done() for future in long)
    finally:
        slow.gate.set()
        grammars.close()


class LongOnesAreSlow:
    def __init__(self, slow: SlowBackend) -> None:
        self._slow = slow

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        return self._slow.compile(spec) if len(spec.text) > LONG_TEXT else GRAMMAR.compile(spec)


def test_what_absent_clients_wanted_delays_nobody() -> None:
    slow = SlowBackend()
    grammars = cache(lambda: slow, num_threads=2)
    try:
        given_up = {long_choice(i): grammars.get(long_choice(i)) for i in range(16)}
        wanted_twice = long_choice(15)
        assert grammars.get(wanted_twice) is given_up[wanted_twice]
        honest = grammars.get(long_choice(99))
        for spec, future in given_up.items():
            grammars.release(spec, future)
        futures = list(given_up.values())
        assert [future.cancelled() for future in futures] == [False] * 2 + [True] * 13 + [False]
        slow.gate.set()
        assert honest.result(timeout=300)
        assert given_up[wanted_twice].result(timeout=300)
        assert grammars.get(long_choice(5)).result(timeout=300), "what was cancelled can be asked for again"
    finally:
        slow.gate.set()
        grammars.close()


def test_a_refusal_and_a_release_of_what_was_evicted_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "MAX_QUEUED_SHORT", 1)
    slow = SlowBackend()
    grammars = cache(lambda: slow, num_threads=1)
    try:
        running, waiting = (grammars.get(choice(i)) for i in range(2))
        with pytest.raises(OverloadedError):
            grammars.get(choice(2))
        assert len(grammars) == 2
        grammars.release(choice(1), waiting)
        assert waiting.cancelled()
        again = grammars.get(choice(2))  # there is room now
        slow.gate.set()
        assert again.result(timeout=300)
        grammars.release(choice(0), running)
        assert running.result(timeout=300)
        grammars.release(choice(0), running)
        assert grammars.get(choice(0)) is running
    finally:
        slow.gate.set()
        grammars.close()


def test_what_is_refused_for_another_client_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_cache, "MAX_QUEUED_SHORT", 2)
    slow = SlowBackend()
    grammars = cache(lambda: slow, num_threads=1)
    try:
        running, waiting, newest = (grammars.get(choice(i), "many") for i in range(3))
        small = grammars.get(choice(3), "other")
        assert isinstance(newest.exception(timeout=0), OverloadedError)
        assert len(grammars) == 3
        grammars.release(choice(2), newest)  # as its request does when it ends
        grammars.release(choice(1), waiting)
        again = grammars.get(choice(2), "many")
        slow.gate.set()
        assert again is not newest and again.result(timeout=300)
        assert small.result(timeout=300) and running.result(timeout=300)
    finally:
        slow.gate.set()
        grammars.close()


def test_the_grammar_that_is_asked_for_stays_though_it_is_larger_than_the_cache() -> None:
    slow = SlowBackend()
    slow.gate.set()
    grammars = cache(lambda: slow, max_bytes=1)
    try:
        future = grammars.get(choice(0))
        future.result(timeout=300)
        assert grammars.get(choice(0)) is future
        grammars.get(choice(1)).result(timeout=300)
        assert len(grammars) == 1  # the other one went
    finally:
        grammars.close()


@pytest.mark.parametrize("length", [1, LONG_TEXT + 1])
def test_after_a_close_neither_queue_compiles_a_grammar(length: int) -> None:
    slow = SlowBackend()
    slow.gate.set()
    grammars = cache(lambda: slow, num_threads=1)
    first = grammars.get(GrammarSpec("regex", "1" * length))
    grammars.close()
    assert first.done()  # a close waits for what runs
    assert grammars.get(GrammarSpec("regex", "2" * length)).cancelled()
