"""Whatever a sink does, the run goes on."""

import threading

from ramify.launch.sink_threads import MonitorSinks

LONG = 30.0  # seconds; no test should wait this long


class RecordingSink:
    """Keeps what it is given."""

    def __init__(self):
        self.values, self.samples, self.closed = [], [], False

    def log_metrics(self, step, values):
        self.values.append((step, values))

    def log_samples(self, step, samples):
        self.samples.append((step, samples))

    def close(self):
        self.closed = True


class FailingSink(RecordingSink):
    """Fails the first `failures` times."""

    def __init__(self, failures: int):
        super().__init__()
        self.failures = failures

    def log_metrics(self, step, values):
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to host")
        super().log_metrics(step, values)


class HangingSink(RecordingSink):
    """Hangs in its first call until it is released."""

    def __init__(self):
        super().__init__()
        self.released, self.called = threading.Event(), threading.Event()

    def log_metrics(self, step, values):
        self.called.set()
        self.released.wait(LONG)
        super().log_metrics(step, values)


def test_every_sink_gets_every_call_in_order():
    recorded = [RecordingSink(), RecordingSink()]
    sinks = MonitorSinks({"a": lambda: recorded[0], "b": lambda: recorded[1]}, print_line=print)
    for step in range(100):
        sinks.log_metrics(step, {"reward/all/mean": step / 100})
    sinks.log_samples(99, [])
    sinks.close()
    for sink in recorded:
        assert [step for step, _ in sink.values] == list(range(100))
        assert sink.samples == [(99, [])]
        assert sink.closed


def test_values_may_change_after_they_were_logged():
    sink, values = RecordingSink(), {"train/loss": 1.0}
    sinks = MonitorSinks({"a": lambda: sink}, print_line=print)
    sinks.log_metrics(0, values)
    values["train/loss"] = 2.0
    sinks.close()
    assert sink.values == [(0, {"train/loss": 1.0})]


def test_a_failure_is_reported_once_and_later_calls_succeed():
    sink, lines = FailingSink(3), []
    sinks = MonitorSinks({"wandb": lambda: sink}, print_line=lines.append)
    for step in range(10):
        sinks.log_metrics(step, {})
    sinks.close()
    assert lines == ["sink wandb failed: ConnectionError: no route to host"]
    assert len(sink.values) == 7


def test_a_sink_that_always_fails_is_disabled_and_the_others_are_not():
    sink, lines = RecordingSink(), []
    sinks = MonitorSinks({"wandb": lambda: FailingSink(1000), "console": lambda: sink}, print_line=lines.append)
    for step in range(50):
        sinks.log_metrics(step, {})
    sinks.close()
    assert lines[-1] == "sink wandb disabled after 5 consecutive failures"
    assert len(sink.values) == 50


def test_a_sink_that_cannot_be_opened_is_reported():
    def fail_to_open():
        raise ModuleNotFoundError("No module named 'wandb'")

    lines = []
    sinks = MonitorSinks({"wandb": fail_to_open}, print_line=lines.append)
    sinks.close()
    sinks.log_metrics(0, {})
    assert lines == ["sink wandb cannot be opened: ModuleNotFoundError: No module named 'wandb'"]


def test_closing_does_not_wait_for_a_sink_that_hangs():
    sink, lines = HangingSink(), []
    sinks = MonitorSinks({"slow": lambda: sink}, print_line=lines.append, max_queued_calls=4)
    sinks.log_metrics(0, {})
    assert sink.called.wait(LONG)
    for step in range(1, 6):
        sinks.log_metrics(step, {})
    assert lines == ["sink slow is too slow; dropping calls"]
    sinks.close(timeout=0.05)
    assert lines[-1] == "sink slow did not close in time"
    assert sink.values == []
    sink.released.set()


def test_closing_does_not_wait_for_a_sink_that_hangs_while_it_opens():
    released, lines = threading.Event(), []

    def open_slowly():
        released.wait(LONG)
        return RecordingSink()

    sinks = MonitorSinks({"slow": open_slowly}, print_line=lines.append)
    sinks.log_metrics(0, {})
    sinks.close(timeout=0.05)
    assert lines == ["sink slow did not close in time"]
    released.set()
