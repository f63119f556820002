"""Every message survives the wire as it was; bytes that are no message are a `CodecError`, and nothing else."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config.mixers import MIXER_KINDS, ShortConvSpec
from inflight.config.vision import VISION_KINDS
from inflight.errors import CodecError
from inflight.interface.codec import INLINE_BYTES, MESSAGE_TYPES, Decoder, Message, encode
from inflight.interface.framing import MAX_FRAME_BYTES, READ_AHEAD_BYTES, Frame, FrameReader
from inflight.interface.messages import ExecuteModel, RpcCall, RpcReply, StepReply
from inflight.interface.serving import StartEngine
from inflight.interface.start_up import Hello, Ready, Stop
from tests.conformance.configs import plan
from tests.unit.interface.strategies import MESSAGES, MIXERS, TOWERS, config_with, messages, same


def wire(message: Message) -> bytes:
    return b"".join(bytes(buffer) for buffer in encode(message).buffers())


def read(data: bytes, piece: int = 2**20, **options: Any) -> list[Message]:
    """All messages in `data`, received in pieces of at most `piece` bytes."""
    reader, decoder, found = FrameReader(**options), Decoder(), []
    while data:
        buffer = reader.buffer()
        count = min(piece, len(buffer), len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        found += [decoder.decode(frame) for frame in reader.received(count)]
    return found


def rpc(value: Any) -> RpcReply:
    return RpcReply(epoch=0, call_id=0, rank=0, value=value)


# -- round trips -------------------------------------------------------------------------------------------------------


@given(messages(), st.sampled_from([1, 7, 1000, 2**20]), st.booleans())
def test_every_message_survives_the_wire(message: Message, piece: int, read_ahead: bool) -> None:
    data = wire(message)
    if len(data) > 3000:
        piece = max(piece, 1000)
    (found,) = read(data, piece, read_ahead=read_ahead)
    assert same(found, message)


@settings(max_examples=20)
@given(messages(), messages(), messages())
def test_messages_come_in_order_however_they_are_cut(first: Message, second: Message, third: Message) -> None:
    several = [first, second, third]
    data = b"".join(wire(message) for message in several)
    for piece in (977, 2**20):
        found = read(data, piece)
        assert len(found) == len(several)
        assert all(map(same, found, several))


def test_the_strategies_cover_all_messages() -> None:
    assert set(MESSAGES) == set(MESSAGE_TYPES)
    assert {mixer.kind: type(mixer) for mixer in MIXERS} == MIXER_KINDS
    assert {tower.kind: type(tower) for tower in TOWERS} == VISION_KINDS


def test_large_arrays_travel_beside_the_frame_and_are_not_copied() -> None:
    small, large = np.arange(INLINE_BYTES, dtype=np.uint8), np.arange(INLINE_BYTES + 1).astype(np.uint8)
    frame = encode(rpc([small, large, small]))
    assert [len(segment) for segment in frame.segments] == [len(large)]
    assert np.shares_memory(frame.segments[0], large)
    assert len(frame.body) < 3 * INLINE_BYTES
    twice = encode(rpc([large, large[:], large[1:], large.copy()]))  # the same memory twice, a part of it, equal memory
    assert [len(segment) for segment in twice.segments] == [len(large)] * 2  # the part is in the body
    answer = Decoder().decode(twice)
    assert isinstance(answer, RpcReply)
    first, again, part, other = answer.value
    assert np.shares_memory(first, again) and not np.shares_memory(again, other)
    assert same([first, again, part, other], [large, large, large[1:], large])
    reader = FrameReader()
    big = np.arange(READ_AHEAD_BYTES * 8, dtype=np.int64)
    data = wire(rpc(big))
    tracemalloc.start()
    for start in range(0, len(data), 10_000):
        rest = data[start : start + 10_000]
        while rest:
            buffer = reader.buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
            frames = reader.received(count)
    (message,) = [Decoder().decode(frame) for frame in frames]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(message, RpcReply)
    assert same(message.value, big)
    assert peak < 1.2 * big.nbytes  # once, where it lies now


def test_arrays_can_be_written_to_and_are_aligned() -> None:
    (found,) = read(wire(rpc([np.zeros(3), np.zeros(10_000, np.float32), np.zeros(0, np.int16)])))
    assert isinstance(found, RpcReply)
    for array in found.value:
        array += 1
        assert array.flags.aligned
        assert array.flags.writeable


def test_a_step_is_a_few_hundred_bytes() -> None:
    assert len(wire(ExecuteModel(epoch=0, scheduler_output=plan(3)))) < 350


# -- what cannot be sent -------------------------------------------------------------------------------------------------


class _Color(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1, 2}, "set cannot cross"),
        (object(), "object cannot cross"),
        (np.int64(3), "numpy.int64 cannot cross"),
        (_Color.RED, "_Color cannot cross"),
        (lambda: 0, "function cannot cross"),
        ([1, {"a": (b"", 1j)}], "complex cannot cross"),
        (np.array([object()]), "an array of object"),
        (np.array(["a"]), "an array of <U1"),
        (np.zeros(3, ">i4"), "an array of >i4"),
        (np.zeros((1,) * 9), "9 dimensions"),
        (2**64, "serialize ints"),
        ("\ud800", "surrogates"),
    ],
)
def test_what_is_no_plain_data_is_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        encode(rpc(value))
    with pytest.raises(CodecError, match=text):
        encode(RpcCall(epoch=0, call_id=0, method="f", args=(value,), kwargs={}))


def test_data_without_an_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CodecError):
        encode(rpc(endless))


def test_a_frame_has_a_largest_size() -> None:
    array = np.broadcast_to(np.zeros(1, np.uint8), (MAX_FRAME_BYTES + 1,))
    frame = Frame(0, b"", [array])
    with pytest.raises(CodecError, match="more than a frame holds"):
        frame.buffers()


# -- what cannot be read -----------------------------------------------------------------------------------------------


def assert_refused_or_read(data: bytes) -> None:
    try:
        read(data)
    except CodecError:
        return


@settings(max_examples=500)
@given(messages(), st.data())
def test_damaged_bytes_are_a_codec_error_and_nothing_else(message: Message, data: st.DataObject) -> None:
    damaged = bytearray(wire(message))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, min(len(damaged), 3000) - 1))
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    assert_refused_or_read(bytes(damaged))


@settings(max_examples=500)
@given(st.integers(0, 20), st.binary(max_size=200), st.lists(st.binary(max_size=40), max_size=3))
def test_lying_bodies_are_a_codec_error(kind: int, body: bytes, segments: list[bytes]) -> None:
    arrays = [np.frombuffer(segment, np.uint8).copy() for segment in segments]
    try:
        Decoder().decode(Frame(kind, body, arrays))
    except CodecError:
        return


RPC_REPLY = {"epoch": 0, "call_id": 0, "rank": 0}


def damaged_reply(value: object) -> Frame:
    """An `RpcReply` whose value's MessagePack is `value`."""
    return Frame(MESSAGE_TYPES.index(RpcReply), msgspec.msgpack.encode({**RPC_REPLY, "value": value}))


