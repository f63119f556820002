"""The program of a process that decodes and processes images: `inflight.multimodal.processor_main TITLE STREAM_FD`.

It answers one task after another, until its stream ends. Side effects:

1. torch is hidden from transformers, which would import it and use it for nothing. An import of torch takes seconds, and
   some hundred MB. Only the Python files of a trusted model's folder may import it.
2. The memory of the process is bounded. So an image that needs more raises a MemoryError here, and does not make the system
   run out of memory.
"""

import logging
import resource
import signal
import socket
import sys

from inflight.errors import ConfigError, InvalidRequestError
from inflight.interface.framing import Frame, FrameReader
from inflight.logs import exit_now
from inflight.multimodal.decode import decode_file, image_of_pixels
from inflight.multimodal.family_processor import FamilyProcessor
from inflight.multimodal.gguf_processor import as_folder
from inflight.multimodal.messages import (
    Refusal,
    Start,
    Task,
    answer_frame,
    broken_frame,
    read_start,
    read_task,
    ready_frame,
)
from inflight.multimodal.processed import ProcessedImage
from inflight.processes.child_process import name_process

logger = logging.getLogger(__name__)

MAX_MEMORY_BYTES = 6 << 30
MAX_SHOWN = 500  # characters of an error of a library


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # the front end handles Ctrl-C and the end of the terminal
        signal.signal(number, signal.SIG_IGN)
    name_process(sys.argv[1], "inflight-images")
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    with socket.socket(fileno=int(sys.argv[2])) as stream:
        try:
            serve(stream)
        except EOFError:
            pass
        except OSError as error:
            logger.debug("the stream of images was lost: %s", error)
    exit_now(0)


def serve(stream: socket.socket) -> None:
    """
    Raises:
        EOFError: the stream has ended.
    """
    reader = FrameReader(read_ahead=False)
    start = read_start(receive(stream, reader))
    if not start.trust_remote_code:
        hide_torch()
    try:
        processor = load(start)
    except ConfigError as error:
        send(stream, broken_frame(str(error)))
        return
    send(stream, ready_frame())
    while True:
        send(stream, answer_frame(answer(processor, read_task(receive(stream, reader)))))


def load(start: Start) -> FamilyProcessor:
    try:
        with as_folder(start) as start_of_folder:
            return FamilyProcessor(start_of_folder)
    except ConfigError:
        raise
    except Exception as error:
        logger.warning("the processor of the images cannot be loaded", exc_info=True)
        raise ConfigError(f"{type(error).__name__}: {error}"[:MAX_SHOWN]) from error


def answer(processor: FamilyProcessor, task: Task) -> ProcessedImage | Refusal:
    try:
        image = decode_file(task.content) if task.shape is None else image_of_pixels(task.content, task.shape)
        return processor.process(image, task.options)
    except (InvalidRequestError, ConfigError) as error:
        is_option = isinstance(error, InvalidRequestError) and error.param == "mm_processor_kwargs"
        return Refusal(message=str(error)[:MAX_SHOWN], is_option=is_option)
    except MemoryError:
        return Refusal(message="the image needs too much memory; send a smaller one")
    except Exception as error:  # of the code behind the processor, which reads what it has returned
        logger.warning("an image cannot be processed", exc_info=True)
        reason = f"{type(error).__name__}: {error}"
        return Refusal(message=f"the image cannot be processed ({reason}); send another one"[:MAX_SHOWN])


def hide_torch() -> None:
    for name in ("torch", "torchvision"):
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]  # an import of the name fails, as if it were not installed


def receive(stream: socket.socket, reader: FrameReader) -> Frame:
    """
    Raises:
        EOFError: the stream has ended.
    """
    while True:
        count = stream.recv_into(reader.buffer())
        if count == 0:
            raise EOFError
        if frames := reader.received(count):
            return frames[0]


def send(stream: socket.socket, frame: Frame) -> None:
    for buffer in frame.buffers():
        stream.sendall(buffer)


if __name__ == "__main__":
    main()
