"""Encodes messages between processes as frames of bytes, and decodes and checks received frames. Nothing is pickled.

A frame (framing.py) has a kind, a body and segments. The kind is the index of the message's class in `MESSAGE_TYPES`. The body
is the message in MessagePack, a binary relative of JSON. The decoder checks the body against the annotations of the class. If
the body is not valid, the decoder raises a `CodecError`, and no other exception. In the body, an array is an extension of
MessagePack that holds an `_Array`. The bytes of a large array are not in the body, but in a segment of the frame. Arrays that
are the same memory, such as the prompt of n sequences in a plan, have one segment. They share memory at the receiver, too.

The arguments and results of remote calls (`RpcCall`, `RpcReply`) are typed Any. They are trees of plain data. MessagePack does
not distinguish a tuple from a list, and has no dataclasses. So each container or dataclass in such a tree is sent as a list.
The first entry of the list, a `_Tag`, says what the list is.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from inflight.config.architecture import MlpSpec
from inflight.config.mixers import MIXER_KINDS, MixerSpec
from inflight.config.mlp_kinds import MLP_KINDS
from inflight.config.vision import VISION_KINDS, VisionSpec
from inflight.errors import CodecError
from inflight.interface.framing import ByteArray, Frame
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.interface.messages import AskActivity, RpcCall, RpcReply, WorkerCommand, WorkerReply
from inflight.interface.part_kinds import PART_KINDS, RESULT_KINDS
from inflight.interface.parts import PartResult, RequestPart
from inflight.interface.serving import ServingMessage
from inflight.interface.start_up import StartUpMessage
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.timeline import Event

INLINE_BYTES = 4096  # the bytes of larger arrays are sent in a segment, not in the body
MAX_NDIM = 8

Array = npt.NDArray[Any]  # Any: one of _DTYPES
_DTYPES = {  # numpy's name of a dtype -> the dtype; the name of int32 is "<i4"
    np.dtype(name).str: np.dtype(name)
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
}
_ARRAY = 1  # the code of arrays among MessagePack's extensions

# A base class that is no dataclass -> its subclasses, by their field `kind`. Where an annotation names the base class, the
# value is of one of these subclasses.
_UNIONS: Mapping[object, Mapping[str, type]] = {
    MixerSpec: MIXER_KINDS,
    MlpSpec: MLP_KINDS,
    VisionSpec: VISION_KINDS,
    RequestPart: PART_KINDS,
    PartResult: RESULT_KINDS,
}

# dataclasses that arguments and results of remote calls may contain
_VALUE_TYPES = {
    cls.__name__: cls for cls in (KVCacheSpec, KVCacheGroup, KVCacheConfig, SchedulerOutput, ModelRunnerOutput, Event)
}
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes, np.ndarray})

Message = WorkerCommand | WorkerReply | AskActivity | StartUpMessage | ServingMessage
MESSAGE_TYPES: tuple[type, ...] = get_args(Message)
_KINDS = {message_type: kind for kind, message_type in enumerate(MESSAGE_TYPES)}


class _Tag(IntEnum):
    """The first entry of a list in a tree of plain data. It says which container or class was packed as this list."""

    LIST = 0
    TUPLE = 1
    DICT = 2  # the other entries are: key, value, key, value, ...
    DATACLASS = 3  # the other entries are: the name of the class, its fields


class _Array(msgspec.Struct, array_like=True):
    dtype: str  # one of _DTYPES
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_NDIM)]
    data: bytearray | int  # the bytes, or the index of the segment that contains them


_array_decoder = msgspec.msgpack.Decoder(_Array)
# msgspec learns the fields of a class at its first use. A second thread that uses the class meanwhile crashes the process
# (SIGSEGV, msgspec 0.22). Any call of `msgspec.convert` may be a first use, so each call holds this lock.
_first_use = threading.RLock()


def schema_digest() -> str:
    """Returns a digest of all message classes with their fields and annotations. Two versions of Inflight whose messages
    differ have different digests."""
    seen: dict[str, str] = {}
    queue: list[Any] = [*MESSAGE_TYPES, *_VALUE_TYPES.values()]
    for kind in queue:
        if not is_dataclass(kind):
            queue += [*get_args(kind), *_UNIONS.get(kind, {}).values()]
        elif repr(kind) not in seen:
            seen[repr(kind)] = repr([(each.name, each.type) for each in fields(kind)])
            queue += get_type_hints(kind).values()
    return hashlib.sha256(repr(list(seen.items())).encode()).hexdigest()


# -- messages to frames --------------------------------------------------------------------------------------------


def encode(message: Message) -> Frame:
    """Make a frame. Its segments may be the memory of the message's arrays, so the arrays must not change until the frame is
    sent.

    Raises:
        CodecError: the message contains something that cannot be sent, for example an argument that is not plain data.
    """
    segments: dict[tuple[int, int], tuple[int, ByteArray]] = {}  # address and size of an array -> index, bytes
    try:
        body = msgspec.msgpack.Encoder(enc_hook=partial(_write, segments)).encode(_packed(message))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # e.g. an integer of more than 64 bits
        raise CodecError(f"a {type(message).__name__} cannot be encoded: {error}") from error
    return Frame(_KINDS[type(message)], body, [segment for _, segment in segments.values()])


def _packed(message: Message) -> Message:
    match message:
        case RpcCall(args=args, kwargs=kwargs):
            return replace(
                message, args=tuple(map(_pack, args)), kwargs={key: _pack(value) for key, value in kwargs.items()}
            )
        case RpcReply(value=value):
            return replace(message, value=_pack(value))
    return message


def _write(segments: dict[tuple[int, int], tuple[int, ByteArray]], value: object) -> object:
    """Encodes the types that msgspec does not know. The bytes of a large array are added to `segments`."""
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, np.ndarray):
        raise CodecError(f"a message cannot contain a value of type {_name(type(value))}")
    dtype = value.dtype.str
    if dtype not in _DTYPES or value.ndim > MAX_NDIM:
        raise CodecError(
            f"an array of {value.dtype} with {value.ndim} dimensions cannot be sent; allowed are "
            f"{', '.join(map(str, _DTYPES.values()))} with up to {MAX_NDIM} dimensions"
        )
    if value.nbytes <= INLINE_BYTES:
        data: bytes | int = value.tobytes()
    else:
        segment = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        data, _ = segments.setdefault((segment.ctypes.data, segment.nbytes), (len(segments), segment))
    return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode((dtype, value.shape, data)))


def _pack(value: Any) -> Any:
    """Returns a value as a tree of plain data. Refuses objects of subclasses, because the receiver could make only an object of
    the base class."""
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
        f"a value of type {_name(kind)} cannot cross a process boundary; allowed are None, bool, int, float, str, bytes, list, "
        f"tuple, dict, numpy arrays, {', '.join(_VALUE_TYPES)}"
    )


def _name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__name__
    return f"{kind.__module__}.{kind.__name__}"


# -- frames to messages --------------------------------------------------------------------------------------------


class Decoder:
    """Makes messages from frames. Not thread-safe: each thread that receives has a decoder of its own."""

    def __init__(self) -> None:
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {}  # kind of a frame -> its decoder, made when needed
        self._dtypes: dict[Any, np.dtype[Any]] = {}  # annotation of an array -> its dtype
        self._segments: Sequence[ByteArray] = ()
        self._unused: set[int] = set()  # indices of the segments that no array has referred to

    def decode(self, frame: Frame, allowed: Sequence[type] = MESSAGE_TYPES) -> Message:
        """Read a message. Its arrays can be written to. A large array uses the memory of its segment.

        Raises:
            CodecError: the frame is damaged, or its message is of a class that is not in `allowed`.
        """
        message_type = MESSAGE_TYPES[frame.kind] if frame.kind < len(MESSAGE_TYPES) else None
        if message_type is None or message_type not in allowed:
            name = f"kind {frame.kind}" if message_type is None else message_type.__name__
            expected = ", ".join(kind.__name__ for kind in allowed)
            raise CodecError(f"received a frame of {name}; expected one of {expected}")
        self._segments = frame.segments
        self._unused = set(range(len(frame.segments)))
        try:
            message = _unpacked(self._decoder(frame.kind).decode(frame.body), self._check_type)
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            raise CodecError(f"a frame of {message_type.__name__} is damaged: {error}") from error
        if self._unused:
            raise CodecError(f"a frame of {message_type.__name__} has a segment that none of its arrays refers to")
        return message

    def _decoder(self, kind: int) -> msgspec.msgpack.Decoder[Any]:
        if kind not in self._decoders:
            with _first_use:
                self._decoders[kind] = msgspec.msgpack.Decoder(
                    MESSAGE_TYPES[kind], ext_hook=self._read_extension, dec_hook=self._check_type
                )
        return self._decoders[kind]

    def _read_extension(self, code: int, data: memoryview) -> Array:
        if code != _ARRAY:
            raise ValueError(f"extension {code} is unknown")
        array = _array_decoder.decode(data)
        dtype = _DTYPES.get(array.dtype)
        if dtype is None:
            raise ValueError(f"an array has the dtype {array.dtype!r}, which is not known")
        buffer = array.data if isinstance(array.data, bytearray) else self._segment(array.data)
        if math.prod(array.shape) * dtype.itemsize != len(buffer):
            raise ValueError(f"an array of {dtype} with shape {array.shape} cannot be in {len(buffer)} bytes")
        flat = np.frombuffer(buffer, dtype=np.uint8)
        if dtype == np.bool_ and len(flat) and flat.max() > 1:
            raise ValueError("an array of bool has a byte that is neither 0 nor 1")
        shaped: Array = flat.view(dtype).reshape(array.shape)
        return shaped

    def _segment(self, index: int) -> ByteArray:
        if not 0 <= index < len(self._segments):
            raise ValueError(f"an array refers to segment {index} of {len(self._segments)}, which is missing")
        self._unused.discard(index)
        return self._segments[index]

    def _check_type(self, wanted: Any, value: object) -> object:
        """msgspec calls this for a value whose annotation, `wanted`, it does not know: an array, a path or a union."""
        dtype = self._dtypes.get(wanted)
        if dtype is None:
            if wanted is Path:
                if not isinstance(value, str):
                    raise ValueError(f"a path must be a string, not {type(value).__name__}")
                return Path(value)
            if wanted in _UNIONS:
                return self._read_union(wanted, value)
            dtype = self._dtypes[wanted] = np.dtype(get_args(get_args(wanted)[1])[0])
        if not isinstance(value, np.ndarray) or value.dtype != dtype:
            raise ValueError(f"an array of {dtype} is expected, not {getattr(value, 'dtype', type(value).__name__)}")
        return value

    def _read_union(self, base: type, value: object) -> object:
        kinds = _UNIONS[base]
        kind = value.get("kind") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise ValueError(f"a {base.__name__} has the kind {kind!r}; known are {', '.join(kinds)}")
        with _first_use:
            return msgspec.convert(value, kinds[kind], dec_hook=self._check_type)


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
            raise ValueError(f"a {type(tree).__name__} in plain data has no tag")
        return tree
    tag, entries = (tree[0], tree[1:]) if tree else (None, [])
    if tag == _Tag.DATACLASS and len(entries) == 2 and entries[0] in _VALUE_TYPES:
        with _first_use:
            return msgspec.convert(entries[1], _VALUE_TYPES[entries[0]], dec_hook=dec_hook)
    values = [_unpack(entry, dec_hook) for entry in entries]
    if tag == _Tag.LIST:
        return values
    if tag == _Tag.TUPLE:
        return tuple(values)
    if tag == _Tag.DICT and len(values) % 2 == 0:
        return dict(zip(values[::2], values[1::2], strict=True))
    raise ValueError(f"a list in plain data has the tag {tag!r} and {len(entries)} more entries, which is not valid")
