"""The supervisor: starts the processes of a run, keeps them alive, and ends with all of them or with a name.

One task tends each process through its lives. The first thing that decides the run ends it, whatever it is: the leader
(the orchestrator) exits, a budget of restarts is used up, a failure that would only repeat itself, Ctrl-C. Then every
process is let go at once, and none outlives this call.

- An exit by signal, or with an exception nobody named, is a crash: the process is started again, within its budget. The
  same exception several times in a row is a bug, and ends the run before the budget does.
- A process that has not answered for its `hang_timeout` is killed, which is a crash like any other.
- A named failure that is not retryable, and any named failure of the leader, ends the run under that name.
- SIGTERM and SIGUSR1 are passed to the leader, which makes a checkpoint and exits with 75, within `grace` seconds.
"""

import asyncio
import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from ramify.errors import ConfigInvalid, ProcessDied, RamifyError, failure_classes
from ramify.launch.liveness import process_state, wait_for_silence
from ramify.launch.nursery import Nursery
from ramify.launch.process import PATIENCE, Entry, Process, Role, State, how, is_signal
from ramify.launch.restarts import Budget

UNUSABLE = 2  # the exit code of a command whose configuration cannot be used
LEFT = 75  # of a run that was asked to leave, and can be continued
SAME = 3  # lives in a row that end alike, after which another would too
ALIVE = (State.STARTING, State.READY, State.SILENT)
NAMED = re.compile(r"([A-Z]\w+): (.*)")


class Outcome(Enum):
    """How a run ended; the value is the exit code of the command."""

    FINISHED = 0
    LEFT = LEFT
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Seen:
    """A process as it is now."""

    name: str
    state: State
    pid: int
    restarts: int
    seconds: float
    """Since its last start."""
    address: str = ""
    log: str = ""


