"""Monitors: whatever a sink does, the run goes on."""

import threading

from ramify.monitor import MonitorSinks

FOREVER = 30.0  # seconds that nobody should have to wait


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.values, self.samples, self.closed = [], [], False

    def log(self, step, values):
        self.values.append((step, values))

    def show(self, step, samples):
        self.samples.append((step, samples))

    def close(self):
        self.closed = True


class Failing(Kept):
    def __init__(self, failures: int):
        super().__init__()
        self.failures = failures

    def log(self, step, values):
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to host")
        super().log(step, values)


class Hanging(Kept):
    def __init__(self):
        super().__init__()
        self.free, self.called = threading.Event(), threading.Event()

    def log(self, step, values):
        self.called.set()
        self.free.wait(FOREVER)
        super().log(step, values)


def test_every_sink_gets_everything_in_order():
    sinks = [Kept(), Kept()]
    monitors = MonitorSinks({"a": lambda: sinks[0], "b": lambda: sinks[1]}, print_line=print)
    for step in range(100):
        monitors.log_metrics(step, {"reward/all/mean": step / 100})
    monitors.log_samples(99, [])
    monitors.close()
    for sink in sinks:
        assert [step for step, _ in sink.values] == list(range(100))
        assert sink.samples == [(99, [])]
        assert sink.closed
    assert monitors.num_dropped == {"a": 0, "b": 0}


def test_what_is_given_may_change_afterwards():
    sink, values = Kept(), {"train/loss": 1.0}
    monitors = MonitorSinks({"a": lambda: sink}, print_line=print)
    monitors.log_metrics(0, values)
    values["train/loss"] = 2.0
    monitors.close()
    assert sink.values == [(0, {"train/loss": 1.0})]


def test_a_failure_is_told_of_once_and_passes():
    sink, said = Failing(3), []
    monitors = MonitorSinks({"wandb": lambda: sink}, print_line=said.append)
    for step in range(10):
        monitors.log_metrics(step, {})
    monitors.close()
    assert said == ["monitor wandb failed: ConnectionError: no route to host"]
    assert len(sink.values) == 7
    assert monitors.num_dropped == {"wandb": 3}


def test_one_that_always_fails_is_given_up_and_the_others_are_not():
    sink, said = Kept(), []
    monitors = MonitorSinks({"wandb": lambda: Failing(1000), "console": lambda: sink}, print_line=said.append)
    for step in range(50):
        monitors.log_metrics(step, {})
    monitors.close()
    assert said[-1] == "monitor wandb failed 5 times in a row and is given up"
    assert len(sink.values) == 50


def test_one_that_cannot_be_opened_is_told_of():
    def absent():
        raise ModuleNotFoundError("No module named 'wandb'")

    said = []
    monitors = MonitorSinks({"wandb": absent}, print_line=said.append)
    monitors.close()
    monitors.log_metrics(0, {})
    assert said == ["monitor wandb cannot be opened: ModuleNotFoundError: No module named 'wandb'"]
    assert monitors.num_dropped == {"wandb": 1}


def test_nobody_waits_for_one_that_hangs():
    sink, said = Hanging(), []
    monitors = MonitorSinks({"slow": lambda: sink}, print_line=said.append, max_queued=4)
    monitors.log_metrics(0, {})
    assert sink.called.wait(FOREVER)
    for step in range(1, 6):
        monitors.log_metrics(step, {})
    assert said == ["monitor slow does not keep up; what it cannot take is left out"]
    monitors.close(timeout=0.05)
    assert said[-1] == "monitor slow did not end in time and is left behind"
    assert sink.values == []
    sink.free.set()


def test_one_that_hangs_while_it_is_opened_is_left_behind():
    free, said = threading.Event(), []

    def opening():
        free.wait(FOREVER)
        return Kept()

    monitors = MonitorSinks({"slow": opening}, print_line=said.append)
    monitors.log_metrics(0, {})
    monitors.close(timeout=0.05)
    assert said == ["monitor slow did not end in time and is left behind"]
    free.set()
