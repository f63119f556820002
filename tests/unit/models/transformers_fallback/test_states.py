"""`PackedStates`: recurrent layers run sequence by sequence, each on its own state. The layers here add up their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import OlmoHybridConfig

from inflight.attention.metadata import AttentionInputs, StateMetadata, StatePlace
from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.errors import UnsupportedModelError
from inflight.interface.kv_cache import DUMMY_BLOCK
from inflight.layers.recurrent_state import RecurrentState
from inflight.models.transformers_fallback.attention import PackedAttention
from inflight.models.transformers_fallback.states import is_recurrent
from tests.unit.models.transformers_fallback.test_attention import Heads, mask

WIDTH, BLOCK_SIZE, NUM_BLOCKS = 3, 4, 12


class Inner(nn.Module):
    """Uses the same state as the module around it."""

    def forward(self, cache: Any, number: int) -> Any:
        cache.get_recurrent_state(number)
        return cache.layers[number].recurrent_states[0]  # families may read it so: it has to be zeros at first


class Sum(nn.Module):
    """The sum of all tokens so far. It also keeps the last two tokens, as convolutions do, and adds the older of them."""

    def __init__(self, number: int, *, forgets: bool = False) -> None:
        super().__init__()
        self.number, self.forgets, self.inner = number, forgets, Inner()
        self.calls: list[tuple[int, bool]] = []  # number of tokens, and whether there is a state before them
        self.given: list[Any] = []

    def forward(self, hidden: Tensor, cache: Any, *, extra: object = None) -> tuple[Tensor, None, str]:
        before, last = self.inner(cache, self.number), cache.get_conv_state(self.number)
        num_tokens, has_state = hidden.shape[1], cache.layers[self.number].has_previous_state[0]
        assert cache.get_conv_state(2) is None  # nobody writes it
        self.calls.append((num_tokens, has_state))
        self.given.append(extra)
        if before is None or (self.forgets and num_tokens > 1):  # some families ignore the state of several tokens
            before, last = hidden.new_zeros(1, WIDTH), None
        if last is None:
            last = hidden.new_zeros(1, WIDTH, 2)
        rows = torch.cat((last.mT, hidden), 1)
        sums = before + hidden.cumsum(1)
        cache.layers[self.number].has_previous_state[0] = False  # so that the tensor is replaced
        cache.update_conv_state(rows[:, -2:].mT, self.number)
        cache.update_recurrent_state(sums[:, -1].double(), self.number)
        return sums.float() + 100 * rows[:, :num_tokens], None, "text"


class Model(nn.Module):
    _is_stateful = False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.config = OlmoHybridConfig(num_hidden_layers=4, layer_types=[*["linear_attention"] * 3, "full_attention"])
        self.layers = nn.ModuleList([Sum(0, **options), Sum(1)])

    def forward(self, hidden: Tensor, cache: Any, **more: Any) -> tuple[Tensor, None, str]:
        first = self.layers[0](hidden, cache, **more)
        result: tuple[Tensor, None, str] = self.layers[1](first[0] / 8, cache=cache)
        return result


def truth(tokens: Tensor) -> Tensor:
    for scale in (1 / 8, 1):
        tokens = (tokens.cumsum(0) + 100 * torch.cat((torch.zeros(2, WIDTH), tokens))[:-2]) * scale
    return tokens


class Session:
    def __init__(self, num_states: int = 1, **options: Any) -> None:
        self.model: Any = Model(**options)
        self.attention = PackedAttention(self.model, TorchSdpaBackend(), 64)
        assert self.attention.states is not None
        self.states: Any = self.attention.states
        self.record()
        self.num_states, self.done = num_states, np.zeros(2, dtype=np.int32)
        layers: list[Any] = list(self.attention.layers.values())
        assert all(isinstance(layer, RecurrentState) for layer in layers)
        self.layers: list[RecurrentState] = layers
        for number, layer in enumerate(layers):
            spec = layer.kv_cache_spec(BLOCK_SIZE, torch.float32, num_states)
            layer.bind(torch.full((NUM_BLOCKS, spec.block_bytes), 255, dtype=torch.uint8), number)

    def record(self) -> None:
        self.attention.record(lambda: self.model(torch.randn(1, 6, WIDTH), self.states))

    def step(
        self, tokens: Sequence[Tensor], counts: Sequence[int], tables: Any, layers: Any = None, **more: Any
    ) -> tuple[Tensor, None, str]:
        sizes = np.array(counts, dtype=np.int32)
        inputs = [
            AttentionInputs(
                query_start_loc=np.concatenate(([0], sizes.cumsum())).astype(np.int32),
                seq_lens=self.done + sizes,
                num_computed_tokens=self.done.copy(),
                block_table=np.array(table, dtype=np.int32),
            )
            for table in tables
        ]
        parts = zip(tokens, self.done, self.done + sizes, strict=True)
        hidden = torch.cat([each[start:end] for each, start, end in parts])[None]
        self.done += sizes
        metadata = tuple(
            StateMetadata(num_tokens=len(hidden[0]), inputs=each, block_size=BLOCK_SIZE, num_states=self.num_states)
            for each in inputs
        )
        with self.attention.step(metadata, layers):
            result: tuple[Tensor, None, str] = self.model(hidden, self.states, **more)
        assert self.states.metadata is None
        return result


TABLES = [[[7, 3, 11], [2, 9, 5]], [[1, 8, 4], [10, 6, 11]]]  # of each layer


def draw() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(12, WIDTH) for _ in range(2)]


def test_what_is_recorded() -> None:
    """A state is that of the outer module. Its tensors are sorted: first what convolutions keep."""
    session = Session()
    for _ in range(2):  # a second recording takes the place of the first
        layers: list[Any] = list(session.attention.layers.values())
        assert [layer.layer_name for layer in layers] == ["layers.0", "layers.1"]
        for layer in layers:
            layer.bind(torch.zeros(2, layer.offsets[-1], dtype=torch.uint8), 0)
            conv, recurrent = layer.tensors(StatePlace(1, 0))
            assert conv.shape == (1, WIDTH, 2) and conv.dtype == torch.float32
            assert recurrent.shape == (1, WIDTH) and recurrent.dtype == torch.float64
        session.record()
    assert session.model.layers[0].calls == [(6, False)] * 3
    assert session.model.layers[0].given == [None] * 3


@pytest.mark.parametrize("forgets", [False, True])
def test_sequences_in_one_step_have_their_own_states(forgets: bool) -> None:
    session, tokens = Session(forgets=forgets), draw()
    session.states.token_by_token = forgets
    found: list[list[Tensor]] = [[], []]
    for counts in ((5, 2), (1, 3), (0, 1), (4, 0), (2, 6)):
        rows, none, text = session.step(tokens, counts, TABLES)
        assert none is None and text == "text" and rows.shape == (1, sum(counts), WIDTH)
        for pieces, piece in zip(found, torch.split(rows[0], list(counts)), strict=True):
            pieces.append(piece)
    for pieces, sequence in zip(found, tokens, strict=True):
        torch.testing.assert_close(torch.cat(pieces), truth(sequence), rtol=1e-5, atol=1e-5)
    unused = [block for block in range(NUM_BLOCKS) if block not in np.array(TABLES[0])]
    cache = session.layers[0].kv_cache
    assert cache is not None and (cache[unused] == 255).all(), "written to the block of another sequence"
    for block, end in ((7, 4), (3, 8), (11, 12)):  # each block keeps the state after its last token
        _, recurrent = session.layers[0].tensors(StatePlace(block, 0))
        torch.testing.assert_close(recurrent[0], tokens[0][:end].sum(0).double())
    first = session.model.layers[0].calls[1:]
    if forgets:  # the first tokens of a sequence have no state, and run together
        assert first[:5] == [(4, False), (1, True), (2, False), (1, True), (1, True)]
        assert len(first) == 2 + 24 - 6
    else:
        assert first[:5] == [(4, False), (1, True), (2, False), (1, True), (2, True)]


def test_states_after_drafts_are_all_kept() -> None:
    """The next step continues from one of them."""
    session, tokens = Session(num_states=4), draw()
    tables = [[[7, 3, 11], [2, 9, 5]]] * 2
    session.step(tokens, (3, 5), tables)
    session.step(tokens, (4, 3), tables)
    session.done[:] = (5, 8)
    rows, _, _ = session.step(tokens, (1, 1), tables)
    torch.testing.assert_close(rows[0, 0], truth(tokens[0])[5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows[0, 1], truth(tokens[1])[8], rtol=1e-5, atol=1e-5)


def test_a_block_that_is_not_kept_is_not_written() -> None:
    session, tokens = Session(), draw()
    tables = [[[DUMMY_BLOCK, DUMMY_BLOCK, 11], [2, 9, 5]]] * 2
    rows, _, _ = session.step(tokens, (9, 0), tables)
    torch.testing.assert_close(rows[0], truth(tokens[0][:9]), rtol=1e-5, atol=1e-5)
    cache = session.layers[0].kv_cache
    assert cache is not None and (cache[DUMMY_BLOCK] == 255).all()
    assert session.model.layers[0].calls[1:] == [(9, False)]


def test_only_tensors_with_a_row_for_each_token_are_cut() -> None:
    session, tokens = Session(), draw()
    for extra, wanted in (
        (torch.arange(10)[None], [list(range(4)), [4, 5], list(range(6, 10))]),
        (
            torch.arange(20).view(1, 10, 2),
            [[[2 * i, 2 * i + 1] for i in part] for part in (range(4), (4, 5), range(6, 10))],
        ),
        (torch.arange(10), [list(range(10))] * 3),  # one dimension: of something else
        (torch.arange(9)[None], [[list(range(9))]] * 3),
        (torch.arange(20).view(2, 10), [[list(range(10)), list(range(10, 20))]] * 3),
    ):
        session.done[:] = 0
        session.model.layers[0].given.clear()
        session.step(tokens, (6, 4), TABLES, extra={"nested": [extra, 5]})
        given = [each["nested"] for each in session.model.layers[0].given]
        found = [each[0].tolist() for each in given]
        assert found == [[part] if extra.dim() > 1 and extra.shape[:2] == (1, 10) else part for part in wanted]
        assert [each[1] for each in given] == [5, 5, 5]


def test_layers_that_are_left_out_give_zeros() -> None:
    session, tokens = Session(), draw()
    session.step(tokens, (2, 2), TABLES)
    arenas = [layer.kv_cache.clone() for layer in session.layers if layer.kv_cache is not None]
    rows, none, text = session.step(tokens, (3, 2), TABLES, layers=[0])
    assert rows.shape == (1, 5, WIDTH) and not rows.any() and none is None and text == "text"
    are_kept = [
        layer.kv_cache is not None and layer.kv_cache.equal(old)
        for layer, old in zip(session.layers, arenas, strict=True)
    ]
    assert are_kept == [False, True]


def test_outside_of_steps_the_modules_are_those_of_transformers() -> None:
    session, tokens = Session(), draw()
    session.step(tokens, (2, 2), TABLES)
    session.states.begin_recording()
    rows, _, _ = session.model(tokens[0][None], session.states)
    torch.testing.assert_close(rows[0], truth(tokens[0]), rtol=1e-5, atol=1e-5)


def test_keys_and_values_are_not_kept_in_the_cache_of_states() -> None:
    states, keys, values = Session().states, torch.zeros(1, 2, 5, 8), torch.ones(1, 2, 5, 8)
    assert all(a is b for a, b in zip(states.update(keys, values, 3), (keys, values), strict=True))
    assert states.update(values, keys, 3, {"cache_position": None})[0] is values
    assert states.get_seq_length() == states.get_seq_length(3) == 0 and states.get_mask_sizes(5, 3) == (5, 0)


class Writer(nn.Module):
    def forward(self, cache: Any, name: str) -> None:
        getattr(cache, name)(torch.zeros(1, WIDTH, 2), 0)


class User(Writer):
    """Calls one method of the cache. The module in it writes what is only read here."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Writer()

    def forward(self, cache: Any, name: str) -> None:
        if name.startswith("update"):
            return super().forward(cache, name)
        getattr(cache, name)(0)
        self.inner(cache, name.replace("get", "update"))


