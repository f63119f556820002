"""Engine cores of a group in one thread: the real `LockstepCore` over mock workers, links that deliver late, and a device whose
steps wait for those of the other replicas, as the exchange of rows does.

Each core has a thread, but only one thread runs at a time, and a seed says which. A core that waits for its oldest step lets
the rest of the world go on: devices, links, and cores. If nothing can go on, the replicas wait for each other for ever, and
that is an assertion at once.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, cast

import pytest

from inflight.engine.core.step_loop import CoreListener
from inflight.engine.lockstep.core import LockstepCore
from inflight.engine.lockstep.links import CAME, LOST, LockstepLinks
from inflight.errors import RankError, StepError
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from tests.conformance.configs import engine_config
from tests.support.mock_engine import LateExecutor, LateFuture, MockEngine
from tests.support.mock_worker import MockWorker

MOST_TURNS = 20_000  # of the world, without a step that ends; more is a hang


class _Killed(BaseException):
    """The process of a core has ended."""


class Fiber:
    """A thread that runs only between `resume` and the next `pause`, while the caller of `resume` waits."""

    def __init__(self) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[], object] | None = None
        self._error: BaseException | None = None
        self._is_killed = False
        self._ready: Callable[[], bool] = lambda: True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._work is not None

    @property
    def can_resume(self) -> bool:
        return self._work is not None and self._ready()

    def start(self, work: Callable[[], object]) -> None:
        assert self._work is None
        self._work = work
        self.resume()

    def resume(self) -> None:
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self, ready: Callable[[], bool]) -> None:
        """Called in the thread. `ready`: whether it is of use to resume it."""
        self._ready = ready
        self._back.release()
        self._go.acquire()
        if self._is_killed:
            raise _Killed

    def kill(self) -> None:
        self._is_killed = True
        self._go.release()
        self._back.acquire()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            try:
                if self._work is not None and not self._is_killed:
                    self._work()
            except BaseException as error:
                if not self._is_killed:
                    self._error = error
            self._work = None
            self._back.release()
            if self._is_killed:
                return


@dataclass
class Circle:
    """The ranks that have met in an epoch of the group."""

    token: bytes
    members: list[LockstepExecutor] = field(default_factory=list)
    is_broken: bool = False


class LockstepExecutor(LateExecutor):
    """Its rank runs a step when all ranks have the step, and have run those before it."""

    def __init__(self, worker: MockWorker, on_plan: Callable[[SchedulerOutput], None]) -> None:
        super().__init__(worker, on_plan)
        self.world: World
        self.circle: Circle | None = None
        self.joining: Future[Any] | None = None
        self.num_submitted = self.num_run = 0  # steps of this circle
        self.num_idle = 0  # steps without rows, in all

    def execute_model(self, plan: SchedulerOutput, non_block: bool, *, budget: float = 0.0) -> LateFuture:
        assert self.circle is not None and self.joining is None, "the ranks have not met"
        self.num_submitted += 1
        if plan.request_ids:
            return super().execute_model(plan, non_block, budget=budget)
        self.num_idle += 1
        future = LateFuture(self)
        self.plans.append(plan)
        self._queue.append((plan, future))
        return future

    def collective_rpc(self, method: str, args: Any = (), *more: Any, **named: Any) -> Any:
        if method == "listen_for_experts":
            return [(f"replica {self.world.index_of(self)}", len(self.recoveries))]
        if method == "take_expert_counts":
            assert named == {"non_block": True, "unique_reply_rank": 0, "beside": True}
            counted = Future[Any]()
            counted.set_result((len(self.world.engines), 60, 40, 1, 2, 0))
            return counted
        if method != "join_experts":
            return super().collective_rpc(method, args, *more, **named)
        assert named["non_block"] and self.circle is None
        self.joining = joining = Future[Any]()
        self.world.join(self, *args)
        return joining

    def begin_epoch(self, cause: RankError) -> set[int]:
        self.leave()
        return super().begin_epoch(cause)

    def leave(self) -> None:
        if self.circle is not None:
            self.circle.is_broken = True
        self.circle = None
        if self.joining is not None:
            joining, self.joining = self.joining, None
            joining.set_exception(StepError("the ranks have left", rank=0, is_echo=True))

    def run_next(self) -> bool:
        """Called by a core that waits for the oldest step."""
        if not self.run_device():
            self.world.wait(self.world.index_of(self), self._queue[0][1].done)
        return True

    def run_device(self) -> bool:
        """Run the oldest step if it can run. Returns whether it has ended."""
        if not self._queue or self.circle is None:
            return False
        plan, future = self._queue[0]
        if self.circle.is_broken:
            self._queue.popleft()
            echo = StepError("another replica has left", rank=0, step_id=plan.step_id, is_echo=True)
            future.set_exception(echo)
            return True
        number = self.num_run + 1
        if any(each.num_submitted < number or each.num_run < number - 1 for each in self.circle.members):
            return False
        if not plan.request_ids:
            self._queue.popleft()
            future.set_result(ModelRunnerOutput(step_id=plan.step_id))
        elif not super().run_next():
            return False  # its masks have not come
        self.num_run = number
        self.world.num_turns = 0
        self.world.num_steps += 1
        if future.exception() is not None:
            self.circle.is_broken = True
        return True


class _Links:
    def __init__(self, world: World, replica: int) -> None:
        self._world, self._replica = world, replica
        self.news: list[tuple[int, Any]] = []

    def send(self, peer: int, message: object) -> None:
        self._world.send(self._replica, peer, json.loads(json.dumps(message)), self)

    def take_news(self) -> list[tuple[int, Any]]:
        taken, self.news = self.news, []
        return taken

    def wait(self, seconds: float) -> None:
        """Time is the turns of the world."""

    def close(self) -> None:
        """The world ends its links."""


class _Listener(CoreListener):
    def __init__(self, world: World, replica: int) -> None:
        self._world, self._replica = world, replica

    @property
    def may_add(self) -> bool:  # type: ignore[override]
        return self._world.random.random() < 0.7

    def before_plan(self) -> None:
        self._world.on_plan(self._replica)

    def wait_for_arrival(self, step: Future[ModelRunnerOutput]) -> bool:
        links = self._world.links[self._replica]
        self._world.wait(self._replica, lambda: step.done() or bool(links.news))
        return not step.done()


class World:
    """
    Args:
        options: of each `MockEngine`.
        on_plan: called before each plan of a replica. It may add and abort requests.

    Attributes:
        num_steps: how many steps of all replicas have ended.
    """

    def __init__(
        self,
        size: int,
        random: Random,
        patch: pytest.MonkeyPatch,
        on_plan: Callable[[int], None] = lambda replica: None,
        **options: Any,
    ) -> None:
        self.size, self.random, self.on_plan = size, random, on_plan
        self._options = options
        self.links: list[_Links] = [_Links(self, index) for index in range(size)]
        self._wires: dict[tuple[int, int], deque[Any]] = {}
        self.fibers = [Fiber() for _ in range(size)]
        self._circles: dict[bytes, Circle] = {}
        self.num_turns = self.num_steps = 0
        self.engines: list[MockEngine] = []
        patch.setattr(LockstepCore, "_open_links", self._open)
        for index in range(size):
            for peer in range(size):
                if peer != index:
                    self._wires[index, peer] = deque([CAME])
            self.engines.append(self._new(index))

    def _open(self, replica: int, num_replicas: int) -> LockstepLinks:
        assert num_replicas == self.size
        return cast("LockstepLinks", self.links[replica])

    def _new(self, index: int) -> MockEngine:
        def make_executor(worker: MockWorker, on_plan: Callable[[SchedulerOutput], None]) -> LateExecutor:
            executor = LockstepExecutor(worker, on_plan)
            executor.world = self
            return executor

        parallel = replace(
            engine_config().parallel,
            replicas=tuple(range(self.size)),
            replica_index=index,
            is_in_lockstep=True,
            lockstep_secret="secret",
        )
        listener = _Listener(self, index)
        options = {"parallel": parallel, "listener": listener, "make_executor": make_executor, **self._options}
        self._starting = index
        return MockEngine(fault_tolerance=True, **options)

    def index_of(self, executor: LockstepExecutor) -> int:
        found = [index for index, engine in enumerate(self.engines) if engine.executor is executor]
        return found[0] if found else self._starting

    def executor(self, index: int) -> LockstepExecutor:
        return cast("LockstepExecutor", self.engines[index].executor)

    # -- what connects the replicas --------------------------------------------------------------------------------------

    def send(self, sender: int, receiver: int, message: Any, links: _Links) -> None:
        if self.links[sender] is links:  # otherwise its core has ended
            self._wires[sender, receiver].append(message)

    def join(self, executor: LockstepExecutor, token: bytes, addresses: list[Any]) -> None:
        circle = self._circles.setdefault(token, Circle(token))
        circle.members.append(executor)
        if len(circle.members) == self.size:
            has_left = circle.is_broken or any(each.joining is None for each in circle.members)
            for each in circle.members:
                joining, each.joining = each.joining, None
                if joining is not None:
                    each.circle, each.num_submitted, each.num_run = (None if has_left else circle), 0, 0
                    joining.set_result([None]) if not has_left else joining.set_exception(
                        StepError("a rank has left", rank=0, is_echo=True)
                    )

    def restart(self, index: int) -> None:
        """The core of a replica ends, with all its requests, and another one starts."""
        self.fibers[index].kill()
        self.fibers[index] = Fiber()
        self.executor(index).leave()
        self.engines[index].grammars.close()
        self.links[index] = _Links(self, index)
        for peer in range(self.size):
            if peer != index:
                self._wires[index, peer].extend([LOST, CAME])
                self._wires[peer, index] = deque([CAME])
        self.engines[index] = self._new(index)

    # -- what goes on ----------------------------------------------------------------------------------------------------

    def deliver(self) -> bool:
        full = [ends for ends, wire in self._wires.items() if wire]
        if not full:
            return False
        sender, receiver = self.random.choice(full)
        self.links[receiver].news.append((sender, self._wires[sender, receiver].popleft()))
        return True

    def wait(self, index: int, ready: Callable[[], bool]) -> None:
        """A core waits until `ready`."""
        while not ready():
            self.fibers[index].pause(ready)

    def step_core(self, index: int) -> bool:
        """Let a core go on, if it has something to do."""
        fiber = self.fibers[index]
        if fiber.can_resume:
            fiber.resume()
            return True
        if fiber.is_busy or not self.engines[index].core.has_unfinished_requests():
            return False
        fiber.start(self.engines[index].step)
        return True

    def turn(self) -> bool:
        """Let one part of the world go on. Returns False if none can."""
        self.num_turns += 1
        assert self.num_turns < MOST_TURNS, "no step ends any more"
        devices = [self.executor(index).run_device for index in range(self.size)]
        cores = [lambda index=index: self.step_core(index) for index in range(self.size)]
        parts: list[Callable[[], bool]] = [*devices, *cores, self.deliver]
        self.random.shuffle(parts)
        return any(part() for part in parts)

    @property
    def has_work(self) -> bool:
        has_work = any(engine.core.has_unfinished_requests() for engine in self.engines)
        return has_work or any(self._wires.values()) or any(fiber.is_busy for fiber in self.fibers)

    def settle(self) -> None:
        """Until nothing is left to do, in no replica."""
        while self.has_work:
            assert self.turn(), "the replicas wait for each other"

    def close(self) -> None:
        for fiber in self.fibers:
            fiber.kill()
        for engine in self.engines:
            engine.grammars.close()
