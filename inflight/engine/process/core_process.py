"""The engine core's process, the program `inflight.engine.process.core_process TITLE CONTROL_FD`. engine_process.py describes
the control socket, on which the owner of this process sends the sockets of the front ends and pings.

    owner        <== control socket ==>  control thread: opens links, answers pings
    front end 0  <== socket ==>  inbox thread ---> arrivals ---> step loop (main thread) ---> outbox, sender thread
    front end 1  <== socket ==>  inbox thread --->    "              "          "        --->   "          "

Only the step loop uses the core. If there are no requests, the loop sleeps until a message arrives. If there are requests, it
processes messages just before it plans a step. While it waits for a step, and one more step could be in flight, a message wakes
it, so that a new request can be planned. No front end can delay a step. Side effects:

1. If a front end's stream ends or contains bytes that are not a valid message, the requests of this front end are aborted.
   A new front end may come at any time. If a front end got damaged bytes (`EndDamagedEngine`), the process ends at once.
2. When the control socket is closed, the loop ends. If the engine is still starting, the process ends at once. If a step hangs,
   the process ends after `MAX_END_SECONDS`.
3. If a step fails, its requests end with an error, and the loop continues. If the core cannot continue after the failure, the
   process sends the reason to the front ends and ends. The owner starts another process, unless the exit code is EXIT_GIVEN_UP:
   then the ranks needed too many recoveries. The process also notices the death of a rank (a worker) without requests.
4. The process and its workers ignore SIGINT, SIGTERM and SIGHUP, because a terminal or a supervisor sends these to the whole
   process group. A front end that gets such a signal can let its requests finish first, or read its files again.
5. If the front ends are on another machine, a thread of head_links.py connects to them, or ends the process (EXIT_HEAD_LOST).
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from inflight.config.kv_events import KVEventsConfig
from inflight.engine.core.engine_core import EngineCore
from inflight.engine.core.step_loop import CoreListener
from inflight.engine.process.control_socket import Begin, ControlSocket, FrontEndLink
from inflight.engine.process.engine_process import EXIT_GIVEN_UP, EXIT_HEAD_LOST, title_of
from inflight.engine.process.engine_watch import EngineWatch
from inflight.engine.process.garbage import BUSY_SECONDS, IDLE_SECONDS, Garbage
from inflight.engine.process.head_links import HeadLinks
from inflight.engine.process.outbox import EXIT_FAILED
from inflight.engine.start.make_core import make_core
from inflight.engine.start.model_files import make_grammars
from inflight.errors import CodecError, ConfigError, EngineDeadError, EngineError, ErrorKind, InflightError, RankError
from inflight.executor.executor import Executor
from inflight.executor.failures import failure_of, first_line
from inflight.interface.codec import Message
from inflight.interface.engine_view import EndRequests, Watch
from inflight.interface.request import EngineCoreOutput, FinishReason
from inflight.interface.serving import (
    AbortRequests,
    AddRequest,
    EndDamagedEngine,
    EngineDied,
    EngineReady,
    EngineStartFailed,
    PrefixCacheReset,
    ResetPrefixCache,
    StartEngine,
)
from inflight.interface.statistics import FaultStatus
from inflight.interface.step import ModelRunnerOutput
from inflight.logs import exit_now
from inflight.processes.child_process import name_process
from inflight.processes.command_line import show_title
from inflight.processes.streams import EXIT_STREAM_ENDED
from inflight.tokenizer.source import read_tokenizer

if TYPE_CHECKING:
    from inflight.engine.process.kv_event_publisher import KVEventPublisher  # needs pyzmq

logger = logging.getLogger("inflight.engine.process.core_process")  # not `__name__`, which is "__main__" in a program

STATS_SECONDS = 0.05  # the shortest time between two reports of the engine's state to the front ends
MAX_END_SECONDS = 15.0  # how long a step may still run when the control socket is closed
GUILTY = "the engine failed: its process ended each time it computed this request"
MAX_GOODBYE_SECONDS = 1.0  # how long it may take to send a front end the reason of a failure


@dataclass(frozen=True, slots=True)
class FrontEndCame:
    """A new front end has come. So far `num_deaths` front ends have died."""

    num_deaths: int


class CoreServer(CoreListener):
    """Runs the engine core for all front ends. For the main thread of the process.

    Attributes:
        has_begun: set when the owner wants this process to serve. A spare process waits for it.
        tell_owner: sends a message to the owner of this process (engine_process.py).
        publisher: publishes what happens to the prefix cache; None if nothing is published.
    """

    may_add = True

    def __init__(self, tell_owner: Callable[[object], None], links: Sequence[FrontEndLink] = ()) -> None:
        self.tell_owner = tell_owner
        self.has_begun = threading.Event()
        self._links = list(links)  # before `has_begun` for the control thread, afterwards for the main thread
        self._past, self._fault_time, self._guilty = FaultStatus(), 0.0, frozenset[str]()  # see `EngineProcess.begin`
        self._past_recoveries: tuple[float, ...] = ()
        self.publisher: KVEventPublisher | None = None
        # id of the sequence that runs alone, as the owner of this process knows it; "" if all may run
        self._lone_request = ""
        self._has_fault_news = False  # whether a resumed request was counted since the front ends were told
        self._is_ending = False
        # (link, message): the front end of `link` sent the message. (link, FrontEndCame): this front end is new. (link, None):
        # this front end is gone. None: a rank has died, the awaited step is done, or the control socket is closed; the loop
        # wakes and looks.
        self._arrivals: SimpleQueue[tuple[FrontEndLink, Message | FrontEndCame | None] | None] = SimpleQueue()
        self._owners: dict[str, FrontEndLink] = {}  # id of a sequence in the core -> the front end that sent it
        self._awaited: Future[ModelRunnerOutput] | None = None  # when this step is done, the loop is woken
        self._is_running = False
        self._watch = EngineWatch()
        self._next_report = 0.0
        self._garbage = Garbage()
        self._is_reported = False  # whether the newest state of the engine was sent to the front ends

    def start_reading(self, control: ControlSocket) -> None:
        """Start the control thread. When the control socket is closed, the process ends, even while the engine starts."""
        threading.Thread(target=self._follow_control, args=(control,), name="inflight-control", daemon=True).start()

    def _follow_control(self, control: ControlSocket) -> None:
        """Runs in the control thread. It only reads and answers, so it answers pings even while a step hangs."""
        while (arrival := control.receive()) is not None:
            if isinstance(arrival, Begin):
                self._past, self._fault_time, self._guilty = arrival.past, arrival.fault_time, arrival.guilty
                self._past_recoveries = arrival.recovery_times
                self.has_begun.set()
                continue
            self.connect(*arrival)
        self._is_ending = True
        self._arrivals.put(None)
        if self._is_running:
            time.sleep(MAX_END_SECONDS)
        exit_now(EXIT_STREAM_ENDED)

    def connect(self, link: FrontEndLink, num_deaths: int) -> None:
        """Serve a new front end. So far `num_deaths` front ends have died."""
        if self.has_begun.is_set():
            self._arrivals.put((link, FrontEndCame(num_deaths)))
        else:
            self._links.append(link)
        threading.Thread(target=self._read, args=(link,), name=f"inflight-inbox-{link.index}", daemon=True).start()

    def tell_all(self, message: Message) -> None:
        for link in self._links:
            link.outbox.send(message)

    def take_new_links(self) -> None:
        """Let `tell_all` and `say_goodbye` know the front ends that have come while the engine started."""
        came = [self._arrivals.get() for _ in range(self._arrivals.qsize())]
        self._links += [each[0] for each in came if each is not None and isinstance(each[1], FrontEndCame)]

    def say_goodbye(self) -> None:
        for link in self._links:
            link.outbox.close(MAX_GOODBYE_SECONDS)

    def run(self, core: EngineCore, executor: Executor) -> None:
        """Run the step loop until the control socket is closed.

        Raises:
            EngineError: the core is dead. The reason was sent to the front ends.
        """
        self._core, self._executor = core, executor
        self._is_running = True
        executor.limits.add_earlier(self._past_recoveries)
        if self._fault_time:
            self._past = replace(self._past, last_recovery_seconds=time.monotonic() - self._fault_time)
        # before all else: the owner does not start the engine again if its first process ends before it is ready
        self.tell_owner({"ready": core.kv_cache_config.num_blocks})
        for link in self._links:
            self._greet(link)
        self._tell_faults()
        try:
            while not self._is_ending:
                if core.has_unfinished_requests():
                    self._step()
                else:
                    core.check_ranks()
                    if not self._is_reported:
                        self._distribute((), report=True)
                    self._garbage.collect(IDLE_SECONDS)
                    self._take(self._arrivals.get())
                self._take_arrivals()
        except Exception as error:
            summary = error.summary if isinstance(error, RankError | EngineDeadError) else ""
            self.tell_all(EngineDied(reason=first_line(error), summary=summary))
            raise

    def _step(self) -> None:
        try:
            outputs = self._core.step()
        except EngineError as error:
            if self._core.is_dead:
                raise
            self._fail_step(error)
            return
        self._is_reported = False
        self._distribute(outputs, report=time.monotonic() >= self._next_report)
        self._garbage.collect(BUSY_SECONDS)

    # -- in --------------------------------------------------------------------------------------------------------

    def _take_arrivals(self) -> None:
        while not self._arrivals.empty():
            self._take(self._arrivals.get())

    def before_plan(self) -> None:
        self._take_arrivals()
        lone = self._core.scheduler.quarantine.lone
        request_id = "" if lone is None else lone.request_id
        if request_id != self._lone_request:
            self._lone_request = request_id
            self.tell_owner({"lone_request": request_id})

    def wait_for_arrival(self, step: Future[ModelRunnerOutput]) -> bool:
        """Wait for the end of `step`, for a message or for `wake`. Returns False if the step is done."""
        if step is not self._awaited:
            self._awaited = step
            step.add_done_callback(lambda _: self._arrivals.put(None))
        if not step.done():
            self._take(self._arrivals.get())
        return not step.done()

    def _take(self, arrival: tuple[FrontEndLink, Message | FrontEndCame | None] | None) -> None:
        if arrival is None:
            return
        link, message = arrival
        match message:
            case AddRequest():
                is_guilty = not self._guilty.isdisjoint(sequence.request_id for sequence in message.sequences)
                for sequence in message.sequences:
                    self._owners[sequence.request_id] = link
                    link.num_received += 1
                    self._core.add_request(sequence, message.prompt_token_ids)
                    if is_guilty:  # siblings have the same prompt, so each of them would end this process, too
                        self._core.scheduler.fail(sequence.request_id, GUILTY, ErrorKind.ENGINE)
                    elif sequence.emitted_token_ids:
                        self._past = replace(self._past, num_resumed_requests=self._past.num_resumed_requests + 1)
                        self._has_fault_news = True
            case AbortRequests():
                self._abort(each for each in message.request_ids if self._owners.get(each) is link)
            case FrontEndCame():
                self._links.append(link)
                self._greet(link)
                if message.num_deaths:
                    self._past = self._past.with_dead_front_ends(message.num_deaths)
                    self._tell_faults()
            case ResetPrefixCache():
                self._core.reset_prefix_cache(reset_connector=message.with_connector)
                link.outbox.send(PrefixCacheReset(call_id=message.call_id))
            case Watch() | EndRequests():
                self._watch.take(link, message, self._core)
            case None:
                left = [request_id for request_id, owner in self._owners.items() if owner is link]
                aborted = f"; its {len(left)} running sequences are aborted" if left else ""
                logger.info("front end %d has disconnected%s", link.index, aborted)
                self._abort(left)
                self._links.remove(link)
                self._watch.leave(link)
                link.outbox.close(0.0)  # otherwise its thread and its socket would stay if there is nothing to send
        self._is_reported = False

    def _greet(self, link: FrontEndLink) -> None:
        link.outbox.send(EngineReady(front_end=link.index, num_kv_cache_tokens=self._core.kv_cache_config.num_tokens))
        link.outbox.send(self._faults())
        if self._core.cached_names is not None:
            link.outbox.put_names(self._core.cached_names.present(), self._core.cached_names.kinds)

    def _faults(self) -> FaultStatus:
        return self._core.fault_status().after(self._past)

    def faults_changed(self, status: FaultStatus) -> None:
        self._tell_faults()

    def wake(self) -> None:
        self._arrivals.put(None)

    def _tell_faults(self) -> None:
        """Tell the front ends and the owner of this process which recoveries there were."""
        self._has_fault_news = False
        status = self._faults()
        self.tell_all(status)
        self.tell_owner({"faults": asdict(status), "recovery_times": tuple(self._executor.limits.times)})

    def _abort(self, request_ids: Iterable[str]) -> None:
        aborted = set(request_ids)
        self._core.abort_requests(aborted)
        for request_id in aborted:
            del self._owners[request_id]

    def _read(self, link: FrontEndLink) -> None:
        """Runs in the inbox thread. It only reads, so it sees the end of the stream even while a step hangs."""
        try:
            while (message := link.stream.receive(ALLOWED)) is not None:
                if isinstance(message, EndDamagedEngine):
                    logger.error("front end %d got damaged bytes, so this process ends: %s", link.index, message.reason)
                    exit_now(EXIT_FAILED)
                self._arrivals.put((link, message))
        except OSError as error:
            logger.debug("the stream of front end %d was lost: %s", link.index, error)
        except CodecError as error:
            logger.error("front end %d sent an invalid message, so its requests are aborted: %s", link.index, error)
        self._arrivals.put((link, None))
        link.on_end()

    # -- out -------------------------------------------------------------------------------------------------------

    def _distribute(self, outputs: Sequence[EngineCoreOutput], *, report: bool) -> None:
        """Send each front end its outputs. With `report` also send the engine's state."""
        block_events = self._core.block_events
        if self.publisher is not None and block_events is not None and (events := block_events.take()):
            self.publisher.publish(events)
        stats = None
        if report:
            stats = self._core.take_stats()
            self._next_report, self._is_reported = time.monotonic() + STATS_SECONDS, True
            if self._has_fault_news:
                self._tell_faults()
            if self._core.cached_names is not None and (names := self._core.cached_names.take()):
                for link in self._links:
                    link.outbox.put_names(names)
        by_link: dict[FrontEndLink, list[EngineCoreOutput]] = {link: [] for link in self._links}
        for output in outputs:
            by_link[self._owners[output.request_id]].append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        for link, own in by_link.items():
            if own or stats is not None:
                link.outbox.put(own, link.num_received, stats)
        self._watch.show(self._core, self._executor, is_reported=report)

    def _fail_step(self, error: EngineError) -> None:
        """End the requests that the error of a failed step names. If it names none, end all. Other requests keep their
        tokens and are computed again. This cannot repeat for ever, because each failure ends at least one request."""
        named = error.request_ids if isinstance(error, RankError) else ()
        failed = [request_id for request_id in named if request_id in self._owners] or list(self._owners)
        self._core.abort_requests(failed)
        outputs = [
            EngineCoreOutput(
                request_id=request_id,
                new_token_ids=(),
                finish_reason=FinishReason.ERROR,
                error=f"the engine failed: {first_line(error)}",
                error_kind=ErrorKind.ENGINE,
            )
            for request_id in failed
        ]
        self._distribute(outputs, report=True)


