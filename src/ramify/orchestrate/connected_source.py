"""Sources as the orchestrator reaches them: through env servers that may still be starting, or restart at any time."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ramify.core.errors import ConfigInvalid, EngineIncompatible, EnvironmentFault, Failure, RamifyError
from ramify.env.decorators import MISSING_REWARD_ADVICE
from ramify.env.task import compute_content_digest
from ramify.orchestrate.env_server_pool import EnvServerPool
from ramify.orchestrate.run_config import TrainSourceConfig
from ramify.rollout.envserver.messages import MAX_COUNTED_TASKS
from ramify.rollout.evals.config import EvalSourceConfig
from ramify.run.store import RunStore
from ramify.run.store.environments import ObservedEnvironment, get_task_numbers
from ramify.trace import Trace

PAGE_SIZE = 256
MAX_CACHED_PAGES = -(-MAX_COUNTED_TASKS // PAGE_SIZE)  # enough for every bounded source


class TaskCache:
    """The tasks of one source by number, fetched in pages on demand; a page may take `timeout` seconds."""

    def __init__(self, name: str, servers: EnvServerPool, *, timeout: float = 300.0) -> None:
        self.name, self._servers, self._timeout = name, servers, timeout
        self._pages: dict[int, list[dict[str, Any]]] = {}
        self._fetch_lock = asyncio.Lock()

    async def count_tasks(self, limit: int = MAX_COUNTED_TASKS) -> int | None:
        """Return the number of tasks; None if there are more than `limit`. Raises ConfigInvalid if there is none."""
        start = 0
        while start < limit:
            page = await self._servers.tasks(start, PAGE_SIZE, timeout=self._timeout)
            self._pages[start // PAGE_SIZE] = [entry.task for entry in page.tasks]
            start += len(page.tasks)
            if page.end:
                if not start:
                    raise ConfigInvalid(f"{self.name}: its taskset has no tasks")
                return start
        return None

    async def get_content_digests(self, numbers: Iterable[int]) -> tuple[dict[int, str], dict[int, str]]:
        """Return the content digests of tasks by number, and the keys of those that have one.

        Tasks that the source no longer has are left out.
        """
        digests: dict[int, str] = {}
        keys: dict[int, str] = {}
        for number in numbers:
            try:
                task = await self.get_task(number)
            except EnvironmentFault:
                continue
            digests[number] = compute_content_digest(task)
            if task.get("key"):
                keys[number] = str(task["key"])
        return digests, keys

    async def get_task(self, number: int) -> dict[str, Any]:
        """Return the wire form of a task. Raises EnvironmentFault if the source no longer has it."""
        page, index = divmod(number, PAGE_SIZE)
        if page not in self._pages:
            async with self._fetch_lock:
                if page not in self._pages:
                    reply = await self._servers.tasks(page * PAGE_SIZE, PAGE_SIZE, timeout=self._timeout)
                    self._pages[page] = [entry.task for entry in reply.tasks]
                    while len(self._pages) > MAX_CACHED_PAGES:
                        del self._pages[next(iter(self._pages))]  # the oldest
        tasks = self._pages[page]
        if index >= len(tasks):
            raise EnvironmentFault(f"{self.name} no longer has task {number}")
        return tasks[index]


QUEUE_TIME_ALLOWANCE = 600.0  # seconds that an attempt may wait for a worker
SERVER_FAILURES = ("PeerLost", "ProcessDied")  # failures of the server rather than of the attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedSource:
    """A source with open connections to its env servers."""

    name: str
    servers: EnvServerPool
    tasks: TaskCache
    attempt_timeout: float
    """Seconds that one attempt may take, including its time in the queue, at a task without its own limit."""
    max_tries: int
    """Most tries of an attempt."""
    server_timeout: float
    """Seconds to wait for a server to become healthy again."""
    group_rewards: frozenset[str] = frozenset()
    """Names of the rewards that compare all attempts of a group."""
    num_tasks: int | None = None
    """Number of tasks; None if unbounded."""
    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Identity of the environment: digests of its code, and its configuration."""
    environment_digest: str = ""
    revision: int = 1
    """Revision of the environment in the run's store."""
    retry_delay: float = 1.0
    """Seconds before a failed attempt is retried."""

    def get_attempt_timeout(self, task: Mapping[str, Any]) -> float:
        """Return the seconds that one attempt at a task may take, given its wire form.

        The task's own limit is added although it replaces the harness's: each phase has its exact limit in the
        worker, and this timeout only has to be longer.
        """
        return self.attempt_timeout + float(task.get("timeout") or 0.0)

    async def wait_before_retry(self, failure: Failure) -> None:
        """Wait before a retry. If the server failed, wait until one is healthy, so that one outage costs one try."""
        await asyncio.sleep(self.retry_delay)
        if failure.name in SERVER_FAILURES:
            await self.servers.wait_until_up(self.server_timeout)

    async def add_group_rewards(self, traces: Sequence[Trace], on_failure: Callable[[Failure], None]) -> None:
        """Let the server compute the group rewards and add them to the traces, in at most `max_tries` tries.

        The metrics of failed tries are kept. Raises the last failure if no try succeeds.
        """
        for num_tries_left in reversed(range(self.max_tries)):
            try:
                scores = await self.servers.score_group(
                    traces[0].task, traces, environment_digest=self.environment_digest, timeout=self.attempt_timeout
                )
                for trace, metrics in zip(traces, scores.metrics, strict=True):
                    trace.metrics.update(metrics)  # also of a failed try, whose judge calls are paid for
                for failure in (failure for failures in scores.errors for failure in failures):
                    raise failure.to_exception()  # without all its rewards a group cannot be trained on
            except RamifyError as error:
                on_failure(failure := Failure.from_exception(error))
                if not num_tries_left or not failure.retryable:
                    raise
                await self.wait_before_retry(failure)
                continue
            for trace, rewards, info in zip(traces, scores.rewards, scores.info, strict=True):
                trace.rewards.update(rewards)
                trace.info.update(info)
            return

    async def observe_environment(self, store: RunStore, name: str, limit: int | None) -> ObservedEnvironment:
        """Return the environment as it is now, for a comparison with the one that `store` has under `name`.

        It includes all tasks of a bounded source, up to `limit`; of an unbounded source, only those that were issued.
        """
        if self.num_tasks is None and limit is None:
            numbers = get_task_numbers(store, name)
        else:
            numbers = range(min(bound for bound in (self.num_tasks, limit) if bound is not None))
        digests, keys = await self.tasks.get_content_digests(numbers)
        return ObservedEnvironment(dict(self.environment), digests, keys, num_tasks=self.num_tasks)


