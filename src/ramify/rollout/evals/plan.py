"""The rollouts of an eval: which are missing, and how each is run.

They are the first n tasks of the taskset, with r repetitions of each. They run in this process or in the workers of an
env server, with the same results.
"""

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ramify.core.async_calls import call_storage, fail_after
from ramify.core.errors import AgentFailed, ConfigInvalid, DeadlineExceeded, Failure, ProcessDied, RamifyError
from ramify.core.errors.origin import describe_exception
from ramify.env import Task
from ramify.env.hook import run_in_hook_thread
from ramify.env.task import IDENTITY_DIGITS
from ramify.infer.dialects.media import FILE_SCHEME, read_environment_url
from ramify.infer.dialects.message_parser import MessageParser
from ramify.infer.gateway import Gateway
from ramify.processes.wire.loop_monitor import format_thread_stack
from ramify.rollout import Environment, repeat_attempt, run_attempt
from ramify.rollout.attempt import ProgressCallback
from ramify.rollout.evals.config import EvalConfig
from ramify.rollout.evals.policy_client import ServedPolicy
from ramify.rollout.evals.progress import make_rollout_id
from ramify.rollout.rewards import build_unscored_rewards
from ramify.run.store import RolloutRecord
from ramify.trace import Media, Trace

WORKER_WAIT_TIMEOUT = 600.0  # seconds a rollout may wait for a worker


async def compute_task_digest(task: Task) -> str:
    """Return the digest of a task's content, and of the image files that its prompt names with `file://`.

    An image that cannot be read is left out: the rollout fails with the reason.
    """
    if isinstance(task.prompt, str) or FILE_SCHEME not in str(task.prompt):
        return task.content_digest
    hashes = await call_storage(partial(_hash_images, task.prompt), f"images of task {task.identity}")
    if not hashes:
        return task.content_digest
    text = ":".join([task.content_digest, *sorted(hashes)])
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_DIGITS]


