"""The wire codec: messages to frames and back, typed and validated. The only file that knows msgspec. No pickle.

A frame's kind is the place of the message's class in `MESSAGE_TYPES`. Its body is the MessagePack of the message. The decoder
checks it against the annotations of the class, and raises a `CodecError`, and no other exception, if it does not fit. An array
is an extension of MessagePack that holds an `_Array`. The bytes of a large array lie in a segment beside the body.

The arguments and values of calls are typed Any. They are trees of plain data. MessagePack does not tell a tuple from a list,
and knows no dataclass, so each container in such a tree is a list that begins with a `_Tag`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from inflight.errors import CodecError
from inflight.interface.framing import ByteArray, Frame
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.interface.messages import AskActivity, RpcCall, RpcReply, WorkerCommand, WorkerReply
from inflight.interface.serving import ServingMessage
from inflight.interface.start_up import StartUpMessage
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.timeline import Event

INLINE_BYTES = 4096  # the most bytes of an array that lie in the body
MAX_NDIM = 8

Array = npt.NDArray[Any]  # Any: one of _DTYPES
_DTYPES = {  # by their names in the array protocol: "<i4" is int32
    np.dtype(name).str: np.dtype(name)
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
}
_ARRAY = 1  # extension code

# dataclasses that arguments and values of calls may hold
_VALUE_TYPES = {
    cls.__name__: cls for cls in (KVCacheSpec, KVCacheGroup, KVCacheConfig, SchedulerOutput, ModelRunnerOutput, Event)
}
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes, np.ndarray})

Message = WorkerCommand | WorkerReply | AskActivity | StartUpMessage | ServingMessage
MESSAGE_TYPES: tuple[type, ...] = get_args(Message)
_KINDS = {message_type: kind for kind, message_type in enumerate(MESSAGE_TYPES)}


class _Tag(IntEnum):
    """The first entry of a list in a tree of plain data."""

    LIST = 0
    TUPLE = 1
    DICT = 2  # key, value, key, value, ...
    DATACLASS = 3  # name, fields


class _Array(msgspec.Struct, array_like=True):
    dtype: str  # one of _DTYPES
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_NDIM)]
    data: bytearray | int  # the bytes, or the index of their segment


_array_encoder = msgspec.msgpack.Encoder()
_array_decoder = msgspec.msgpack.Decoder(_Array)


def schema_digest() -> str:
    """Returns a digest that is equal for two versions only if messages, fields, annotations and their order are equal."""
    seen: dict[str, str] = {}
    queue: list[Any] = [*MESSAGE_TYPES, *_VALUE_TYPES.values()]
    for kind in queue:
        if not is_dataclass(kind):
            queue += get_args(kind)
        elif repr(kind) not in seen:
            seen[repr(kind)] = repr(kind.__annotations__)
            queue += get_type_hints(kind).values()
    return hashlib.sha256(repr(list(seen.items())).encode()).hexdigest()


# -- messages to frames --------------------------------------------------------------------------------------------


def encode(message: Message) -> Frame:
    """Make a frame. Its segments are the message's own arrays: they must not change until the frame is sent.

    Raises:
        CodecError: an argument or value of a call is not plain data. The error names its type.
    """
    segments: list[ByteArray] = []
    try:
        body = msgspec.msgpack.Encoder(enc_hook=partial(_write, segments)).encode(_packed(message))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a large integer, a lone surrogate, ...
        raise CodecError(f"a {type(message).__name__} cannot be encoded: {error}") from error
    return Frame(_KINDS[type(message)], body, segments)


def _packed(message: Message) -> Message:
    match message:
        case RpcCall(args=args, kwargs=kwargs):
            return replace(
                message, args=tuple(map(_pack, args)), kwargs={key: _pack(value) for key, value in kwargs.items()}
            )
        case RpcReply(value=value):
            return replace(message, value=_pack(value))
    return message


def _write(segments: list[ByteArray], value: object) -> object:
    """Encodes the types that msgspec does not know. The bytes of a large array are appended to `segments`."""
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, np.ndarray):
        raise CodecError(f"{_name(type(value))} is no part of a message")
    dtype = value.dtype.str
    if dtype not in _DTYPES or value.ndim > MAX_NDIM:
        raise CodecError(
            f"an array of {value.dtype} with {value.ndim} dimensions cannot be sent; allowed are "
            f"{', '.join(map(str, _DTYPES.values()))} with up to {MAX_NDIM}"
        )
    if value.nbytes <= INLINE_BYTES:
        data: bytes | int = value.tobytes()
    else:
        segments.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        data = len(segments) - 1
    return msgspec.msgpack.Ext(_ARRAY, _array_encoder.encode((dtype, value.shape, data)))


def _pack(value: Any) -> Any:
    """Returns a value as a tree of plain data. Refuses subclasses, because the receiver would make the base class of them."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return value
    if kind is list:
        return [_Tag.LIST, *map(_pack, value)]
    if kind is tuple:
        return [_Tag.TUPLE, *map(_pack, value)]
    if kind is dict:
        return [_Tag.DICT, *(_pack(entry) for item in value.items() for entry in item)]
    if _VALUE_TYPES.get(kind.__name__) is kind:
        return [_Tag.DATACLASS, kind.__name__, value]
    raise CodecError(
        f"{_name(kind)} cannot cross a process boundary; allowed are None, bool, int, float, str, bytes, list, tuple, dict, "
        f"numpy arrays, {', '.join(_VALUE_TYPES)}"
    )


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


