"""The worker: loads an environment once, then serves rollouts, tasks and group scores."""

import asyncio
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq
from pydantic import ValidationError

from ramify import __version__
from ramify.core.async_calls import cancel_all
from ramify.core.errors import ConfigInvalid, Failure, RequestInvalid
from ramify.core.errors.origin import describe_exception
from ramify.env import Task
from ramify.env.chat_client import set_model_address
from ramify.env.judges.cache import set_cache_directory
from ramify.infer.client import InferenceClient
from ramify.infer.gateway import Gateway
from ramify.infer.gateway.policy import ChatPolicy, Policy, TokenPolicy
from ramify.infer.gateway.policy_connection import connect_policy
from ramify.processes.wire import IncomingRequest, WireMessage, WireServer, WireSettings
from ramify.processes.wire.address import is_listening
from ramify.rollout import Environment, SourceConfig, run_attempt, score_group
from ramify.rollout.envserver.config import EnvServerConfig
from ramify.rollout.envserver.log import log_finished_rollout, log_stopped_rollout
from ramify.rollout.envserver.messages import (
    MAX_COUNTED_TASKS,
    AddressUpdate,
    EnvServerInfo,
    GroupScores,
    RolloutRequest,
    RolloutResponse,
    RolloutUpdate,
    ScoreGroupRequest,
    TaskCount,
    TaskItem,
    TaskPage,
    TasksRequest,
    WorkerReady,
    WorkerSpec,
)
from ramify.trace import decode_trace, encode_episode

if TYPE_CHECKING:
    from io import TextIOWrapper

POLL_INTERVAL = 0.05  # seconds between two checks for an engine that does not listen yet


async def open_policy(config: EnvServerConfig, stack: contextlib.AsyncExitStack) -> Policy:
    """Return the policy, open until the stack is closed. Waits for an engine up to half of `worker_startup_timeout`."""
    deadline = time.monotonic() + config.worker_startup_timeout / 2
    while not await _is_any_listening(config.inference.base_url) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_INTERVAL)
    key = os.environ.get(config.api_key_env, "")
    return await connect_policy(
        config.inference.base_url,
        config.model.name,
        config.renderer,
        stack,
        client_mode=config.client_type,
        served_model=config.served_model,
        api_key=key,
        retries=config.select_source().config.model_retries,
    )


async def _is_any_listening(urls: Sequence[str]) -> bool:
    return any(await asyncio.gather(*map(is_listening, urls)))


def set_policy_urls(policy: Policy, urls: Sequence[str]) -> None:
    """Let the policy sample from the servers at these addresses from now on."""
    if isinstance(policy, TokenPolicy) and isinstance(policy.client, InferenceClient):
        policy.client.set_urls(urls)
    elif isinstance(policy, ChatPolicy) and urls:
        policy.set_base_url(f"{urls[0]}/v1")


# Return the memory of large rollouts to the operating system.
#
# A long trace consists of many buffers of a few kilobytes, which glibc allocates on its heap. When they are freed,
# glibc returns only memory at the top of the heap, so a worker that has run one large rollout would keep its memory
# forever.

LARGE_ROLLOUT_BYTES = 4 << 20  # size of an encoded rollout from which the heap is trimmed
TRIM_DELAY = 1.0  # seconds: the response has to be sent first, and several rollouts may end together


