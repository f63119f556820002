"""The program of a process that renders the chat templates of requests.

`TemplateProcesses` (in `template_process`) starts it as `python -m inflight.entrypoints.serve.template_main TITLE FD`. FD is
the descriptor of a stream socket. A job is one template to render. Each job and each answer is one line of JSON on this socket.
Before each job a timer is set to the processor time that the job may use. When this time is used up, the kernel ends the
process with SIGPROF, because nothing in the process can end an endless loop of a template. The kernel also limits the memory of
the process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from typing import Any

from inflight.errors import InflightError, TokenizerError
from inflight.processes.child_process import name_process
from inflight.tokenizer.chat_template import ChatTemplate

MAX_MEMORY_BYTES = 2**30  # in addition to what the process has at its start
_NICENESS = 5  # the engine has priority


def main() -> None:
    name_process(sys.argv[1])
    # A terminal sends SIGINT to all processes. This process must not end then, but when the server closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    limit = _address_space_bytes() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=int(sys.argv[2])) as stream, stream.makefile("rwb") as file:
        for line in file:
            file.write(_answer(json.loads(line)) + b"\n")
            file.flush()


def _answer(job: dict[str, Any]) -> bytes:  # Any: JSON
    signal.setitimer(signal.ITIMER_PROF, job.pop("seconds"))
    try:
        template = ChatTemplate({"default": job.pop("source")}, job.pop("special_tokens"))
        content = json.dumps({"text": template.render(**job)}).encode()
    except InflightError as error:
        content = _error(error)
    except MemoryError:
        content = _error(TokenizerError(f"the chat template needs more than {MAX_MEMORY_BYTES} bytes of memory"))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return content


def _error(error: InflightError) -> bytes:
    return json.dumps({"error": [type(error).__name__, str(error)]}).encode()


def _address_space_bytes() -> int:
    """The size of this process's address space, in bytes. In /proc/self/statm it is the first field, in pages (see proc(5))."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
