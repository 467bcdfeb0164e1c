"""All sinks of a run behind calls that never wait and never raise.

    log_metrics, log_samples ==> queue ==> thread ==> sink        one queue and one thread for each sink

A sink must never stop the run. The first failure of each kind is reported, and a sink is disabled after a few failures
in a row. If a sink hangs or its queue is full, calls are dropped; when the run ends, it waits for the sinks only until
a deadline.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec

from ramify.core.errors import ConfigInvalid
from ramify.launch.metric_sinks import ConsoleSink, RolloutSample, Sink, TensorBoardSink, TrackioSink, WandbSink
from ramify.orchestrate.run_config import RunConfig, TensorboardConfig, TrackioConfig, WandbConfig

MAX_QUEUED_CALLS = 10_000  # enough for the minutes that opening a sink may take
MAX_CONSECUTIVE_FAILURES = 5
CLOSE_TIMEOUT = 10.0  # seconds for all sinks together to process their queues at the end

SinkFactory = Callable[[], Sink]
SinkCall = Callable[[Sink], None]


class MonitorSinks:
    """The sinks of a run. Each factory is called in the sink's thread, since opening a sink may fail or hang too.

    `print_line` receives the warnings about sinks. Calls beyond `max_queued_calls` of a sink are dropped.
    """

    def __init__(
        self,
        factories: Mapping[str, SinkFactory],
        *,
        print_line: Callable[[str], None],
        max_queued_calls: int = MAX_QUEUED_CALLS,
    ) -> None:
        self._workers = [
            _SinkWorker(name, factory, print_line, max_queued_calls) for name, factory in factories.items()
        ]

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        copied = dict(values)
        self._submit(lambda sink: sink.log_metrics(step, copied))

    def log_samples(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """Log a few rollouts of a step."""
        copied = list(samples)
        self._submit(lambda sink: sink.log_samples(step, copied))

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Let every sink process its queue, within `timeout` seconds in all."""
        deadline = time.monotonic() + timeout
        for worker in self._workers:
            worker.request_stop()
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _submit(self, call: SinkCall) -> None:
        for worker in self._workers:
            worker.submit(call)


class _SinkWorker:
    """One sink, its queue and its thread."""

    def __init__(
        self, name: str, factory: SinkFactory, print_line: Callable[[str], None], max_queued_calls: int
    ) -> None:
        self._name, self._factory, self._print_line = name, factory, print_line
        self._calls: queue.Queue[SinkCall | None] = queue.Queue(max_queued_calls)
        self._disabled = False
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"monitor {name}", daemon=True)
        self._thread.start()

    def submit(self, call: SinkCall) -> None:
        """Queue a call, or drop it if the queue is full or the sink is disabled."""
        if not self._disabled:
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                self._warn_once("full", f"sink {self._name} is too slow; dropping calls")

    def request_stop(self) -> None:
        """Queue the end; drops the oldest call if the queue is full."""
        while self._thread.is_alive():
            try:
                return self._calls.put_nowait(None)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._calls.get_nowait()
        return None

    def join(self, timeout: float) -> None:
        """Wait for the thread, for at most `timeout` seconds."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._disabled = True
            self._warn_once("hangs", f"sink {self._name} did not close in time")

    def _run(self) -> None:
        sink = self._open_sink()
        failures = 0
        while sink is not None and (call := self._calls.get()) is not None:
            try:
                call(sink)
                failures = 0
            except Exception as error:  # noqa: BLE001 - a sink may raise anything, and the run must continue
                failures += 1
                self._warn_once(type(error).__name__, f"sink {self._name} failed: {type(error).__name__}: {error}")
            if failures == MAX_CONSECUTIVE_FAILURES:
                self._give_up(f"sink {self._name} disabled after {failures} consecutive failures")
                return
        if sink is not None:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001
                self._warn_once("close", f"sink {self._name} failed to close: {type(error).__name__}: {error}")

    def _open_sink(self) -> Sink | None:
        try:
            return self._factory()
        except Exception as error:  # noqa: BLE001
            self._give_up(f"sink {self._name} cannot be opened: {type(error).__name__}: {error}")
            return None

    def _give_up(self, message: str) -> None:
        self._disabled = True
        self._warn_once("disabled", message)

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._print_line(message)


def check_sinks_installed(config: RunConfig) -> None:
    """Raise ConfigInvalid if the library of a sink is not installed."""
    missing = [
        (f"monitor.sinks.{index}", f"{sink.type} is not installed; pip install 'ramify[{sink.type}]'")
        for index, sink in enumerate(config.monitor.sinks)
        if find_spec(sink.type) is None
    ]
    if missing:
        raise ConfigInvalid(problems=missing)


def open_monitor_sinks(config: RunConfig, print_line: Callable[[str], None] = print) -> MonitorSinks:
    """Open the sinks of a run: always the console, and those that the configuration names.

    `print_line` prints the console's lines and warnings about sinks.
    """
    name, path, settings = config.path.name, config.path, config.model_dump(mode="json")
    factories: dict[str, SinkFactory] = {"console": lambda: ConsoleSink(print_line)}
    for index, sink in enumerate(config.monitor.sinks):
        match sink:
            case WandbConfig(project=project, entity=entity):
                factory = partial(WandbSink, name, path, settings, project=project, entity=entity)
            case TrackioConfig(project=project):
                factory = partial(TrackioSink, name, settings, project=project)
            case TensorboardConfig():
                factory = partial(TensorBoardSink, path / "tensorboard")
        factories[sink.type if sink.type not in factories else f"{sink.type}.{index}"] = factory
    return MonitorSinks(factories, print_line=print_line)
