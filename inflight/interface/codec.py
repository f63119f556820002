"""The wire codec: messages to frames and back, typed and validated. The only file that knows msgspec. No pickle.

A message's body is MessagePack of its dataclass, decoded against the dataclass's own annotations: what does not fit them is a
`CodecError`, and no other exception. Arrays up to `INLINE_BYTES` lie in the body, larger ones are segments beside it:

    extension ARRAY:  dtype code u8 | ndim u8 | segment index u16, 0xFFFF: inline | shape u64 ... | bytes, if inline

What is typed Any (arguments and values of calls) is a tree of plain data, where what MessagePack cannot tell apart carries a
tag: `[tag, ...]`, see `_Tag`.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from inflight.errors import CodecError
from inflight.interface.framing import ByteArray, Frame
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.interface.messages import (
    AskActivity,
    ExecuteModel,
    ProvideGrammarOutput,
    RpcCall,
    RpcReply,
    StepReply,
    WorkerActivity,
    WorkerEvent,
    WorkerFailure,
)
from inflight.interface.serving import (
    AbortRequests,
    AddRequest,
    EngineDied,
    EngineOutputs,
    EngineReady,
    EngineStartFailed,
    PrefixCacheReset,
    ResetPrefixCache,
    StartEngine,
)
from inflight.interface.start_up import Hello, Ready, Refused, StartUp, StartUpFailed, Stop, Submitted, Welcome
from inflight.interface.step import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from inflight.timeline import Event

INLINE_BYTES = 4096
MAX_NDIM = 8

Array = npt.NDArray[Any]  # Any: one of _DTYPES

_DTYPES = tuple(
    np.dtype(name) for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_ARRAY = 1  # extension code
_ARRAY_HEAD = struct.Struct("<BBH")
_INLINE = 0xFFFF

# dataclasses that arguments and values of calls may hold
_VALUE_TYPES = {
    cls.__name__: cls
    for cls in (KVCacheSpec, KVCacheGroup, KVCacheConfig, KVConnectorOutput, SchedulerOutput, ModelRunnerOutput, Event)
}
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes, np.ndarray})

Message = (
    ExecuteModel
    | ProvideGrammarOutput
    | RpcCall
    | StepReply
    | RpcReply
    | WorkerEvent
    | AskActivity
    | WorkerActivity
    | Hello
    | Welcome
    | Refused
    | StartUp
    | Ready
    | StartUpFailed
    | Stop
    | Submitted
    | StartEngine
    | EngineReady
    | EngineStartFailed
    | AddRequest
    | AbortRequests
    | ResetPrefixCache
    | PrefixCacheReset
    | EngineOutputs
    | EngineDied
)


class _Tag(IntEnum):
    """The first entry of a list in a tree of plain data."""

    LIST = 0
    TUPLE = 1
    DICT = 2  # key, value, key, value, ...
    DATACLASS = 3  # name, fields


class _RpcCallBody(msgspec.Struct, array_like=True):
    epoch: int
    call_id: int
    method: str
    args: Any  # trees of plain data
    kwargs: Any


class _StepReplyBody(msgspec.Struct, array_like=True):
    epoch: int
    step_id: int
    rank: int
    output: ModelRunnerOutput | None  # exactly one of the two
    failure: WorkerFailure | None


class _RpcReplyBody(msgspec.Struct, array_like=True):
    epoch: int
    call_id: int
    rank: int
    value: Any  # a tree of plain data
    failure: WorkerFailure | None


# message -> what its body is; a frame's kind is the place in this table
_BODIES: dict[type, type] = {
    ExecuteModel: ExecuteModel,
    ProvideGrammarOutput: ProvideGrammarOutput,
    RpcCall: _RpcCallBody,
    StepReply: _StepReplyBody,
    RpcReply: _RpcReplyBody,
    WorkerEvent: WorkerEvent,
    AskActivity: AskActivity,
    WorkerActivity: WorkerActivity,
    Hello: Hello,
    Welcome: Welcome,
    Refused: Refused,
    StartUp: StartUp,
    Ready: Ready,
    StartUpFailed: StartUpFailed,
    Stop: Stop,
    Submitted: Submitted,
    StartEngine: StartEngine,
    EngineReady: EngineReady,
    EngineStartFailed: EngineStartFailed,
    AddRequest: AddRequest,
    AbortRequests: AbortRequests,
    ResetPrefixCache: ResetPrefixCache,
    PrefixCacheReset: PrefixCacheReset,
    EngineOutputs: EngineOutputs,
    EngineDied: EngineDied,
}
_KINDS = {message_type: kind for kind, message_type in enumerate(_BODIES)}
MESSAGE_TYPES: tuple[type, ...] = tuple(_BODIES)


def schema_digest() -> str:
    """Equal for two versions of Inflight only if all fields of all messages have the same names and annotations."""
    seen: dict[str, str] = {}
    queue: list[Any] = [*_BODIES.values(), *_VALUE_TYPES.values()]
    for kind in queue:
        if not (is_dataclass(kind) or kind in _BODIES.values()):
            queue += get_args(kind)
        elif kind.__name__ not in seen:
            seen[kind.__name__] = repr(kind.__annotations__)
            queue += get_type_hints(kind).values()
    return hashlib.sha256(repr(sorted(seen.items())).encode()).hexdigest()


# -- messages to frames --------------------------------------------------------------------------------------------


def encode(message: Message) -> Frame:
    """The frame's segments are the message's own arrays: they must not change until the frame is sent.

    Raises:
        CodecError: an argument or value of a call is no plain data. The message says of which type it is.
    """
    arrays = _ArrayWriter()
    try:
        body = msgspec.msgpack.Encoder(enc_hook=arrays.write).encode(_body_of(message))
    except (
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # too large an integer, a lone surrogate, ...
        raise CodecError(f"a {type(message).__name__} cannot be encoded: {error}") from error
    return Frame(_KINDS[type(message)], body, arrays.segments)


def _body_of(message: Message) -> object:
    match message:
        case RpcCall():
            args, kwargs = _pack(message.args), _pack(message.kwargs)
            return _RpcCallBody(message.epoch, message.call_id, message.method, args, kwargs)
        case RpcReply():
            value = _pack(message.value)
            return _RpcReplyBody(message.epoch, message.call_id, message.rank, value, message.failure)
        case StepReply(result=WorkerFailure() as failure):
            return _StepReplyBody(message.epoch, message.step_id, message.rank, None, failure)
        case StepReply(result=ModelRunnerOutput() as output):
            return _StepReplyBody(message.epoch, message.step_id, message.rank, output, None)
    return message


class _ArrayWriter:
    """msgspec's hook for what it does not know; collects the segments of one frame."""

    def __init__(self) -> None:
        self.segments: list[ByteArray] = []

    def write(self, value: object) -> object:
        if isinstance(value, np.ndarray):
            return msgspec.msgpack.Ext(_ARRAY, self._write_array(value))
        if isinstance(value, Path):
            return str(value)
        raise CodecError(f"{_name(type(value))} is no part of a message")

    def _write_array(self, array: Array) -> bytes:
        code = _DTYPE_CODES.get(array.dtype)
        if code is None or array.ndim > MAX_NDIM:
            raise CodecError(
                f"an array of {array.dtype} with {array.ndim} dimensions cannot be sent; allowed are "
                f"{', '.join(map(str, _DTYPES))} with up to {MAX_NDIM}"
            )
        shape = struct.pack(f"<{array.ndim}Q", *array.shape)
        if array.nbytes <= INLINE_BYTES:
            return _ARRAY_HEAD.pack(code, array.ndim, _INLINE) + shape + array.tobytes()
        head = _ARRAY_HEAD.pack(code, array.ndim, len(self.segments)) + shape
        self.segments.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        if len(self.segments) >= _INLINE:
            raise CodecError(f"a message holds {_INLINE} arrays of more than {INLINE_BYTES} bytes; send it in parts")
        return head


