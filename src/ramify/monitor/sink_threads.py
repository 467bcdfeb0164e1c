"""All sinks of a run behind one pair of calls that never wait and never raise.

    log, show ==> queue ==> thread ==> sink        one queue and one thread for each

A sink that raises is told of once for each kind of failure, and given up after a few in a row. One whose call does not
return, or whose queue is full, loses what it cannot take; at the end nobody waits for it beyond the deadline.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ramify.monitor.rollout_samples import RolloutSample
from ramify.monitor.sink import Sink

MAX_QUEUED_CALLS = 10_000  # calls that may wait for a sink: those of the minutes that opening one may take
MAX_CONSECUTIVE_FAILURES = 5  # in a row, after which a sink is given up
CLOSE_TIMEOUT = 10.0  # seconds for all sinks together to take what is left, at the end

SinkFactory = Callable[[], Sink]
SinkCall = Callable[[Sink], None]


class MonitorSinks:
    """The sinks of a run, by name. `open` is called in the sink's own thread: it too may fail or hang."""

    def __init__(
        self,
        factories: Mapping[str, SinkFactory],
        *,
        print_line: Callable[[str], None],
        max_queued: int = MAX_QUEUED_CALLS,
    ) -> None:
        self._workers = [_SinkWorker(name, opening, print_line, max_queued) for name, opening in factories.items()]
        self._print_line = print_line

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step."""
        kept = dict(values)
        self._submit(lambda sink: sink.log_metrics(step, kept))

    def log_samples(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """A few rollouts of a step."""
        kept = list(samples)
        self._submit(lambda sink: sink.log_samples(step, kept))

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Let every sink take what is left, within `patience` seconds."""
        end = time.monotonic() + timeout
        for line in self._workers:
            line.request_stop()
        for line in self._workers:
            line.join(max(0.0, end - time.monotonic()))

    @property
    def num_dropped(self) -> dict[str, int]:
        """How many calls each sink has not taken."""
        return {line.name: line.num_dropped for line in self._workers}

    def _submit(self, call: SinkCall) -> None:
        for line in self._workers:
            line.submit(call)


class _SinkWorker:
    """One sink, its queue and its thread."""

    def __init__(self, name: str, factory: SinkFactory, print_line: Callable[[str], None], max_queued: int) -> None:
        self.name, self.num_dropped = name, 0
        self._factory, self._print_line = factory, print_line
        self._calls: queue.Queue[SinkCall | None] = queue.Queue(max_queued)
        self._given_up = False
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"monitor {name}", daemon=True)
        self._thread.start()

    def submit(self, call: SinkCall) -> None:
        if not self._given_up:
            try:
                return self._calls.put_nowait(call)
            except queue.Full:
                self._warn_once("full", f"monitor {self.name} does not keep up; what it cannot take is left out")
        self.num_dropped += 1
        return None

    def request_stop(self) -> None:
        """Say that this was all; a full queue is emptied by one to make room for that."""
        while self._thread.is_alive():
            try:
                return self._calls.put_nowait(None)
            except queue.Full:
                self._drop_oldest()
        return None

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._given_up = True
            self._warn_once("hangs", f"monitor {self.name} did not end in time and is left behind")

    def _drop_oldest(self) -> None:
        try:
            self._calls.get_nowait()
            self.num_dropped += 1
        except queue.Empty:
            pass

    def _run(self) -> None:
        sink = self._open_sink()
        failures = 0
        while sink is not None and (job := self._calls.get()) is not None:
            try:
                job(sink)
                failures = 0
            except Exception as error:  # noqa: BLE001 - a monitor may raise anything; the run goes on
                failures += 1
                self.num_dropped += 1
                self._warn_once(type(error).__name__, f"monitor {self.name} failed: {type(error).__name__}: {error}")
            if failures == MAX_CONSECUTIVE_FAILURES:
                self._give_up(f"monitor {self.name} failed {failures} times in a row and is given up")
                return
        if sink is not None:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001
                self._warn_once("close", f"monitor {self.name} failed to close: {type(error).__name__}: {error}")

    def _open_sink(self) -> Sink | None:
        try:
            return self._factory()
        except Exception as error:  # noqa: BLE001
            self._give_up(f"monitor {self.name} cannot be opened: {type(error).__name__}: {error}")
            return None

    def _give_up(self, message: str) -> None:
        self._given_up = True
        self._warn_once("given up", message)

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._print_line(message)
