"""What a worker does: load the environment once, then run what it is asked to."""

import asyncio
import contextlib
import dataclasses
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import msgspec
import zmq
from pydantic import ValidationError

from ramify import __version__
from ramify.env import Task
from ramify.envserver.config import EnvServerConfig
from ramify.envserver.heap import HeapTrimmer
from ramify.envserver.messages import (
    MANY,
    Done,
    GroupScores,
    Info,
    Ready,
    Run,
    ScoreGroup,
    TaskCount,
    TaskEntry,
    TaskPage,
    Tasks,
    Told,
    Turn,
)
from ramify.envserver.policy import open_policy
from ramify.errors import ConfigInvalid, Failure, RequestInvalid
from ramify.errors.origin import describe_exception
from ramify.gateway import Gateway, Policy
from ramify.rollout import Environment, SourceConfig, run_rollout, score_group
from ramify.trace import Trace, TraceDeltaEncoder, decode_trace, encode_episode
from ramify.wire import IncomingRequest, WireMessage, WireServer, WireSettings

LINGER = 2000  # milliseconds for the last words
THREADS = 64  # that read and write the files of boxes and task pages
FOREVER = 86400.0  # the leash, not silence, tells a worker that its broker is gone
FORMAT = "%(levelname)s %(name)s: %(message)s"