# -- frames to messages --------------------------------------------------------------------------------------------


class Decoder:
    """Reads frames. Not thread-safe: each thread that receives has its own."""

    def __init__(self) -> None:
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {}  # by kind, made when first needed
        self._dtypes: dict[Any, np.dtype[Any]] = {}  # annotation of an array -> its dtype
        self._segments: list[ByteArray | None] = []

    def decode(self, frame: Frame, allowed: Sequence[type] = MESSAGE_TYPES) -> Message:
        """Read a message. Its arrays own their memory, or the memory of the frame's segments, and can be written to.

        Raises:
            CodecError: the frame is damaged, or its type is not allowed now.
        """
        message_type = MESSAGE_TYPES[frame.kind] if frame.kind < len(MESSAGE_TYPES) else None
        if message_type is None or message_type not in allowed:
            name = f"kind {frame.kind}" if message_type is None else message_type.__name__
            expected = ", ".join(kind.__name__ for kind in allowed)
            raise CodecError(f"a frame of {name} came where one of {expected} was expected")
        self._segments = list(frame.segments)
        try:
            message = _unpacked(self._decoder(frame.kind).decode(frame.body), self._check_type)
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            raise CodecError(f"a frame that should be a {message_type.__name__} is damaged: {error}") from error
        if any(segment is not None for segment in self._segments):
            raise CodecError(f"a {message_type.__name__} came with segments that no array of it names")
        return message

    def _decoder(self, kind: int) -> msgspec.msgpack.Decoder[Any]:
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = msgspec.msgpack.Decoder(
                MESSAGE_TYPES[kind], ext_hook=self._read_extension, dec_hook=self._check_type
            )
            self._decoders[kind] = decoder
        return decoder

    def _read_extension(self, code: int, data: memoryview) -> Array:
        if code != _ARRAY:
            raise ValueError(f"extension {code} is unknown")
        array = _array_decoder.decode(data)
        dtype = _DTYPES.get(array.dtype)
        if dtype is None:
            raise ValueError(f"an array of the dtype {array.dtype!r}")
        buffer = array.data if isinstance(array.data, bytearray) else self._take_segment(array.data)
        if math.prod(array.shape) * dtype.itemsize != len(buffer):
            raise ValueError(f"an array of {dtype} with shape {array.shape} in {len(buffer)} bytes")
        flat = np.frombuffer(buffer, dtype=np.uint8)
        if dtype == np.bool_ and len(flat) and flat.max() > 1:
            raise ValueError("a bool that is neither 0 nor 1")
        shaped: Array = flat.view(dtype).reshape(array.shape)
        return shaped

    def _take_segment(self, index: int) -> ByteArray:
        segment = self._segments[index] if 0 <= index < len(self._segments) else None
        if segment is None:
            raise ValueError(f"segment {index} of {len(self._segments)} is missing or taken twice")
        self._segments[index] = None
        return segment

    def _check_type(self, wanted: Any, value: object) -> object:
        """msgspec calls this for the types that it does not know. The dataclass says that the value must be a `wanted`."""
        if wanted is Path:
            if not isinstance(value, str):
                raise ValueError(f"a path is text, not {type(value).__name__}")
            return Path(value)
        dtype = self._dtypes.get(wanted)
        if dtype is None:
            dtype = self._dtypes[wanted] = np.dtype(get_args(get_args(wanted)[1])[0])
        if not isinstance(value, np.ndarray) or value.dtype != dtype:
            raise ValueError(f"an array of {dtype} is expected, not {getattr(value, 'dtype', type(value).__name__)}")
        return value


def _unpacked(message: Message, dec_hook: Callable[[Any, object], object]) -> Message:
    """The inverse of `_packed`."""
    match message:
        case RpcCall():
            args = tuple(_unpack(value, dec_hook) for value in message.args)
            kwargs = {key: _unpack(value, dec_hook) for key, value in message.kwargs.items()}
            return replace(message, args=args, kwargs=kwargs)
        case RpcReply():
            return replace(message, value=_unpack(message.value, dec_hook))
    return message


def _unpack(tree: Any, dec_hook: Callable[[Any, object], object]) -> Any:
    """The inverse of `_pack`."""
    if not isinstance(tree, list):
        if type(tree) not in _PLAIN_TYPES:
            raise ValueError(f"{type(tree).__name__} without a tag")
        return tree
    tag, entries = (tree[0], tree[1:]) if tree else (None, [])
    if tag == _Tag.DATACLASS and len(entries) == 2 and entries[0] in _VALUE_TYPES:
        return msgspec.convert(entries[1], _VALUE_TYPES[entries[0]], dec_hook=dec_hook)
    values = [_unpack(entry, dec_hook) for entry in entries]
    if tag == _Tag.LIST:
        return values
    if tag == _Tag.TUPLE:
        return tuple(values)
    if tag == _Tag.DICT and len(values) % 2 == 0:
        return dict(zip(values[::2], values[1::2], strict=True))
    raise ValueError(f"no plain data begins with the tag {tag!r}")