def _hash_images(prompt: Any) -> set[str]:
    """Return the hashes of the images in the messages of a prompt that can be read."""
    parser = MessageParser(read_url=read_environment_url)
    for message in prompt:
        with contextlib.suppress(LookupError, TypeError, AttributeError, ValueError):  # it is not a chat message
            content = message["content"]
            if isinstance(content, str):
                continue
            for part in [content] if isinstance(content, Media) else content:
                with contextlib.suppress(RamifyError):
                    parser.parse_part(part)
    return set(parser.media)


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """One repetition of a task. `task_key` is the task's identity, with `#2` appended for a second equal task."""

    task_key: str
    task: Task
    repetition: int

    @property
    def id(self) -> str:
        """The rollout's id in the run."""
        return make_rollout_id(self.task_key, self.repetition)

    def derive_seed(self, base_seed: int) -> int:
        """Return the rollout's seed: the same on every start, different for every rollout."""
        digest = hashlib.sha256(f"{base_seed}:{self.task_key}:{self.repetition}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


async def load_plan(environment: Environment, config: EvalConfig) -> list[PlannedRollout]:
    """Return the rollouts of an eval, task by task.

    The tasks are loaded in a thread, so that the timeout also applies to a `load` that blocks. Raises
    DeadlineExceeded, with the stack of `load`, after `timeouts.load` seconds, and ConfigInvalid for a task that cannot
    be run.
    """
    timeout, thread_id = config.timeouts.load, 0

    def load() -> list[PlannedRollout]:
        nonlocal thread_id
        thread_id = threading.get_ident()
        return _plan_rollouts(environment, config)

    operation = f"load of taskset {environment.name}"
    try:
        async with fail_after(timeout, operation):
            return await run_in_hook_thread(load, {})
    except DeadlineExceeded as error:
        stack = format_thread_stack(thread_id)
        message = f"{operation} took longer than {timeout:g} s (timeouts.load); its current stack:\n{stack}"
        raise DeadlineExceeded(message.rstrip()) from error


def _plan_rollouts(environment: Environment, config: EvalConfig) -> list[PlannedRollout]:
    times_seen: Counter[str] = Counter()
    rollouts: list[PlannedRollout] = []
    for task in load_first_tasks(environment, config.num_tasks):
        environment.check_task(task)
        times_seen[task.identity] += 1
        count = times_seen[task.identity]
        key = task.identity if count == 1 else f"{task.identity}#{count}"
        rollouts += [PlannedRollout(key, task, repetition) for repetition in range(config.repetitions)]
    return rollouts


def load_first_tasks(environment: Environment, count: int) -> list[Task]:
    """Return the first `count` tasks. Raises ConfigInvalid if loading them raises, or if there are none."""
    name = environment.name
    try:
        tasks = list(islice(environment.iter_tasks(), count))
    except RamifyError as error:
        raise ConfigInvalid(f"taskset {name} cannot be loaded: {error.message}") from error
    except Exception as error:  # the environment's code may raise anything
        raise ConfigInvalid(f"taskset {name} cannot be loaded: load raised {describe_exception(error)}") from error
    if not tasks:
        raise ConfigInvalid(f"taskset {name} has no tasks")
    return tasks


def find_missing(rollouts: Sequence[PlannedRollout], rows: Mapping[str, RolloutRecord]) -> list[PlannedRollout]:
    """Return the rollouts that have not run, or that failed because of the system."""
    return [rollout for rollout in rollouts if (row := rows.get(rollout.id)) is None or row.failure is not None]


RolloutRunner = Callable[[PlannedRollout, ProgressCallback], Awaitable[Sequence[Trace]]]
"""Runs one rollout and returns its traces."""


def open_rollout_runner(
    config: EvalConfig, environment: Environment, served: ServedPolicy, path: Path
) -> contextlib.AbstractAsyncContextManager[RolloutRunner]:
    """Yield the function that runs the rollouts of an eval; `path` is the run's directory."""
    if config.workers:
        return _open_in_workers(config, environment, served, path)
    return _open_in_process(config, environment, served)


@contextlib.asynccontextmanager
async def _open_in_process(
    config: EvalConfig, environment: Environment, served: ServedPolicy
) -> AsyncGenerator[RolloutRunner]:
    hooks = environment.hooks
    needs_gateway = environment.requires_endpoint or hooks.tools is not None or hooks.user is not None
    async with Gateway() if needs_gateway else contextlib.nullcontext() as gateway:

        async def run_in_process(rollout: PlannedRollout, on_progress: ProgressCallback) -> Sequence[Trace]:
            async def run() -> Sequence[Trace]:
                episode = await run_attempt(
                    environment,
                    rollout.task,
                    policy=served.policy,
                    gateway=gateway,
                    id=rollout.id,
                    group=rollout.task_key,
                    attempt=rollout.repetition,
                    seed=rollout.derive_seed(config.sampling.seed or 0),
                    on_progress=on_progress,
                )
                return episode.traces

            return await repeat_attempt(run, environment)

        yield run_in_process


@contextlib.asynccontextmanager
async def _open_in_workers(
    config: EvalConfig, environment: Environment, served: ServedPolicy, path: Path
) -> AsyncGenerator[RolloutRunner]:
    from ramify.rollout.envserver import EnvClient, EnvServerConfig, EnvServerProcess
    from ramify.rollout.envserver.messages import compute_environment_digest

    environment_digest = compute_environment_digest(environment.identity)
    source = environment.source.model_dump(mode="json")
    if environment.runtime_config.keep_workdir:
        source["runtime"] = {**source["runtime"], "keep_workdir": True}
    server_config = EnvServerConfig.model_validate(
        {
            "eval": [{**source, "pool": {"type": "static", "workers": config.workers}}],
            "model": config.model.model_dump(),
            "renderer": config.renderer.model_dump(),
            "inference": {"engine": "external", "base_url": served.urls},
            "client_type": config.client_type,
            "api_key_env": config.api_key_env,
            "output": path,
            "max_open_requests": max(EnvServerConfig.model_fields["max_open_requests"].default, config.concurrency),
            "hang_timeout": config.hang_timeout,
            "shutdown_timeout": 0.0,
        }
    )
    async with (
        EnvServerProcess(
            server_config, path / "configs" / "env-server.toml", start_timeout=config.startup_timeout
        ) as server,
        EnvClient(server.address) as client,
    ):

        async def run_in_worker(rollout: PlannedRollout, on_progress: ProgressCallback) -> Sequence[Trace]:
            async def run() -> Sequence[Trace]:
                result = await client.run(
                    rollout.task,
                    id=rollout.id,
                    group=rollout.task_key,
                    attempt=rollout.repetition,
                    seed=rollout.derive_seed(config.sampling.seed or 0),
                    environment_digest=environment_digest,
                    on_progress=on_progress,
                    timeout=environment.source.max_attempt_seconds(rollout.task.timeout) + WORKER_WAIT_TIMEOUT,
                )
                return result.episode.traces

            try:
                return await repeat_attempt(run, environment)
            except (AgentFailed, ProcessDied) as error:
                return [_make_failed_trace(environment, rollout, error)]

        yield run_in_worker


def _make_failed_trace(environment: Environment, rollout: PlannedRollout, error: AgentFailed | ProcessDied) -> Trace:
    """Return the trace of a rollout whose workers all died."""
    trace = Trace(
        id=rollout.id,
        episode=rollout.id,
        group=rollout.task_key,
        attempt=rollout.repetition,
        env=environment.name,
        task=rollout.task.to_wire(),
        rewards=build_unscored_rewards(environment),
        stop=error.name,
    )
    trace.errors.append(Failure.from_exception(error))
    return trace