@pytest.mark.parametrize(
    "name", ["get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"]
)
def test_a_module_that_reads_or_writes_a_state_gets_a_state(name: str) -> None:
    model: Any = Model()
    model.layers[0] = User()
    attention: Any = PackedAttention(model, TorchSdpaBackend(), 64)
    attention.record(lambda: model.layers[0](attention.states, name))
    assert list(attention.layers) == ["layers.0"] and attention.layers["layers.0"].offsets == [0, 64]


class Both(Sum):
    def forward(self, hidden: Tensor, cache: Any, *, extra: object = None) -> tuple[Tensor, None, str]:
        Heads(6).attend(self.inner if extra else self, mask())
        return super().forward(hidden, cache)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_module_with_both_a_state_and_attention_is_refused(is_inside: bool) -> None:
    model: Any = Model()
    model.layers[0] = Both(0)
    attention: Any = PackedAttention(model, TorchSdpaBackend(), 64)
    with pytest.raises(UnsupportedModelError, match=r"^layers.0 has both a recurrent state and attention"):
        attention.record(lambda: model(torch.zeros(1, 6, WIDTH), attention.states, extra=is_inside))


class Beside(nn.Module):
    """Its name begins with that of a module with a state."""

    def forward(self) -> None:
        Heads(6).attend(self, mask())


