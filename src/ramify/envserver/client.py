"""The client of an env server: its methods with types, and rollouts that can be watched while they grow."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ramify.env import Task
from ramify.envserver.messages import (
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
from ramify.trace import Episode, Trace, TraceDeltaDecoder, decode_episode, encode_trace
from ramify.wire import WireClient, WireMessage, WireSettings

CONTROL_TIMEOUT = 30.0  # seconds for what needs no model
ROLLOUT_TIMEOUT = 3600.0  # seconds for a rollout, unless the caller says otherwise

ProgressCallback = Callable[[str, Trace], None]


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """A rollout that is finished: its encoded episode, and what it took."""

    encoded_episode: bytes | memoryview
    worker_id: str
    num_starts: int
    crashes: int

    @property
    def episode(self) -> Episode:
        """The traces; their arrays are views over the received bytes."""
        return decode_episode(self.encoded_episode)


class EnvClient:
    """An env server at `address`. It may be started later than us: `start` waits for it as long as it is told to."""

    def __init__(self, address: str, secret: str | None = None, *, settings: WireSettings | None = None) -> None:
        self._client = WireClient(address, secret=secret, settings=settings)

    @property
    def address(self) -> str:
        return self._client.address

    async def start(self, timeout: float | None = None) -> Self:
        """Connect; PeerLost if nobody answers in time."""
        await self._client.start(timeout)
        return self

    async def close(self) -> None:
        """Take back what is open and go."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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
        max_tries: int | None = None,
        on_progress: ProgressCallback | None = None,
        environment_digest: str = "",
        timeout: float = ROLLOUT_TIMEOUT,
    ) -> RolloutResult:
        """One rollout. `watch` gets its phases and the trace as it grows; a rollout that is started again starts over.

        A server whose environment has another digest than `environment` raises EnvironmentChanged. Whoever cancels this
        cancels the rollout.
        """
        request = RolloutRequest(
            task=task.to_wire() if isinstance(task, Task) else task,
            id=id,
            group=group,
            attempt=attempt,
            seed=seed,
            train=train,
            sampling=sampling,
            attempts=max_tries,
            stream=on_progress is not None,
            environment=environment_digest,
        )
        on_part = None if on_progress is None else _DeltaAssembler(on_progress).apply
        answer = await self._client.call("run", WireMessage.encode(request), timeout=timeout, on_part=on_part)
        done = answer.decode(RolloutResponse)
        return RolloutResult(answer.blobs[0], done.worker, done.starts, done.crashes)

    async def score_group(
        self,
        task: Task | dict[str, Any],
        traces: Sequence[Trace],
        *,
        environment_digest: str = "",
        timeout: float = ROLLOUT_TIMEOUT,
    ) -> GroupScores:
        """The rewards that only all attempts at a task together have, for each trace."""
        request = ScoreGroupRequest(task.to_wire() if isinstance(task, Task) else task, environment_digest)
        message = WireMessage.encode(request, *(encode_trace(trace) for trace in traces))
        return (await self._client.call("score_group", message, timeout=timeout)).decode(GroupScores)

    async def tasks(self, start: int = 0, count: int = 100, *, timeout: float = 300.0) -> TaskPage:
        """Tasks `start` to `start + count` of the taskset, in its order."""
        return (
            await self._client.call("tasks", WireMessage.encode(TasksRequest(start, count)), timeout=timeout)
        ).decode(TaskPage)

    async def cancel(self, ids: Iterable[str]) -> int:
        """Cancel rollouts by id, whoever asked for them; returns how many were running."""
        return (
            await self._client.call("cancel", WireMessage.encode(CancelRequest(list(ids))), timeout=CONTROL_TIMEOUT)
        ).decode(int)

    async def info(self, *, count_tasks: bool = True, timeout: float = 300.0) -> EnvServerInfo:
        """What the server serves. Counting its tasks takes as long as loading them."""
        return (await self._client.call("info", WireMessage.encode(InfoRequest(count_tasks)), timeout=timeout)).decode(
            EnvServerInfo
        )

    async def health(self) -> EnvServerHealth:
        """How the server does."""
        return (await self._client.call("health", timeout=CONTROL_TIMEOUT)).decode(EnvServerHealth)

    async def stats(self) -> EnvServerStats:
        """What the server has done."""
        return (await self._client.call("stats", timeout=CONTROL_TIMEOUT)).decode(EnvServerStats)


class _DeltaAssembler:
    """Puts the deltas of a rollout together; a later start replaces an earlier one."""

    def __init__(self, on_progress: ProgressCallback) -> None:
        self._on_progress, self._start, self._reader = on_progress, -1, TraceDeltaDecoder()

    def apply(self, part: WireMessage) -> None:
        update = part.decode(RolloutUpdate)
        if update.start < self._start:
            return
        if update.start > self._start:
            self._start, self._reader = update.start, TraceDeltaDecoder()
        for delta in part.blobs:
            self._reader.apply(delta)
        self._on_progress(update.phase, self._reader.trace)