def _pack(value: Any) -> Any:
    """A value as a tree of plain data. Exact types: of a subclass the receiver would make something else."""
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


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


# -- frames to messages --------------------------------------------------------------------------------------------


class Decoder:
    """Reads frames. Not thread-safe: one for each thread that receives."""

    def __init__(self) -> None:
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {}  # by kind, made when first needed
        self._dtypes: dict[Any, np.dtype[Any]] = {}  # annotation of an array -> its dtype
        self._segments: list[ByteArray | None] = []

    def decode(self, frame: Frame, allowed: Sequence[type] = MESSAGE_TYPES) -> Message:
        """The arrays of the message own their memory, or that of the frame's segments, and can be written to.

        Raises:
            CodecError: the frame is damaged, or of a type that is not allowed now.
        """
        message_type = MESSAGE_TYPES[frame.kind] if frame.kind < len(MESSAGE_TYPES) else None
        if message_type is None or message_type not in allowed:
            name = f"kind {frame.kind}" if message_type is None else message_type.__name__
            expected = ", ".join(kind.__name__ for kind in allowed)
            raise CodecError(f"a frame of {name} came where one of {expected} was expected")
        self._segments = list(frame.segments)
        try:
            message = self._message_of(self._decoder(frame.kind, _BODIES[message_type]).decode(frame.body))
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            raise CodecError(f"a frame that should be a {message_type.__name__} is damaged: {error}") from error
        if any(segment is not None for segment in self._segments):
            raise CodecError(f"a {message_type.__name__} came with segments that no array of it names")
        return message

    def _message_of(self, body: Any) -> Message:
        match body:
            case _RpcCallBody():
                args, kwargs = self._unpack(body.args), self._unpack(body.kwargs)
                if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not all(map(_is_text, kwargs)):
                    raise ValueError("arguments are a tuple and a dict of names")
                return RpcCall(epoch=body.epoch, call_id=body.call_id, method=body.method, args=args, kwargs=kwargs)
            case _StepReplyBody():
                results = [result for result in (body.output, body.failure) if result is not None]
                if len(results) != 1:
                    raise ValueError("a step has an output or a failure")
                return StepReply(epoch=body.epoch, step_id=body.step_id, rank=body.rank, result=results[0])
            case _RpcReplyBody():
                value = self._unpack(body.value)
                return RpcReply(
                    epoch=body.epoch, call_id=body.call_id, rank=body.rank, value=value, failure=body.failure
                )
        message: Message = body
        return message

    def _decoder(self, kind: int, body: type) -> msgspec.msgpack.Decoder[Any]:
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = msgspec.msgpack.Decoder(body, ext_hook=self._read_extension, dec_hook=self._check_type)
            self._decoders[kind] = decoder
        return decoder

    def _read_extension(self, code: int, data: memoryview) -> Array:
        if code != _ARRAY:
            raise ValueError(f"extension {code} is unknown")
        if len(data) < _ARRAY_HEAD.size:
            raise ValueError("an array without a head")
        dtype_code, ndim, index = _ARRAY_HEAD.unpack_from(data)
        start = _ARRAY_HEAD.size + 8 * ndim
        if dtype_code >= len(_DTYPES) or ndim > MAX_NDIM or len(data) < start:
            raise ValueError(f"an array of dtype code {dtype_code} with {ndim} dimensions")
        dtype, shape = _DTYPES[dtype_code], struct.unpack_from(f"<{ndim}Q", data, _ARRAY_HEAD.size)
        if index == _INLINE:
            flat = np.frombuffer(data, dtype=np.uint8, offset=start).copy()
        else:
            flat = self._take_segment(index, len(data) - start)
        if math.prod(shape) * dtype.itemsize != len(flat):
            raise ValueError(f"an array of {dtype} with shape {shape} in {len(flat)} bytes")
        if dtype == np.bool_ and len(flat) and flat.max() > 1:
            raise ValueError("a bool that is neither 0 nor 1")
        array: Array = flat.view(dtype).reshape(shape)
        return array

    def _take_segment(self, index: int, num_bytes_behind: int) -> ByteArray:
        segment = self._segments[index] if index < len(self._segments) else None
        if segment is None or num_bytes_behind:
            raise ValueError(f"segment {index} of {len(self._segments)} is missing, taken twice or inline as well")
        self._segments[index] = None
        return segment

    def _check_type(self, wanted: Any, value: object) -> object:
        """msgspec's hook for types that are not its own: the value stands where the dataclass says `wanted`."""
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

    def _unpack(self, tree: Any) -> Any:
        """The inverse of `_pack`."""
        if not isinstance(tree, list):
            if type(tree) not in _PLAIN_TYPES:
                raise ValueError(f"{type(tree).__name__} without a tag")
            return tree
        tag, entries = (tree[0], tree[1:]) if tree else (None, [])
        if tag == _Tag.LIST:
            return [self._unpack(entry) for entry in entries]
        if tag == _Tag.TUPLE:
            return tuple(self._unpack(entry) for entry in entries)
        if tag == _Tag.DICT and len(entries) % 2 == 0:
            keys, values = map(self._unpack, entries[::2]), map(self._unpack, entries[1::2])
            return dict(zip(keys, values, strict=True))
        if tag == _Tag.DATACLASS and len(entries) == 2 and entries[0] in _VALUE_TYPES:
            return msgspec.convert(entries[1], _VALUE_TYPES[entries[0]], dec_hook=self._check_type)
        raise ValueError(f"no plain data begins with the tag {tag!r}")
