"""Monitors: whatever a sink does, the run goes on."""

import threading

from ramify.monitor import Monitors

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
    monitors = Monitors({"a": lambda: sinks[0], "b": lambda: sinks[1]}, say=print)
    for step in range(100):
        monitors.log(step, {"reward/all/mean": step / 100})
    monitors.show(99, [])
    monitors.close()
    for sink in sinks:
        assert [step for step, _ in sink.values] == list(range(100))
        assert sink.samples == [(99, [])]
        assert sink.closed
    assert monitors.lost == {"a": 0, "b": 0}


def test_what_is_given_may_change_afterwards():
    sink, values = Kept(), {"train/loss": 1.0}
    monitors = Monitors({"a": lambda: sink}, say=print)
    monitors.log(0, values)
    values["train/loss"] = 2.0
    monitors.close()
    assert sink.values == [(0, {"train/loss": 1.0})]


def test_a_failure_is_told_of_once_and_passes():
    sink, said = Failing(3), []
    monitors = Monitors({"wandb": lambda: sink}, say=said.append)
    for step in range(10):
        monitors.log(step, {})
    monitors.close()
    assert said == ["monitor wandb failed: ConnectionError: no route to host"]
    assert len(sink.values) == 7
    assert monitors.lost == {"wandb": 3}


def test_one_that_always_fails_is_given_up_and_the_others_are_not():
    sink, said = Kept(), []
    monitors = Monitors({"wandb": lambda: Failing(1000), "console": lambda: sink}, say=said.append)
    for step in range(50):
        monitors.log(step, {})
    monitors.close()
    assert said[-1] == "monitor wandb failed 5 times in a row and is given up"
    assert len(sink.values) == 50


def test_one_that_cannot_be_opened_is_told_of():
    def absent():
        raise ModuleNotFoundError("No module named 'wandb'")

    said = []
    monitors = Monitors({"wandb": absent}, say=said.append)
    monitors.close()
    monitors.log(0, {})
    assert said == ["monitor wandb cannot be opened: ModuleNotFoundError: No module named 'wandb'"]
    assert monitors.lost == {"wandb": 1}


def test_nobody_waits_for_one_that_hangs():
    sink, said = Hanging(), []
    monitors = Monitors({"slow": lambda: sink}, say=said.append, room=4)
    monitors.log(0, {})
    assert sink.called.wait(FOREVER)
    for step in range(1, 6):
        monitors.log(step, {})
    assert said == ["monitor slow does not keep up; what it cannot take is left out"]
    monitors.close(patience=0.05)
    assert said[-1] == "monitor slow did not end in time and is left behind"
    assert sink.values == []
    sink.free.set()


def test_one_that_hangs_while_it_is_opened_is_left_behind():
    free, said = threading.Event(), []

    def opening():
        free.wait(FOREVER)
        return Kept()

    monitors = Monitors({"slow": opening}, say=said.append)
    monitors.log(0, {})
    monitors.close(patience=0.05)
    assert said == ["monitor slow did not end in time and is left behind"]
    free.set()