def find_malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`, or None if the C library has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class HeapTrimmer:
    """Trims the heap of this process soon after a large rollout. `num_trims` counts the trims."""

    def __init__(self, *, delay: float = TRIM_DELAY) -> None:
        self._malloc_trim, self._delay = find_malloc_trim(), delay
        self._trim_task: asyncio.Task[None] | None = None
        self.num_trims = 0

    def on_rollout_end(self, size: int) -> None:
        """Schedule a trim if the rollout, `size` bytes when encoded, was large."""
        if self._malloc_trim is not None and size >= LARGE_ROLLOUT_BYTES and self._trim_task is None:
            self._trim_task = asyncio.create_task(self._trim_later(self._malloc_trim), name="heap trimmer")

    async def close(self) -> None:
        """Cancel a scheduled trim."""
        if self._trim_task is not None:
            await cancel_all([self._trim_task])

    async def _trim_later(self, trim: Callable[[int], int]) -> None:
        await asyncio.sleep(self._delay)
        self._trim_task = None  # a rollout that ends meanwhile schedules the next trim
        await asyncio.to_thread(trim, 0)
        self.num_trims += 1


GC_THRESHOLD = 10_000  # new objects between two collections; Python's 700 are fewer than one rollout makes
ZMQ_LINGER_MS = 2000  # milliseconds to send pending messages at exit
FILE_THREADS = 64  # threads that read and write files of runtimes and pages of tasks
BROKER_GRACE = 86400.0  # seconds; the watcher process, not silence, tells a worker that its broker is gone
LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"


def run_worker(spec: bytes, report_fd: int) -> None:
    """Serve until stopped. The process then exits at once, because threads of hooks may never end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        cast("TextIOWrapper[Any]", stream).reconfigure(line_buffering=True)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    for noisy in ("aiohttp", "asyncio", "mcp", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    sys.setswitchinterval(0.001)  # so that hook threads do not delay heartbeats
    asyncio.run(_serve(msgspec.json.decode(spec, type=WorkerSpec), report_fd))


async def _serve(spec: WorkerSpec, report_fd: int) -> None:
    loop, stop_event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop_event.set)
    loop.set_default_executor(ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="files"))
    code, reported = 0, False
    try:
        async with contextlib.AsyncExitStack() as stack:
            worker = await _load_worker(spec, stack, stop_event)
            gc.freeze()  # do not scan the loaded environment for garbage
            gc.set_threshold(GC_THRESHOLD)
            heartbeat = EnvServerConfig.model_validate(spec.config).heartbeat_interval
            settings = WireSettings(heartbeat_interval=heartbeat, session_timeout=BROKER_GRACE)
            server = WireServer(worker.handlers, secret=spec.secret, encrypted=False, settings=settings, name=spec.id)
            await stack.enter_async_context(server)
            _send_report(report_fd, WorkerReady(pid=os.getpid(), address=server.address, info=worker.build_info()))
            reported = True
            await stop_event.wait()
    except Exception as error:  # the broker needs the reason, whatever it is
        code = 1
        if reported:
            logging.getLogger(__name__).exception("the worker failed")
        else:
            _send_report(report_fd, WorkerReady(pid=os.getpid(), failure=Failure.from_exception(error)))
    zmq.Context.instance().destroy(ZMQ_LINGER_MS)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _send_report(fd: int, ready: WorkerReady) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:  # without a broker, it is killed soon
        pipe.write(msgspec.json.encode(ready))


async def _load_worker(spec: WorkerSpec, stack: contextlib.AsyncExitStack, stop_event: asyncio.Event) -> "EnvWorker":
    config = EnvServerConfig.model_validate(spec.config)
    env = Environment.load(SourceConfig.model_validate(spec.source))
    stack.push_async_callback(env.close)
    policy = await open_policy(config, stack)
    gateway: Gateway | None = None
    if env.requires_endpoint or env.hooks.tools is not None or env.hooks.user is not None:
        gateway = await stack.enter_async_context(Gateway())
    worker = EnvWorker(spec.id, env, policy, gateway, stop_event, run_path=config.output)
    stack.push_async_callback(worker.heap_trimmer.close)
    return worker


class EnvWorker:
    """An environment and its policy, with the request handlers of a worker. Each request has a context of its own."""

    def __init__(
        self,
        id: str,
        env: Environment,
        policy: Policy,
        gateway: Gateway | None,
        stop_event: asyncio.Event,
        *,
        run_path: Path,
    ) -> None:
        self.id, self._env, self._policy, self._gateway, self._stop_event = id, env, policy, gateway, stop_event
        self._run_path = run_path
        self._task_pager, self.heap_trimmer = TaskPager(env), HeapTrimmer()
        self.handlers = {
            "run": self.run,
            "tasks": self.tasks,
            "count": self.count,
            "score_group": self.score_group,
            "addresses": self.update_addresses,
            "stop": self.stop,
        }

    def build_info(self) -> EnvServerInfo:
        """Return the description of the environment."""
        env = self._env
        return EnvServerInfo(
            name=env.name,
            version=__version__,
            taskset=env.taskset.config.model_dump(mode="json"),
            harness=env.harness.trace_metadata,
            runtime=env.runtime_metadata,
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
        """Run one rollout; the blob of the response is its episode."""
        rollout = request.decode(RolloutRequest)
        set_cache_directory(self._run_path)
        current_task = asyncio.current_task()
        assert current_task is not None
        current_task.set_name(rollout.id)  # so that a hang report names the rollout

        def send_update(phase: str, num_calls: int) -> None:
            request.send_part(WireMessage.encode(RolloutUpdate(phase, num_calls)))

        start = time.monotonic()
        try:
            episode = await run_attempt(
                self._with_sampling(rollout.sampling),
                self._parse_task(rollout.task),
                policy=self._policy,
                gateway=self._gateway,
                id=rollout.id,
                group=rollout.group,
                attempt=rollout.attempt,
                seed=rollout.seed,
                train=rollout.train,
                on_progress=send_update if rollout.stream else None,
            )
        except BaseException as error:
            log_stopped_rollout(rollout, error, time.monotonic() - start)
            raise
        log_finished_rollout(rollout, episode, time.monotonic() - start)
        encoded = encode_episode(episode)
        self.heap_trimmer.on_rollout_end(len(encoded))
        return WireMessage.encode(RolloutResponse(self.id), encoded)

    async def tasks(self, request: IncomingRequest) -> WireMessage:
        """Return a page of tasks."""
        page = request.decode(TasksRequest)
        return WireMessage.encode(await asyncio.to_thread(self._task_pager.read, page.start, page.count))

    async def count(self, request: IncomingRequest) -> WireMessage:
        """Return the number of tasks."""
        return WireMessage.encode(TaskCount(await asyncio.to_thread(self._task_pager.count)))

    async def score_group(self, request: IncomingRequest) -> WireMessage:
        """Return the group rewards of all attempts at a task."""
        task = self._parse_task(request.decode(ScoreGroupRequest).task)
        set_cache_directory(self._run_path)
        traces = [decode_trace(blob) for blob in request.message.blobs]
        num_errors = [len(trace.errors) for trace in traces]
        names = [hook.name for hook in self._env.hooks.group_rewards]
        await score_group(self._env, task, traces)
        rewards = [{name: trace.rewards.get(name) for name in names} for trace in traces]
        errors = [trace.errors[n:] for trace, n in zip(traces, num_errors)]
        metrics, info = [dict(trace.metrics) for trace in traces], [dict(trace.info) for trace in traces]
        return WireMessage.encode(GroupScores(rewards, errors, metrics, info))

    async def update_addresses(self, request: IncomingRequest) -> WireMessage:
        """Use new addresses of inference servers, also for rollouts that are running."""
        update = request.decode(AddressUpdate)
        if update.inference is not None:
            set_policy_urls(self._policy, update.inference)
        for name, urls in update.models.items():
            set_model_address(name, urls)
        self._env.update_model_addresses()
        return WireMessage.encode()

    async def stop(self, request: IncomingRequest) -> WireMessage:
        """Stop this process after the response is sent."""
        asyncio.get_running_loop().call_soon(self._stop_event.set)
        return WireMessage.encode()

    def _parse_task(self, wire: dict[str, Any]) -> Task:
        try:
            return self._env.taskset.task_type.from_wire(wire)
        except ValidationError as error:
            raise RequestInvalid(f"task: {error}") from error

    def _with_sampling(self, sampling: dict[str, Any] | None) -> Environment:
        if not sampling:
            return self._env
        base = self._env.source.sampling
        try:
            merged = type(base).model_validate({**base.model_dump(), **sampling})
        except ValidationError as error:
            raise RequestInvalid(f"sampling: {error}") from error
        source = self._env.source.model_copy(update={"sampling": merged})
        return dataclasses.replace(self._env, source=source, sampling_metadata=merged.model_dump(mode="json"))


class TaskPager:
    """Reads pages of tasks. The taskset may be infinite, so only the current position is kept."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._tasks: Iterator[Task] | None = None
        self._position = 0

    def read(self, start: int, count: int) -> TaskPage:
        """Return the tasks `start` to `start + count`. Blocks: call it in a thread."""
        with self._lock, self._raise_load_errors():
            tasks, position = self._tasks, self._position
            self._tasks = None  # until the page is read: after an error, the tasks are loaded again
            if tasks is None or start < position:
                tasks, position = self._env.iter_tasks(), 0
            position += sum(1 for _ in islice(tasks, start - position))
            page = list(islice(tasks, count)) if position == start else []
            self._tasks, self._position = tasks, position + len(page)
            return TaskPage([TaskItem(task.identity, task.to_wire()) for task in page], end=len(page) < count)

    def count(self) -> int | None:
        """Return the number of tasks, or None if it exceeds `MAX_COUNTED_TASKS`. Blocks: call it in a thread."""
        with self._raise_load_errors():
            count = sum(1 for _ in islice(self._env.iter_tasks(), MAX_COUNTED_TASKS + 1))
        return count if count <= MAX_COUNTED_TASKS else None

    @contextlib.contextmanager
    def _raise_load_errors(self) -> Generator[None]:
        """Raise errors of the taskset's `load` as ConfigInvalid."""
        try:
            yield
        except ConfigInvalid:
            raise
        except Exception as error:
            text = describe_exception(error)
            raise ConfigInvalid(f"taskset {self._env.name} cannot be loaded: load raised {text}") from error
