"""The client of an env server: typed methods, progress updates of running rollouts, and the server as a child."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ramify.core.async_calls import AsyncService
from ramify.core.errors import ProcessDied
from ramify.env import Task
from ramify.processes.wire import WireClient, WireMessage, WireSettings
from ramify.rollout.envserver.config import EnvServerConfig
from ramify.rollout.envserver.messages import (
    AddressUpdate,
    CancelRequest,
    EnvServerHealth,
    EnvServerInfo,
    EnvServerStats,
    GroupScores,
    InfoRequest,
    RolloutRequest,
    RolloutResponse,
    RolloutUpdate,
    ScoreGroupRequest,
    TaskPage,
    TasksRequest,
)
from ramify.rollout.server_process import ServerProcess
from ramify.trace import Episode, Trace, decode_episode, encode_trace

if TYPE_CHECKING:
    from ramify.rollout.attempt import ProgressCallback

CONTROL_TIMEOUT = 30.0  # seconds for requests that need no model
ROLLOUT_TIMEOUT = 3600.0  # default seconds for a rollout
STOP_MARGIN = 30.0  # seconds to stop the workers, after `shutdown_timeout` seconds for running attempts


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """A finished rollout."""

    encoded_episode: bytes | memoryview
    worker_id: str  # the worker that finished it
    crashes: int  # workers that were lost while they ran it

    @property
    def episode(self) -> Episode:
        """The decoded episode; its arrays are views of the received bytes."""
        return decode_episode(self.encoded_episode)


class EnvClient(AsyncService):
    """A client of the env server at `address`. The server may start later than the client: `start` waits for it."""

    def __init__(self, address: str, secret: str | None = None, *, settings: WireSettings | None = None) -> None:
        self._client = WireClient(address, secret=secret, settings=settings)

    @property
    def address(self) -> str:
        """The address of the server."""
        return self._client.address

    @property
    def session_number(self) -> int:
        """The number of times that the server has lost the requests of this client, because it was restarted."""
        return self._client.session_number

    async def start(self, timeout: float | None = None) -> Self:
        """Connect. Raises PeerLost if the server does not answer within `timeout` seconds."""
        await self._client.start(timeout)
        return self

    async def close(self) -> None:
        """Cancel open requests and disconnect."""
        await self._client.close()

    async def run(
        self,
        task: Task | dict[str, Any],
        *,
        id: str,
        group: str = "",
        attempt: int = 0,
        seed: int = 0,
        train: bool = False,
        sampling: dict[str, Any] | None = None,
        on_progress: "ProgressCallback | None" = None,
        environment_digest: str = "",
        timeout: float = ROLLOUT_TIMEOUT,
    ) -> RolloutResult:
        """Run one rollout. Cancelling this call cancels the rollout.

        `on_progress` is called with each phase and the number of model calls so far; after the loss of a worker, both
        start over. Raises EnvironmentChanged if the digest of the server's environment is not `environment_digest`.
        """
        request = RolloutRequest(
            task=task.to_wire() if isinstance(task, Task) else task,
            id=id,
            group=group,
            attempt=attempt,
            seed=seed,
            train=train,
            sampling=sampling,
            stream=on_progress is not None,
            environment=environment_digest,
        )

        def report(part: WireMessage) -> None:
            assert on_progress is not None
            update = part.decode(RolloutUpdate)
            on_progress(update.phase, update.num_calls)

        on_part = None if on_progress is None else report
        message = await self._client.call("run", WireMessage.encode(request), timeout=timeout, on_part=on_part)
        response = message.decode(RolloutResponse)
        return RolloutResult(message.blobs[0], response.worker, response.crashes)

    async def score_group(
        self,
        task: Task | dict[str, Any],
        traces: Sequence[Trace],
        *,
        environment_digest: str = "",
        timeout: float = ROLLOUT_TIMEOUT,
    ) -> GroupScores:
        """Compute the group rewards of all attempts at a task; return them for each trace."""
        request = ScoreGroupRequest(task.to_wire() if isinstance(task, Task) else task, environment_digest)
        message = WireMessage.encode(request, *(encode_trace(trace) for trace in traces))
        return (await self._client.call("score_group", message, timeout=timeout)).decode(GroupScores)

    async def tasks(self, start: int = 0, count: int = 100, *, timeout: float = 300.0) -> TaskPage:
        """Return the tasks `start` to `start + count` of the taskset, in order."""
        request = WireMessage.encode(TasksRequest(start, count))
        return (await self._client.call("tasks", request, timeout=timeout)).decode(TaskPage)

    async def cancel(self, ids: Iterable[str]) -> int:
        """Cancel rollouts by id, including other clients' rollouts; return how many were running."""
        request = WireMessage.encode(CancelRequest(list(ids)))
        return (await self._client.call("cancel", request, timeout=CONTROL_TIMEOUT)).decode(int)

    async def update_addresses(self, update: AddressUpdate) -> None:
        """Tell the server where inference servers are from now on; running rollouts use the new addresses too."""
        await self._client.call("addresses", WireMessage.encode(update), timeout=CONTROL_TIMEOUT)

    async def info(self, *, count_tasks: bool = True, timeout: float = 300.0) -> EnvServerInfo:
        """Return a description of the environment. Counting its tasks takes as long as loading them."""
        request = WireMessage.encode(InfoRequest(count_tasks))
        return (await self._client.call("info", request, timeout=timeout)).decode(EnvServerInfo)

    async def health(self) -> EnvServerHealth:
        """Return the state of the server and its workers."""
        return (await self._client.call("health", timeout=CONTROL_TIMEOUT)).decode(EnvServerHealth)

    async def stats(self) -> EnvServerStats:
        """Return the server's counters and scaling decisions."""
        return (await self._client.call("stats", timeout=CONTROL_TIMEOUT)).decode(EnvServerStats)


class EnvServerProcess(ServerProcess):
    """One `ramify env-server` process; its configuration is written to `config_path`.

    Its output is in `logs/env-server.log` of the run directory; what its workers print is in the log of the source.
    """

    title, exit_error = "the env server", ProcessDied

    def __init__(self, config: EnvServerConfig, config_path: Path, *, start_timeout: float = 180.0) -> None:
        stop_timeout, log_path = config.shutdown_timeout + STOP_MARGIN, config.output / "logs" / "env-server.log"
        super().__init__(
            "env-server", config, config_path, log_path, start_timeout=start_timeout, stop_timeout=stop_timeout
        )
