"""All sinks of a run behind one pair of calls that never wait and never raise.

    log, show ==> queue ==> thread ==> sink        one queue and one thread for each

A sink that raises is told of once for each kind of failure, and given up after a few in a row. One whose call does not
return, or whose queue is full, loses what it cannot take; at the end nobody waits for it beyond the deadline.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ramify.monitor.sample import Sample
from ramify.monitor.sink import Sink

ROOM = 10_000  # calls that may wait for a sink: those of the minutes that opening one may take
FAILURES = 5  # in a row, after which a sink is given up
PATIENCE = 10.0  # seconds for all sinks together to take what is left, at the end

Open = Callable[[], Sink]
Job = Callable[[Sink], None]


class Monitors:
    """The sinks of a run, by name. `open` is called in the sink's own thread: it too may fail or hang."""

    def __init__(self, sinks: Mapping[str, Open], *, say: Callable[[str], None], room: int = ROOM) -> None:
        self._lines = [_Line(name, opening, say, room) for name, opening in sinks.items()]
        self._say = say

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step."""
        kept = dict(values)
        self._give(lambda sink: sink.log(step, kept))

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """A few rollouts of a step."""
        kept = list(samples)
        self._give(lambda sink: sink.show(step, kept))

    def close(self, patience: float = PATIENCE) -> None:
        """Let every sink take what is left, within `patience` seconds."""
        end = time.monotonic() + patience
        for line in self._lines:
            line.end()
        for line in self._lines:
            line.join(max(0.0, end - time.monotonic()))

    @property
    def lost(self) -> dict[str, int]:
        """How many calls each sink has not taken."""
        return {line.name: line.lost for line in self._lines}

    def _give(self, job: Job) -> None:
        for line in self._lines:
            line.give(job)


class _Line:
    """One sink, its queue and its thread."""

    def __init__(self, name: str, opening: Open, say: Callable[[str], None], room: int) -> None:
        self.name, self.lost = name, 0
        self._open, self._say = opening, say
        self._jobs: queue.Queue[Job | None] = queue.Queue(room)
        self._given_up = False
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._work, name=f"monitor {name}", daemon=True)
        self._thread.start()

    def give(self, job: Job) -> None:
        if not self._given_up:
            try:
                return self._jobs.put_nowait(job)
            except queue.Full:
                self._tell("full", f"monitor {self.name} does not keep up; what it cannot take is left out")
        self.lost += 1
        return None

    def end(self) -> None:
        """Say that this was all; a full queue is emptied by one to make room for that."""
        while self._thread.is_alive():
            try:
                return self._jobs.put_nowait(None)
            except queue.Full:
                self._drop()
        return None

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._given_up = True
            self._tell("hangs", f"monitor {self.name} did not end in time and is left behind")

    def _drop(self) -> None:
        try:
            self._jobs.get_nowait()
            self.lost += 1
        except queue.Empty:
            pass

    def _work(self) -> None:
        sink = self._opened()
        failures = 0
        while sink is not None and (job := self._jobs.get()) is not None:
            try:
                job(sink)
                failures = 0
            except Exception as error:  # noqa: BLE001 - a monitor may raise anything; the run goes on
                failures += 1
                self.lost += 1
                self._tell(type(error).__name__, f"monitor {self.name} failed: {type(error).__name__}: {error}")
            if failures == FAILURES:
                self._give_up(f"monitor {self.name} failed {failures} times in a row and is given up")
                return
        if sink is not None:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001
                self._tell("close", f"monitor {self.name} failed to close: {type(error).__name__}: {error}")

    def _opened(self) -> Sink | None:
        try:
            return self._open()
        except Exception as error:  # noqa: BLE001
            self._give_up(f"monitor {self.name} cannot be opened: {type(error).__name__}: {error}")
            return None

    def _give_up(self, line: str) -> None:
        self._given_up = True
        self._tell("given up", line)

    def _tell(self, kind: str, line: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._say(line)