ALLOWED = (AddRequest, AbortRequests, ResetPrefixCache, EndDamagedEngine, Watch, EndRequests)


def main() -> int:
    start = time.perf_counter()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name_process(sys.argv[1])
    control = ControlSocket(socket.socket(fileno=int(sys.argv[2])))
    start_engine = control.receive_start()
    if start_engine is None:
        return EXIT_STREAM_ENDED
    server = CoreServer(control.send)
    server.start_reading(control)
    try:
        executor, core = _start(start_engine, server)
    except Exception as error:  # sent to the front ends, which raise it
        is_known = isinstance(error, InflightError)
        if not is_known or start_engine.config.parallel.head is not None:  # no front end of this machine tells it
            logger.error("the engine could not start: %s", error, exc_info=not is_known)
        server.tell_owner({"failed": first_line(error)})
        if not server.has_begun.is_set():  # a spare process has no front ends
            return EXIT_FAILED
        server.take_new_links()
        server.tell_all(EngineStartFailed(failure=failure_of(error)))
        server.say_goodbye()
        return EXIT_FAILED
    gc.collect()
    gc.freeze()  # collections skip libraries and the model, which would make them slow
    gc.disable()  # `CoreServer` collects between steps
    logger.debug("the engine is ready %.2f s after its process began", time.perf_counter() - start)
    try:
        server.run(core, executor)
    except Exception as error:
        logger.error(
            "the engine has failed and ends: %s", first_line(error), exc_info=not isinstance(error, InflightError)
        )
        server.say_goodbye()
        if core.is_in_vain:
            server.tell_owner({"failed": first_line(error)})
            return EXIT_HEAD_LOST
        return EXIT_GIVEN_UP if executor.limits.problem() else EXIT_FAILED
    finally:
        core.close()
        if server.publisher is not None:
            server.publisher.close()
    return 0