def work(told: bytes, report: int) -> None:
    """Serve until told to stop; the exit is immediate, for threads of hooks may never end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=FORMAT)
    for noisy in ("httpx", "httpcore", "asyncio", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    sys.setswitchinterval(0.001)  # heartbeats wait for nobody
    asyncio.run(_serve(msgspec.json.decode(told, type=Told), report))


async def _serve(told: Told, report: int) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="files"))
    code, reported = 0, False
    try:
        async with contextlib.AsyncExitStack() as stack:
            worker = await _load(told, stack, stop)
            gc.freeze()  # what was loaded is no garbage
            settings = WireSettings(
                heartbeat_interval=EnvServerConfig.model_validate(told.config).heartbeat, session_timeout=FOREVER
            )
            server = WireServer(worker.handlers, secret=told.secret, encrypted=False, settings=settings, name=told.id)
            await stack.enter_async_context(server)
            _report(report, Ready(pid=os.getpid(), address=server.address, info=worker.info()))
            reported = True
            await stop.wait()
    except Exception as error:  # whatever it is, the broker has to hear why
        code = 1
        if reported:
            logging.getLogger(__name__).exception("the worker broke")
        else:
            _report(report, Ready(pid=os.getpid(), failure=Failure.from_exception(error)))
    zmq.Context.instance().destroy(LINGER)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _report(fd: int, ready: Ready) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as out:  # a broker that is gone takes us along
        out.write(msgspec.json.encode(ready))


async def _load(told: Told, stack: contextlib.AsyncExitStack, stop: asyncio.Event) -> "Worker":
    config = EnvServerConfig.model_validate(told.config)
    env = Environment.load(SourceConfig.model_validate(told.source))
    stack.push_async_callback(env.close)
    policy = await open_policy(config, stack)
    gateway: Gateway | None = None
    if env.requires_endpoint or env.hooks.tools is not None or env.hooks.user is not None:
        gateway = await stack.enter_async_context(Gateway())
    worker = Worker(told.id, env, policy, gateway, stop)
    stack.push_async_callback(worker.heap.close)
    return worker


class Worker:
    """An environment and the policy its agents ask, behind a few methods."""

    def __init__(self, id: str, env: Environment, policy: Policy, gateway: Gateway | None, stop: asyncio.Event) -> None:
        self.id, self._env, self._policy, self._gateway, self._stop = id, env, policy, gateway, stop
        self._pages, self.heap = Pages(env), HeapTrimmer()
        self.handlers = {
            "run": self.run,
            "tasks": self.tasks,
            "count": self.count,
            "score_group": self.score_group,
            "stop": self.stop,
        }

    def info(self) -> Info:
        """What is served here."""
        env = self._env
        return Info(
            name=env.name,
            version=__version__,
            taskset=env.taskset.config.model_dump(mode="json"),
            harness=env.harness.trace_metadata,
            runtime=env.make_runtime().trace_metadata,
            model=self._policy.name,
            trainable=self._policy.trainable,
            rewards={hook.name: hook.weight for hook in env.hooks.rewards},
            group_rewards={hook.name: hook.weight for hook in env.hooks.group_rewards},
            metrics=[hook.name for hook in env.hooks.metrics],
            sampling=env.sampling_metadata,
            limits=env.limits.model_dump(),
            environment=env.identity,
        )

    async def run(self, request: IncomingRequest) -> WireMessage:
        """One rollout; its episode is the blob of the answer."""
        ask = request.decode(Run)
        this = asyncio.current_task()
        assert this is not None
        this.set_name(ask.id)  # a loop that stands still is named by the rollout that stopped it
        starts = Starts(ask, request)
        episode = await run_rollout(
            self._sampled(ask.sampling),
            self._task(ask.task),
            policy=self._policy,
            gateway=self._gateway,
            id=ask.id,
            group=ask.group,
            attempt=ask.attempt,
            seed=ask.seed,
            train=ask.train,
            max_tries=ask.attempts,
            on_progress=starts.watch,
        )
        encoded = encode_episode(episode)
        self.heap.rollout_ended(len(encoded))
        return WireMessage.encode(Done(self.id, starts.count), encoded)

    async def tasks(self, request: IncomingRequest) -> WireMessage:
        """A page of tasks."""
        ask = request.decode(Tasks)
        return WireMessage.encode(await asyncio.to_thread(self._pages.read, ask.start, ask.count))

    async def count(self, request: IncomingRequest) -> WireMessage:
        """How many tasks there are."""
        return WireMessage.encode(TaskCount(await asyncio.to_thread(self._pages.count)))

    async def score_group(self, request: IncomingRequest) -> WireMessage:
        """The rewards that only all attempts at a task together have."""
        ask = request.decode(ScoreGroup)
        traces = [decode_trace(blob) for blob in request.message.blobs]
        before = [len(trace.errors) for trace in traces]
        names = [hook.name for hook in self._env.hooks.group_rewards]
        await score_group(self._env, self._task(ask.task), traces)
        rewards = [{name: trace.rewards.get(name) for name in names} for trace in traces]
        return WireMessage.encode(GroupScores(rewards, [trace.errors[at:] for trace, at in zip(traces, before)]))

    async def stop(self, request: IncomingRequest) -> WireMessage:
        """End this process, once this is answered."""
        asyncio.get_running_loop().call_soon(self._stop.set)
        return WireMessage.encode()

    def _task(self, wire: dict[str, Any]) -> Task:
        try:
            return self._env.taskset.task_type.from_wire(wire)
        except ValidationError as error:
            raise RequestInvalid(f"task: {error}") from error

    def _sampled(self, sampling: dict[str, Any] | None) -> Environment:
        if not sampling:
            return self._env
        base = self._env.source.sampling
        try:
            changed = type(base).model_validate({**base.model_dump(), **sampling})
        except ValidationError as error:
            raise RequestInvalid(f"sampling: {error}") from error
        source = self._env.source.model_copy(update={"sampling": changed})
        return dataclasses.replace(self._env, source=source, sampler=changed.model_dump(mode="json"))


class Starts:
    """Counts how often a rollout is started, and sends what is new of it where that is wanted."""

    def __init__(self, ask: Run, request: IncomingRequest) -> None:
        self._ask, self._request = ask, request
        self._writer: TraceDeltaEncoder | None = None
        self.count = 0

    def watch(self, phase: str, trace: Trace) -> None:
        if phase == "boot":
            self.count += 1
            self._writer = TraceDeltaEncoder(trace)
        if self._ask.stream and self._writer is not None:
            delta = self._writer.next_delta()
            turn = Turn(self._ask.start + self.count - 1, phase)
            self._request.send_part(WireMessage.encode(turn, *(() if delta is None else (delta,))))


class Pages:
    """Tasks by their position. The taskset may have no end, so nothing is kept but the place we are at."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._tasks: Iterator[Task] | None = None
        self._at = 0

    def read(self, start: int, count: int) -> TaskPage:
        """Tasks `start` to `start + count`; blocks, so call it in a thread."""
        with self._lock:
            try:
                return self._read(start, count)
            except ConfigInvalid:
                self._tasks = None
                raise
            except Exception as error:
                self._tasks = None
                raise self._load_error(error) from error

    def count(self) -> int | None:
        """Return the number of tasks, None if there are more than `MANY`; blocks, so call it in a thread."""
        try:
            count = sum(1 for _ in islice(self._env.iter_tasks(), MANY + 1))
        except ConfigInvalid:
            raise
        except Exception as error:
            raise self._load_error(error) from error
        return count if count <= MANY else None

    def _load_error(self, error: Exception) -> ConfigInvalid:
        text = describe_exception(error)
        return ConfigInvalid(f"taskset {self._env.name} cannot be loaded: load raised {text}")

    def _read(self, start: int, count: int) -> TaskPage:
        if self._tasks is None or start < self._at:
            self._tasks, self._at = self._env.iter_tasks(), 0
        for _ in islice(self._tasks, start - self._at):
            self._at += 1
        found = list(islice(self._tasks, count)) if self._at == start else []
        self._at += len(found)
        return TaskPage([TaskEntry(task.identity, task.to_wire()) for task in found], end=len(found) < count)
