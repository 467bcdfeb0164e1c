"""Meeting the env server of a source, which may still be booting, or be started again meanwhile."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from ramify.env.decorators import MISSING_REWARD_ADVICE
from ramify.envserver.client import EnvClient
from ramify.envserver.messages import EnvServerInfo
from ramify.errors import ConfigInvalid, PeerLost, RamifyError, TokensRequired, WorkerDied
from ramify.orchestrate.attempt_dispatcher import ConnectedSource
from ramify.orchestrate.config import EvalSourceConfig, TrainSourceConfig
from ramify.orchestrate.task_cache import MAX_COUNTED_TASKS, TaskCache
from ramify.store import RunStore
from ramify.store.environments import ObservedEnvironment, get_task_numbers

POLL_INTERVAL = 0.05  # seconds between two looks at a server that is not ready
QUEUE_TIME_ALLOWANCE = 600.0  # seconds an attempt may wait for a worker beyond what it may take


@dataclass(frozen=True, slots=True)
class SourceConnection:
    """A source whose server answers."""

    source: ConnectedSource
    info: EnvServerInfo

    def with_revision(self, revision: int) -> "SourceConnection":
        """Return the same source, with the revision of its environment."""
        return SourceConnection(replace(self.source, revision=revision), self.info)


async def connect_source(
    source: TrainSourceConfig | EvalSourceConfig, stack: AsyncExitStack, *, timeout: float, secret: str | None
) -> SourceConnection:
    """Connect for as long as `stack` lives. Raises PeerLost, WorkerDied, TokensRequired or ConfigInvalid."""
    assert source.address is not None
    end = time.monotonic() + timeout
    try:
        client = await EnvClient(source.address, secret).start(timeout)
    except PeerLost as error:
        raise PeerLost(f"the orchestrator waits for the env server of {source.source_name}: {error.message}") from error
    stack.push_async_callback(client.close)
    tasks = TaskCache(source.source_name, client, timeout=source.timeouts.load)
    info, count = await _wait_until_ready(source, client, tasks, end)
    if isinstance(source, TrainSourceConfig) and not info.trainable:
        raise TokensRequired(f"train source {source.source_name}: its endpoint gives no token ids and logprobs")
    if isinstance(source, TrainSourceConfig) and not (info.rewards or info.group_rewards):
        raise ConfigInvalid(
            f"train source {source.source_name}: its taskset has no reward, so nothing can be "
            f"learned; {MISSING_REWARD_ADVICE}"
        )
    deadline = source.max_attempt_seconds() + QUEUE_TIME_ALLOWANCE
    compares = bool(info.group_rewards)
    served = ConnectedSource(
        source.source_name,
        client,
        tasks,
        compares,
        deadline,
        source.attempts,
        timeout,
        count,
        environment_digest=info.environment_digest,
    )
    return SourceConnection(served, info)


async def observe_environment(
    connection: SourceConnection, store: RunStore, name: str, limit: int | None
) -> ObservedEnvironment:
    """Return the environment of a source as it is now, for a comparison with the one that `store` has under `name`.

    It includes all tasks of a finite source, up to `limit`; of an endless source, only those that were issued.
    """
    count = connection.source.num_tasks
    if count is None and limit is None:
        numbers = get_task_numbers(store, name)
    else:
        numbers = range(min(each for each in (count, limit) if each is not None))
    contents, keys = await connection.source.tasks.get_content_digests(numbers)
    return ObservedEnvironment(connection.info.environment, contents, keys, num_tasks=count)


async def _wait_until_ready(
    source: TrainSourceConfig | EvalSourceConfig, client: EnvClient, task_cache: TaskCache, deadline: float
) -> tuple[EnvServerInfo, int | None]:
    """What the server serves, and how many tasks, once it has a worker."""
    most = MAX_COUNTED_TASKS if isinstance(source, TrainSourceConfig) else source.num_tasks
    is_broken = False
    while True:
        try:
            health = await client.health()
            if health.state == "ok":
                return await client.info(count_tasks=False), await task_cache.count_tasks(most)
            is_broken = health.state == "broken"
            error = WorkerDied(f"the env server of {source.source_name} has no worker: {health.reason or health.state}")
        except RamifyError as failure:
            error = failure
        if not error.retryable or is_broken or time.monotonic() > deadline:
            raise error
        await asyncio.sleep(POLL_INTERVAL)