def test_attention_beside_a_state_is_in_the_order_of_the_model() -> None:
    model: Any = Model()
    model.layers_0 = Beside()
    model.layers = nn.ModuleDict({"1": Sum(1), "0": Sum(0), "00": Beside()})
    attention: Any = PackedAttention(model, TorchSdpaBackend(), 64)

    def run() -> None:
        model.layers["00"](), model.layers["0"](torch.zeros(1, 6, WIDTH), attention.states)
        model.layers_0(), model.layers["1"](torch.zeros(1, 6, WIDTH), attention.states)

    attention.record(run)
    assert list(attention.layers) == ["layers.1", "layers.0", "layers.00", "layers_0"]


@pytest.mark.parametrize(
    ("kinds", "is_stateful", "wanted"),
    [
        (None, False, False),
        (["full_attention", "sliding_attention"], False, False),
        (["full_attention", "conv"], False, True),
        (["mamba"], False, True),
        (None, True, True),
        ([], True, True),
    ],
)
def test_kinds_of_layers_say_whether_there_may_be_states(kinds: Any, is_stateful: bool, wanted: bool) -> None:
    text = SimpleNamespace() if kinds is None else SimpleNamespace(layer_types=kinds)
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), _is_stateful=is_stateful)
    assert is_recurrent(model) == wanted
