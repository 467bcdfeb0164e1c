"""Meeting the env server of a source, which may still be booting, or be started again meanwhile."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from ramify.env.decorators import MISSING_REWARD_ADVICE
from ramify.envserver.client import EnvClient
from ramify.envserver.messages import EnvServerInfo
from ramify.errors import ConfigInvalid, PeerLost, RamifyError, TokensRequired, WorkerDied
from ramify.orchestrate.config import EvalSourceConfig, TrainSourceConfig
from ramify.orchestrate.sampling import Served
from ramify.orchestrate.tasks import MAX_COUNTED_TASKS, TaskBook
from ramify.store import RunStore
from ramify.store.environments import ObservedEnvironment, get_task_numbers

LOOK = 0.05  # seconds between two looks at a server that is not ready
SLACK = 600.0  # seconds an attempt may wait for a worker beyond what it may take


@dataclass(frozen=True, slots=True)
class Met:
    """A source whose server answers."""

    served: Served
    info: EnvServerInfo

    def with_revision(self, revision: int) -> "Met":
        """Return the same source, with the revision of its environment."""
        return Met(replace(self.served, revision=revision), self.info)


async def meet(
    source: TrainSourceConfig | EvalSourceConfig, stack: AsyncExitStack, *, patience: float, secret: str | None
) -> Met:
    """Connect for as long as `stack` lives. Raises PeerLost, WorkerDied, TokensRequired or ConfigInvalid."""
    assert source.address is not None
    end = time.monotonic() + patience
    try:
        client = await EnvClient(source.address, secret).start(patience)
    except PeerLost as error:
        raise PeerLost(f"the orchestrator waits for the env server of {source.source_name}: {error.message}") from error
    stack.push_async_callback(client.close)
    tasks = TaskBook(source.source_name, client, deadline=source.timeouts.load)
    info, count = await _ready(source, client, tasks, end)
    if isinstance(source, TrainSourceConfig) and not info.trainable:
        raise TokensRequired(f"train source {source.source_name}: its endpoint gives no token ids and logprobs")
    if isinstance(source, TrainSourceConfig) and not (info.rewards or info.group_rewards):
        raise ConfigInvalid(
            f"train source {source.source_name}: its taskset has no reward, so nothing can be learned; {MISSING_REWARD_ADVICE}"
        )
    deadline = source.max_attempt_seconds() + SLACK
    compares = bool(info.group_rewards)
    served = Served(
        source.source_name,
        client,
        tasks,
        compares,
        deadline,
        source.attempts,
        patience,
        count,
        environment=info.environment_digest,
    )
    return Met(served, info)


async def observe(met: Met, store: RunStore, name: str, limit: int | None) -> ObservedEnvironment:
    """Return the environment of a source as it is now, for a comparison with the one that `store` has under `name`.

    It includes all tasks of a finite source, up to `limit`; of an endless source, only those that were issued.
    """
    count = met.served.count
    if count is None and limit is None:
        numbers = get_task_numbers(store, name)
    else:
        numbers = range(min(each for each in (count, limit) if each is not None))
    contents, keys = await met.served.tasks.contents(numbers)
    return ObservedEnvironment(met.info.environment, contents, keys, num_tasks=count)


async def _ready(
    source: TrainSourceConfig | EvalSourceConfig, client: EnvClient, tasks: TaskBook, end: float
) -> tuple[EnvServerInfo, int | None]:
    """What the server serves, and how many tasks, once it has a worker."""
    most = MAX_COUNTED_TASKS if isinstance(source, TrainSourceConfig) else source.num_tasks
    broken = False
    while True:
        try:
            health = await client.health()
            if health.state == "ok":
                return await client.info(count_tasks=False), await tasks.count(most)
            broken = health.state == "broken"
            error = WorkerDied(f"the env server of {source.source_name} has no worker: {health.reason or health.state}")
        except RamifyError as failure:
            error = failure
        if not error.retryable or broken or time.monotonic() > end:
            raise error
        await asyncio.sleep(LOOK)