def _start(start_engine: StartEngine, server: CoreServer) -> tuple[Executor, EngineCore]:
    config, begin = start_engine.config, 0.0

    def wait() -> None:
        nonlocal begin
        server.has_begun.wait()
        begin = time.perf_counter()
        if config.parallel.head is not None:
            HeadLinks(config, server.connect)
        if start_engine.is_spare:
            show_title(title_of(config))
            name_process(title_of(config))

    if start_engine.is_spare:
        executor = Executor.get_class(config).after_waiting(config, wait)
    else:
        wait()  # first, so that the front ends hear of every failure
        executor = Executor.get_class(config)(config)
    logger.debug("libraries were imported and the weights were loaded in %.2f s", time.perf_counter() - begin)
    try:
        if config.cache.events is not None:
            server.publisher = _publisher(config.cache.events, config.parallel.replicas[config.parallel.replica_index])
        read = partial(read_tokenizer, config.model.folder, start_engine.tokenizer)
        grammars = None if start_engine.skip_tokenizer_init else make_grammars(config, read)
        return executor, make_core(config, executor, grammars, server)
    except BaseException:
        executor.shutdown()
        raise


def _publisher(config: KVEventsConfig, replica: int) -> KVEventPublisher:
    try:
        from inflight.engine.process.kv_event_publisher import KVEventPublisher  # needs pyzmq
    except ImportError:
        raise ConfigError("kv_events_config needs pyzmq: pip install 'inflight-llm[kv-events]'") from None
    return KVEventPublisher(config, replica)


if __name__ == "__main__":
    exit_now(main())  # does not wait for threads that still read a stream