def array(*head: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(1, msgspec.msgpack.encode(head))


SEGMENT = [np.zeros(8, np.uint8)]


@pytest.mark.parametrize(
    ("value", "segments", "text"),
    [
        (array("|O", (4,), b"abcd"), [], "the dtype '.O'"),
        (array(99, (4,), b"abcd"), [], "Expected `str`, got `int`"),
        (array("|i1", (1,) * 200, b"a"), [], "length <= 8"),
        (array("|i1", (-4,), b"abcd"), [], "`int` >= 0"),
        (array("|i1", 4, b"abcd"), [], "Expected `array`, got `int`"),
        (array("|i1", (5,), b"abcd"), [], "in 4 bytes"),
        (array("|i1", (2**40, 2**40), b"abcd"), [], "in 4 bytes"),
        (array("<i8", (2**63, 2**63), b""), [], "in 0 bytes"),
        (array("|b1", (1,), b"\x02"), [], "neither 0 nor 1"),
        (array("|i1", (8,), 0), [], "segment 0 of 0"),
        (array("|i1", (8,), -1), SEGMENT, "segment -1 of 1"),
        (array("|i1", (8,), 1.5), SEGMENT, "got `float`"),
        ([0, array("|i1", (8,), 0), array("|i1", (8,), 1)], SEGMENT, "segment 1 of 1"),
        (None, SEGMENT, "a segment that none of its arrays refers to"),
        (msgspec.msgpack.Ext(7, b""), [], "extension 7"),
        (msgspec.msgpack.Ext(1, b""), [], "truncated"),
        ([9, 1], [], "tag 9"),
        ([], [], "tag None"),
        ({"a": 1}, [], "dict in plain data has no tag"),
        ([2, 1], [], "tag"),
        ([2, [0], 1], [], "unhashable"),
        ([3, "Path", {}], [], "tag"),
        ([3, "KVCacheSpec", {"block_size": "x"}], [], "Expected `int`"),
    ],
)
def test_a_lie_is_named(value: object, segments: list[Any], text: str) -> None:
    frame = damaged_reply(value)
    with pytest.raises(CodecError, match=text):
        Decoder().decode(Frame(frame.kind, frame.body, segments))


def test_dtypes_are_those_of_the_dataclass() -> None:
    sent = plan(0)
    object.__setattr__(sent, "slots", sent.slots.astype(np.int64))
    with pytest.raises(CodecError, match=r"int32 .*int64.*slots"):
        read(wire(ExecuteModel(epoch=0, scheduler_output=sent)))


@dataclass(frozen=True, kw_only=True)
class MadeUpMixer(ShortConvSpec):
    kind: Any = "made_up"


@pytest.mark.parametrize("kind", ["made_up", "", None, 3, ["attention"]])
def test_a_kind_that_is_not_known_is_named_with_its_place(kind: Any) -> None:
    config = config_with(*MIXERS, MadeUpMixer(kind=kind, num_channels=8, kernel_size=3))
    with pytest.raises(CodecError) as caught:
        read(wire(StartEngine(config=config, tokenizer=None, skip_tokenizer_init=True)))
    assert repr(kind) in str(caught.value) and "latent_attention" in str(caught.value)
    assert "`$.config.model.architecture.layers[4].mixer`" in str(caught.value)


def test_a_field_of_another_kind_is_refused() -> None:
    config = config_with(MadeUpMixer(kind="gated_delta", num_channels=8, kernel_size=3))
    with pytest.raises(CodecError, match="num_key_heads"):
        read(wire(StartEngine(config=config, tokenizer=None, skip_tokenizer_init=True)))


def test_a_step_reply_has_one_result() -> None:
    kind = MESSAGE_TYPES.index(StepReply)
    with pytest.raises(CodecError, match="an output or a failure"):
        Decoder().decode(Frame(kind, msgspec.msgpack.encode({"epoch": 0, "step_id": 0, "rank": 0})))


def test_a_damaged_frame_does_not_spoil_the_decoder() -> None:
    decoder = Decoder()
    with pytest.raises(CodecError):
        decoder.decode(Frame(MESSAGE_TYPES.index(RpcReply), b"\x95\x00", SEGMENT))
    assert decoder.decode(encode(rpc(5))) == rpc(5)


def header(kind: int = 0, num_segments: int = 0, body_size: int = 0, magic: bytes = b"InFl") -> bytes:
    return struct.pack("<4sBxHI", magic, kind, num_segments, body_size)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (header(magic=b"GET "), "does not speak our protocol"),
        (header(body_size=MAX_FRAME_BYTES + 1), "at most"),
        (header(num_segments=1) + struct.pack("<Q", MAX_FRAME_BYTES + 1), "at most"),
        (header(num_segments=3, body_size=9) + struct.pack("<3Q", 2**63, 2**63, 5), "at most"),
        (header(kind=200), "kind 200"),
    ],
)
def test_a_header_is_checked_before_anything_is_allocated(data: bytes, text: str) -> None:
    tracemalloc.start()
    with pytest.raises(CodecError, match=text):
        read(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_deep_nesting_ends() -> None:
    for body in (b"\x91" * 100_000, msgspec.msgpack.encode(RPC_REPLY | {"value": 0})[:-1] + b"\x92\x00" * 100_000):
        with pytest.raises(CodecError):
            Decoder().decode(Frame(MESSAGE_TYPES.index(RpcReply), body))


def test_a_stranger_may_say_hello_only() -> None:
    hello = Hello(schema="1", rank=0, world_size=2, nnodes=2)
    assert Decoder().decode(encode(hello), (Hello,)) == hello
    for message in (Stop(), Ready(rank=0), rpc(5)):
        with pytest.raises(CodecError, match="expected one of Hello"):
            Decoder().decode(encode(message), (Hello,))
    with pytest.raises(CodecError, match="at most 4096"):
        read(wire(Hello(schema="1" * 5000, rank=0, world_size=2, nnodes=2)), max_frame_bytes=4096)


def test_small_frames_are_read_many_at_a_time() -> None:
    reader, data = FrameReader(), wire(Stop()) * 100
    buffer = reader.buffer()
    assert len(buffer) == READ_AHEAD_BYTES
    buffer[: len(data)] = data
    assert len(reader.received(len(data))) == 100


def test_nothing_behind_a_frame_is_read_without_read_ahead() -> None:
    data = wire(rpc(np.zeros(5000))) + wire(Stop())
    reader, position = FrameReader(read_ahead=False), 0
    frames: list[Frame] = []
    while not frames:
        buffer = reader.buffer()
        buffer[:] = data[position : position + len(buffer)]
        position += len(buffer)
        frames = reader.received(len(buffer))
    assert data[position:] == wire(Stop())


FIRST_USES = """
import os, sys, threading
import msgspec
from inflight.interface.codec import MESSAGE_TYPES, Decoder, _VALUE_TYPES, _unpack
from inflight.structured_output.structural_tag import _Document

def use(barrier):
    decoder = Decoder()
    barrier.wait()
    for kind in range(len(MESSAGE_TYPES)):
        try:
            decoder._decoder(kind).decode(b"\\x80")
        except msgspec.ValidationError:
            pass
    for name in _VALUE_TYPES:
        try:
            _unpack([3, name, {}], decoder._check_type)
        except msgspec.ValidationError:
            pass
    try:
        msgspec.convert({"structures": [{}]}, _Document)
    except msgspec.ValidationError:
        pass

for _ in range(8):
    process = os.fork()
    if not process:
        sys.setswitchinterval(1e-6)
        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=use, args=(barrier,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


def test_threads_that_decode_a_class_for_the_first_time_do_not_crash() -> None:
    """An engine core has a receiving thread for each front end. msgspec 0.22 crashed seven of eight such processes."""
    ended = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