class Supervisor:
    """The processes of one run. `run` it once."""

    def __init__(
        self,
        entries: Sequence[Entry],
        *,
        restarts: int,
        grace: float,
        patience: float = PATIENCE,
        say: Callable[[str], None] = print,
        changed: Callable[[Sequence[Seen]], None] | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        self.entries, self.grace, self.patience, self._nursery = list(entries), grace, patience, nursery
        self._say, self._changed = say, changed
        self._budgets = {entry.name: Budget(restarts) for entry in entries}
        self._lives: dict[str, Process] = {}
        self._ends: dict[str, list[str]] = {entry.name: [] for entry in entries}
        """What each process said last when it crashed by itself, for as long as it is the same."""
        self._again = asyncio.Event()
        """Set, and replaced, when the leader begins another life: a follower that was done is needed again."""
        self._leaving: asyncio.Task[None] | None = None

    async def run(self) -> Outcome:
        """Run to the end. Raises what went wrong under its name."""
        self._over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        tending = [asyncio.create_task(self._tend(entry), name=entry.name) for entry in self.entries]
        with self._signals():
            try:
                return await self._over
            finally:
                tasks = [*tending, *([self._leaving] if self._leaving else [])]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.gather(*(life.stop() for life in self._lives.values()))
                self._tell()

    def processes(self) -> list[Seen]:
        """What each process is doing."""
        now = time.monotonic()
        return [self._seen(entry, self._lives.get(entry.name), now) for entry in self.entries]

    def leave(self) -> None:
        """Ask the leader for a checkpoint, and end when it is made or `grace` seconds are over."""
        if self._leaving is None:
            self._say(f"asked to leave: making a checkpoint within {self.grace:g} s")
            self._leaving = asyncio.create_task(self._leave(), name="leaving")

    def interrupt(self) -> None:
        """End at once."""
        self._decide(Outcome.INTERRUPTED)

    # -- one process -----------------------------------------------------------------------------------------------

    async def _tend(self, entry: Entry) -> None:
        try:
            while True:
                again = self._again
                code, life = await self._live(entry)
                if entry.role is Role.FOLLOWER and code == 0:
                    await again.wait()
                    continue
                if not self._goes_on(life, code):
                    return
                await self._wait_for_next(life, code)
        except RamifyError as error:
            self._decide(error)
        except Exception as error:  # noqa: BLE001 - a bug here must end the run, not leave it without a keeper
            self._decide(error)

    async def _live(self, entry: Entry) -> tuple[int, Process]:
        """One life, from its start to its exit code."""
        life = self._lives[entry.name] = Process(entry, patience=self.patience, nursery=self._nursery)
        await life.start()
        self._tell()
        ending = asyncio.create_task(life.ended())
        watching = asyncio.create_task(self._watch(life))
        try:
            await asyncio.wait({ending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                watching.result()
            code = await ending
        finally:
            for task in (ending, watching):
                task.cancel()
            await asyncio.gather(ending, watching, return_exceptions=True)
        await life.stop()
        self._tell()
        return code, life

    async def _watch(self, life: Process) -> None:
        """Wait until a process answers, and kill it if it stops answering. Raises DeadlineExceeded if it never does."""
        await life.ready()
        self._tell()
        if life.entry.hang_timeout is None:
            return
        life.silence = await wait_for_silence(life, self._tell)
        where = f"process {life.pid}, {process_state(life.pid)}"
        self._say(f"{life.entry.name} ({where}) has not answered at {life.entry.address} for {life.silence:.0f} s")
        if life.entry.last_state is not None:
            self._say(life.entry.last_state())
        await life.kill()

    def _goes_on(self, life: Process, code: int) -> bool:
        """Whether there is to be another life; what decides the run is decided here."""
        entry = life.entry
        if entry.role is Role.LEADER and code in (0, LEFT):
            self._decide(Outcome(code))
            return False
        if code == UNUSABLE:
            raise ConfigInvalid(f"{entry.name} cannot be started:\n{life.tail()}")
        failure = failure_in(life.tail()) if code == 1 else None
        if failure is not None and (entry.role is Role.LEADER or not failure.retryable):
            raise failure
        if self._leaving is not None and entry.role is Role.LEADER:
            self._say(f"{entry.name} {_describe_end(life, code)} before a checkpoint was made; the last one holds")
            self._decide(Outcome.LEFT)
            return False
        return True

    async def _wait_for_next(self, life: Process, code: int) -> None:
        entry, budget = life.entry, self._budgets[life.entry.name]
        alike = self._alike(life, code)
        delay = budget.spend() if alike < SAME else None
        if delay is None:
            often = f"{alike} times in a row in the same way" if alike >= SAME else f"after {budget.total} restarts"
            raise ProcessDied(
                f"{entry.name} {_describe_end(life, code)}, {often}; the end of {entry.log}:\n{life.tail()}"
            )
        end = _describe_end(life, code)
        self._say(f"{entry.name} {end}; started again in {delay:g} s ({budget.total} of {budget.restarts})")
        life.state, life.since = State.WAITING, time.monotonic()
        self._tell()
        await asyncio.sleep(delay)
        if entry.role is Role.LEADER:
            self._again.set()
            self._again = asyncio.Event()

    def _alike(self, life: Process, code: int) -> int:
        """How many lives in a row have ended by themselves with the same last line."""
        ends, tail = self._ends[life.entry.name], life.tail()
        if is_signal(code) or failure_in(tail) is not None:
            ends.clear()
            return 0
        last = tail.splitlines()[-1]
        if ends and ends[-1] != last:
            ends.clear()
        ends.append(last)
        return len(ends)

    # -- the whole -------------------------------------------------------------------------------------------------

    async def _leave(self) -> None:
        leader = next(entry for entry in self.entries if entry.role is Role.LEADER)
        life = self._lives.get(leader.name)
        if life is not None and life.state in ALIVE:
            life.signal(signal.SIGTERM)
            await asyncio.sleep(self.grace)
        self._say("no checkpoint was made; the last one holds")
        self._decide(Outcome.LEFT)

    def _decide(self, outcome: Outcome | BaseException) -> None:
        """The first decision counts."""
        if self._over.done():
            return
        if isinstance(outcome, Outcome):
            self._over.set_result(outcome)
        else:
            self._over.set_exception(outcome)

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed(self.processes())

    def _seen(self, entry: Entry, life: Process | None, now: float) -> Seen:
        restarts = self._budgets[entry.name].total
        if life is None:
            return Seen(entry.name, State.WAITING, 0, restarts, 0.0, entry.address, str(entry.log))
        pid = life.pid if life.state in ALIVE else 0
        return Seen(entry.name, life.state, pid, restarts, now - life.since, entry.address, str(entry.log))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Our handlers, where there can be any: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGINT: self.interrupt, signal.SIGTERM: self.leave, signal.SIGUSR1: self.leave}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)


def _describe_end(life: Process, code: int) -> str:
    """Return how a process ended, as the end of a sentence."""
    if life.silence is None:
        return how(code)
    return f"did not answer for {life.silence:.0f} s and was killed"


def failure_in(tail: str) -> RamifyError | None:
    """The failure that a command named last, as `ramify` does; None for any other end."""
    lines = tail.splitlines()
    first = 0 if not any(line.startswith("Traceback") for line in lines) else len(lines) - 1
    for at in range(len(lines) - 1, first - 1, -1):
        found = NAMED.fullmatch(lines[at])
        known = failure_classes().get(found[1]) if found else None
        if found and known:
            return known("\n".join([found[2], *lines[at + 1 :]]))
    return None
