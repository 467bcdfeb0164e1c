"""The client of an env server: its methods with types, and rollouts that can be watched while they grow."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ramify.env import Task
from ramify.envserver.messages import (
    Cancel,
    Describe,
    Done,
    GroupScores,
    Health,
    Info,
    Run,
    ScoreGroup,
    Stats,
    TaskPage,
    Tasks,
    Turn,
)
from ramify.trace import Episode, Trace, TraceDeltaDecoder, decode_episode, encode_trace
from ramify.wire import WireClient, WireMessage, WireSettings

QUICK = 30.0  # seconds for what needs no model
LONG = 3600.0  # seconds for a rollout, unless the caller says otherwise

Watch = Callable[[str, Trace], None]


@dataclass(frozen=True, slots=True)
class Ran:
    """A rollout that is finished: its encoded episode, and what it took."""

    data: bytes | memoryview
    worker: str
    starts: int
    crashes: int

    @property
    def episode(self) -> Episode:
        """The traces; their arrays are views over the received bytes."""
        return decode_episode(self.data)


class EnvClient:
    """An env server at `address`. It may be started later than us: `start` waits for it as long as it is told to."""

    def __init__(self, address: str, secret: str | None = None, *, settings: WireSettings | None = None) -> None:
        self._client = WireClient(address, secret=secret, settings=settings)

    @property
    def address(self) -> str:
        return self._client.address

    async def start(self, deadline: float | None = None) -> Self:
        """Connect; PeerLost if nobody answers in time."""
        await self._client.start(deadline)
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
        attempts: int | None = None,
        watch: Watch | None = None,
        environment: str = "",
        deadline: float = LONG,
    ) -> Ran:
        """One rollout. `watch` gets its phases and the trace as it grows; a rollout that is started again starts over.

        A server whose environment has another digest than `environment` raises EnvironmentChanged. Whoever cancels this
        cancels the rollout.
        """
        ask = Run(
            task=task.to_wire() if isinstance(task, Task) else task,
            id=id,
            group=group,
            attempt=attempt,
            seed=seed,
            train=train,
            sampling=sampling,
            attempts=attempts,
            stream=watch is not None,
            environment=environment,
        )
        on_part = None if watch is None else _Growing(watch).take
        answer = await self._client.call("run", WireMessage.encode(ask), timeout=deadline, on_part=on_part)
        done = answer.decode(Done)
        return Ran(answer.blobs[0], done.worker, done.starts, done.crashes)

    async def score_group(
        self, task: Task | dict[str, Any], traces: Sequence[Trace], *, environment: str = "", deadline: float = LONG
    ) -> GroupScores:
        """The rewards that only all attempts at a task together have, for each trace."""
        ask = ScoreGroup(task.to_wire() if isinstance(task, Task) else task, environment)
        message = WireMessage.encode(ask, *(encode_trace(trace) for trace in traces))
        return (await self._client.call("score_group", message, timeout=deadline)).decode(GroupScores)

    async def tasks(self, start: int = 0, count: int = 100, *, deadline: float = 300.0) -> TaskPage:
        """Tasks `start` to `start + count` of the taskset, in its order."""
        return (await self._client.call("tasks", WireMessage.encode(Tasks(start, count)), timeout=deadline)).decode(
            TaskPage
        )

    async def cancel(self, ids: Iterable[str]) -> int:
        """Cancel rollouts by id, whoever asked for them; returns how many were running."""
        return (await self._client.call("cancel", WireMessage.encode(Cancel(list(ids))), timeout=QUICK)).decode(int)

    async def info(self, *, count_tasks: bool = True, deadline: float = 300.0) -> Info:
        """What the server serves. Counting its tasks takes as long as loading them."""
        return (await self._client.call("info", WireMessage.encode(Describe(count_tasks)), timeout=deadline)).decode(
            Info
        )

    async def health(self) -> Health:
        """How the server does."""
        return (await self._client.call("health", timeout=QUICK)).decode(Health)

    async def stats(self) -> Stats:
        """What the server has done."""
        return (await self._client.call("stats", timeout=QUICK)).decode(Stats)


class _Growing:
    """Puts the deltas of a rollout together; a later start replaces an earlier one."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._start, self._reader = watch, -1, TraceDeltaDecoder()

    def take(self, part: WireMessage) -> None:
        turn = part.decode(Turn)
        if turn.start < self._start:
            return
        if turn.start > self._start:
            self._start, self._reader = turn.start, TraceDeltaDecoder()
        for delta in part.blobs:
            self._reader.apply(delta)
        self._watch(turn.phase, self._reader.trace)
