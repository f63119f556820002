"""`TierStack`: the order of tiers, staging buffers, labels, and tiers that lie or hang."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.kv_connector.tier_object import HEADER, PAGE
from inflight.kv_connector.tier_selector import open_tier
from inflight.kv_connector.tier_stack import TierStack
from tests.support import kv_tier_examples

pytestmark = pytest.mark.usefixtures("patient_breakers")

KEY = b"k" * 33
TEXT = memoryview(b"text" * 1000)
EXAMPLES = "tests.support.kv_tier_examples"


def custom(name: str = "DictTier", seconds: float = 300.0, **options: Any) -> KVTierConfig:
    return KVTierConfig(
        type="custom", module_path=f"{EXAMPLES}:{name}", options=options, timeout_seconds=seconds, max_operations=4
    )


def stack(*configs: KVTierConfig, payload_bytes: int = len(TEXT)) -> TierStack:
    return TierStack(configs, root=b"r" * 32, shard="s", num_shards=1, payload_bytes=payload_bytes)


def inner(tiers: TierStack, number: int = 0) -> Any:
    return tiers._tiers[number][1]._tier


def test_without_tiers_nothing_is_there() -> None:
    tiers = stack()
    assert tiers.fetch([KEY])[0] is None and tiers.store([KEY], [TEXT]) and tiers.take_counts() == {}
    tiers.close()


def test_the_first_tier_that_has_it_answers_and_the_others_before_it_can_be_filled() -> None:
    first, second, third = {}, {}, {}  # type: ignore[var-annotated]
    tiers = stack(custom(objects=first), custom(objects=second), custom(objects=third))
    assert tiers.store([KEY], [TEXT]) and first == second == third and len(third) == 1
    first.clear()
    second.clear()
    found = tiers.fetch([KEY])[0]
    assert found is not None and (found[0], found[1]) == (TEXT, 2)
    assert tiers.store([KEY], [found[0]], stop=2) and first == second == third
    found = tiers.fetch([KEY])[0]
    assert found is not None and (found[0], found[1]) == (TEXT, 0)
    assert tiers.store([b"l" * 33], [TEXT], stop=1) and (len(first), len(second)) == (2, 1)
    counts = tiers.take_counts()
    assert list(counts) == ["custom", "custom-2", "custom-3"]
    assert [each["hits"] for each in counts.values()] == [1, 0, 1]
    assert [each["misses"] for each in counts.values()] == [1, 1, 0]
    assert [each["stored"] for each in counts.values()] == [3, 2, 1]
    assert all(not any(each.values()) for each in tiers.take_counts().values())
    tiers.close()


def test_a_damaged_object_is_taken_from_the_next_tier() -> None:
    first, second = {}, {}  # type: ignore[var-annotated]
    tiers = stack(custom(objects=first), custom(objects=second))
    assert tiers.store([KEY], [TEXT])
    (name,) = first
    first[name] = first[name][:-1] + b"!!"
    found = tiers.fetch([KEY])[0]
    assert found is not None and (found[0], found[1]) == (TEXT, 1)
    assert tiers.store([KEY], [found[0]], stop=1) and first == second
    tiers.close()


def test_a_staging_buffer_is_page_aligned_and_of_one_thread() -> None:
    tiers = stack(custom(objects={}), payload_bytes=5 * PAGE)
    addresses = set()
    kept = []

    def call() -> None:
        found = [tiers.fetch([KEY])[0], tiers.fetch([KEY])[0]]
        for each in found:
            assert each is not None and each[0] == TEXT
            address = ctypes.addressof(ctypes.c_char.from_buffer(each[0]))
            assert (address - HEADER.size) % PAGE == 0
            addresses.add(address)
        kept.append(found)

    assert tiers.store([KEY], [TEXT])
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(addresses) == len(kept) == 3
    tiers.close()


def test_a_late_read_cannot_write_into_a_later_payload() -> None:
    slow, fast = {}, {}  # type: ignore[var-annotated]
    tiers = stack(custom("WaitingTier", 0.01, objects=slow), custom(objects=fast))
    assert not tiers.store([KEY], [TEXT])  # the first is late, the second has it
    assert len(fast) == 1
    found = tiers.fetch([KEY])[0]
    assert found is not None and (found[0], found[1]) == (TEXT, 1)
    assert not tiers.store([b"l" * 33], [memoryview(b"other" * 100)])
    payload, _ = tiers.fetch([KEY])[0] or (memoryview(b""), 0)
    slow_tier = inner(tiers)
    slow_tier.objects.update({name: bytes(len(data)) for name, data in fast.items()})
    slow_tier.go.set()
    for _ in range(4):
        assert slow_tier.entered.acquire(timeout=300)
    tiers.close()
    assert payload == TEXT  # what the late reads found went elsewhere
    assert all(data == fast[name] or not any(data) for name, data in slow_tier.objects.items())


@pytest.mark.parametrize("answer", [0, -1, 2**40, PAGE, 2 * PAGE, None, True, "8192", 3.5])
@pytest.mark.parametrize("garbage", [b"\0", b"\xff", b"I"])
def test_a_tier_that_lies(answer: Any, garbage: bytes) -> None:
    tiers = stack(custom("LyingTier", garbage=garbage, answer=answer))
    assert tiers.store([KEY], [TEXT])
    assert tiers.fetch([KEY])[0] is None
    counts = tiers.take_counts()["custom"]
    assert (counts["misses"], counts["checksum_failures"]) == ((1, 0) if answer is None else (0, 1))
    tiers.close()


def test_a_tier_that_keeps_answering_with_the_last_object() -> None:
    tiers = stack(custom("LyingTier", garbage=b"", answer=None))
    lying = inner(tiers)
    lying.get = lambda name, into: len(into)  # writes nothing, so the staging buffer holds what was stored last
    assert tiers.store([KEY], [TEXT])
    assert tiers.fetch([b"l" * 33])[0] is None
    assert tiers.take_counts()["custom"]["checksum_failures"] == 1
    tiers.close()


def test_a_tier_that_raises_does_not_disturb_the_others() -> None:
    tiers = stack(custom("RaisingTier", error=RuntimeError("x")), custom(objects={}))
    for _ in range(4):
        assert not tiers.store([KEY], [TEXT])
        found = tiers.fetch([KEY])[0]
        assert found is not None and found[1] == 1
    counts = tiers.take_counts()
    assert (counts["custom"]["errors"], counts["custom"]["rejected"]) == (6, 2)
    assert counts["custom-2"]["hits"] == counts["custom-2"]["stored"] == 4
    tiers.close()


def test_after_close_everything_is_missing() -> None:
    tiers = stack(custom(objects={}))
    assert tiers.store([KEY], [TEXT])
    tiers.close()
    assert tiers.fetch([KEY])[0] is None and not tiers.store([KEY], [TEXT])
    assert tiers.take_counts()["custom"]["rejected"] == 2


def test_tiers_before_one_that_cannot_be_made_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(kv_tier_examples.DictTier, "close", lambda self: closed.append(self))
    with pytest.raises(ConfigError):
        stack(custom(objects={}), custom("NoTier"))
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("module_path", "message"),
    [
        (f"{EXAMPLES}:NoTier", "is no subclass of inflight.kv_connector.tier.Tier; give one"),
        (f"{EXAMPLES}:Missing", "cannot be imported: AttributeError: .*Missing.*; correct it"),
        ("no.such.module:Tier", "cannot be imported: ModuleNotFoundError: .*; correct it"),
        (f"{EXAMPLES}:NeedsOptionsTier", "cannot be made: KeyError; correct its options"),
    ],
)
def test_classes_that_cannot_be_used(module_path: str, message: str) -> None:
    config = KVTierConfig(type="custom", module_path=module_path, options={"password": "hunter2"})
    with pytest.raises(ConfigError, match=f"secondary_tiers: module_path='{module_path}' {message}") as error:
        open_tier(config, "s", 1)
    assert "hunter2" not in str(error.value)


def test_all_tiers_are_told_of_a_block_or_a_chunk_that_is_used() -> None:
    told: list[str] = []
    tiers = stack(custom(objects={}), custom(objects={}), custom(objects={}))
    answers = {0: True, 1: False, 2: True}
    for number in answers:
        inner(tiers, number).touch = lambda _, number=number: (told.append(str(number)), answers[number])[1]
    assert not tiers.touch([KEY]) and told == ["0", "1", "2"]
    tiers._tiers[1] = tiers._tiers[1]._replace(blocks_per_chunk=4)
    answers[1] = True
    assert tiers.touch([KEY] * 4) and told[3:] == ["0"] * 4 + ["1"] + ["2"] * 4
    answers[2] = None  # type: ignore[assignment]
    assert tiers.touch([KEY]), "it cannot tell"
    tiers.close()
