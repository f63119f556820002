"""The messages between a front end and a process that processes images: frames (interface/framing.py) with a body in JSON.

    front end   Start, Task, Task, ...
    process     READY or BROKEN, then for each task PROCESSED or REFUSED

Content of image files and pixels are segments of the frames, so they are not copied into a body.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from inflight.errors import CodecError
from inflight.interface.framing import ByteArray, Frame
from inflight.multimodal.processed import ProcessedImage, ProcessedInput

Options = Mapping[str, Any]  # of the processor; Any: JSON


class MessageKind(IntEnum):
    """The kinds of frames."""

    START = 0
    TASK = 1
    READY = 2
    BROKEN = 3  # the processor of the model cannot be loaded
    PROCESSED = 4
    REFUSED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Which processor to load: `folder` is the model's, and `tokenizer` the folder of its tokenizer. `options` are those of the
    engine: no request may ask for larger images. With `mmproj`, `folder` is a GGUF file, and `mmproj` its file for images.
    `image_token_id`: given if the tower is transformers' own, and takes all that the processor returns: the token that stands
    for its embeddings."""

    folder: Path
    tokenizer: Path
    mmproj: Path | None = None
    trust_remote_code: bool = False
    options: Options = field(default_factory=dict)
    image_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """
    Attributes:
        content: the bytes of an image file, or of pixels.
        shape: the shape of the pixels: [height, width] or [height, width, 1, 3 or 4]; None if `content` is a file.
        options: the arguments of the processor that differ from those of the model's folder.
    """

    content: ByteArray
    shape: tuple[int, ...] | None
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why an image was not processed. `is_option`: an option of the processor is wrong, and not the image."""

    message: str
    is_option: bool = False


def start_frame(start: Start) -> Frame:
    body = {
        "folder": str(start.folder),
        "tokenizer": str(start.tokenizer),
        "mmproj": None if start.mmproj is None else str(start.mmproj),
        "trusts": start.trust_remote_code,
        "options": start.options,
        "image_token_id": start.image_token_id,
    }
    return Frame(MessageKind.START, json.dumps(body).encode())


def read_start(frame: Frame) -> Start:
    body = _body(frame, MessageKind.START)
    return Start(
        folder=Path(body["folder"]),
        tokenizer=Path(body["tokenizer"]),
        mmproj=None if body["mmproj"] is None else Path(body["mmproj"]),
        trust_remote_code=bool(body["trusts"]),
        options=body["options"],
        image_token_id=body["image_token_id"],
    )


def task_frame(task: Task) -> Frame:
    return Frame(MessageKind.TASK, json.dumps([task.shape, task.options]).encode(), [task.content])


def read_task(frame: Frame) -> Task:
    shape, options = _body(frame, MessageKind.TASK)
    return Task(content=frame.segments[0], shape=None if shape is None else tuple(shape), options=options)


def ready_frame() -> Frame:
    return Frame(MessageKind.READY, b"{}")


def broken_frame(message: str) -> Frame:
    return Frame(MessageKind.BROKEN, json.dumps(message).encode())


def read_readiness(frame: Frame) -> str | None:
    """Returns why the processor cannot be loaded; None if it is ready."""
    if frame.kind == MessageKind.READY:
        return None
    return str(_body(frame, MessageKind.BROKEN))


def answer_frame(answer: ProcessedImage | Refusal) -> Frame:
    if isinstance(answer, Refusal):
        return Frame(MessageKind.REFUSED, json.dumps([answer.message, answer.is_option]).encode())
    inputs = [
        [each.pixels.shape, each.grid, each.num_tokens, each.digest.hex(), each.token_ids] for each in answer.inputs
    ]
    segments = [np.ascontiguousarray(each.pixels).reshape(-1).view(np.uint8) for each in answer.inputs]
    return Frame(
        MessageKind.PROCESSED,
        json.dumps([answer.placeholder, answer.expansion, answer.border, inputs]).encode(),
        segments,
    )


def read_answer(frame: Frame) -> ProcessedImage | Refusal:
    """Read the answer to a task. Its arrays are the memory of the frame, and cannot be written to.

    Raises:
        CodecError: the frame is not such an answer.
    """
    if frame.kind == MessageKind.REFUSED:
        message, is_option = _body(frame, MessageKind.REFUSED)
        return Refusal(message=message, is_option=is_option)
    try:
        placeholder, expansion, border, described = _body(frame, MessageKind.PROCESSED)
        inputs = [
            _read_input(description, segment) for description, segment in zip(described, frame.segments, strict=True)
        ]
    except (TypeError, ValueError) as error:
        raise CodecError(f"a processed image is damaged: {error}") from error
    return ProcessedImage(placeholder=placeholder, expansion=expansion, inputs=tuple(inputs), border=border)


def _read_input(description: list[Any], segment: ByteArray) -> ProcessedInput:  # Any: JSON
    shape, grid, num_tokens, digest, token_ids = description
    frames, rows, columns = grid
    if math.prod(shape) * 4 != len(segment):
        raise ValueError(f"{len(segment)} bytes are not pixels of shape {shape}")
    pixels = segment.view(np.float32).reshape(shape)
    pixels.flags.writeable = False  # requests share it
    return ProcessedInput(
        pixels=pixels,
        grid=(frames, rows, columns),
        num_tokens=num_tokens,
        digest=bytes.fromhex(digest),
        token_ids=None if token_ids is None else tuple(token_ids),
    )


def _body(frame: Frame, kind: MessageKind) -> Any:  # Any: JSON
    if frame.kind != kind:
        raise CodecError(f"received a frame of kind {frame.kind}; expected {kind.name}")
    return json.loads(bytes(frame.body))