async def build_connected_source(
    config: TrainSourceConfig | EvalSourceConfig, servers: EnvServerPool
) -> ConnectedSource:
    """Build the source of connected env servers, and count its tasks.

    Raises PeerLost, ProcessDied, EngineIncompatible, EnvironmentChanged or ConfigInvalid.
    """
    name, tasks = config.source_name, TaskCache(config.source_name, servers, timeout=config.timeouts.load)
    info = servers.info
    if isinstance(config, TrainSourceConfig) and not info.trainable:
        raise EngineIncompatible(f"train source {name}: its endpoint does not return token ids and logprobs")
    if isinstance(config, TrainSourceConfig) and not (info.rewards or info.group_rewards):
        raise ConfigInvalid(
            f"train source {name}: its taskset has no reward, so nothing can be learned; {MISSING_REWARD_ADVICE}"
        )
    limit = MAX_COUNTED_TASKS if isinstance(config, TrainSourceConfig) else config.num_tasks
    return ConnectedSource(
        name=name,
        servers=servers,
        tasks=tasks,
        attempt_timeout=config.max_attempt_seconds() + QUEUE_TIME_ALLOWANCE,
        max_tries=config.max_tries,
        server_timeout=servers.start_timeout,
        group_rewards=frozenset(info.group_rewards),
        num_tasks=await tasks.count_tasks(limit),
        environment=info.environment,
        environment_digest=info.environment_digest,
    )
