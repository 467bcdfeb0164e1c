"""A run of `ramify rl` as a benchmark sees it: started as a process, asked for its rewards, ended when they are enough.

It is asked at its status address, which costs the run next to nothing; a new interpreter for every question would not.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ramify.errors import ProviderError
from ramify.launch.run_queries import connect_if_running, read_metrics
from ramify.launch.status_client import StatusClient

LOOK = 0.1  # seconds between two questions
LEAVING = 150.0  # seconds for a last checkpoint
LEFT = 75


@dataclass
class Watched:
    """What was seen of a run. Seconds count from the start of its process."""

    startup: float = 0.0
    """Until the orchestrator answers: engine and environments are there, sampling begins."""
    first_step: float = 0.0
    """Until a first step was trained."""
    trained: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """When how many steps were trained, at every change."""
    reached: float | None = None
    """Until the rewards were enough."""
    rewards: list[float] = field(default_factory=list[float])
    """Of every step, in order."""
    numbers: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """All metrics, by name, in the order of steps."""


def first_window(rewards: Sequence[float], target: float, window: int) -> int | None:
    """The step at which the mean of `window` steps reaches `target` for the first time, counted from 1."""
    for end in range(window, len(rewards) + 1):
        if sum(rewards[end - window : end]) / window >= target:
            return end
    return None


def ramify(*words: str) -> list[str]:
    """A command of this interpreter's Ramify."""
    return [sys.executable, "-m", "ramify", *words]


def watch(
    home: Path, config: str, name: str, *, enough: Callable[[list[float]], bool], stop: bool, deadline: float
) -> Watched:
    """Run `config` in `home` until it is over or, with `stop`, until the rewards are enough."""
    (home / f"{name}.toml").write_text(config)
    log, seen, path = home / f"{name}.log", Watched(), home / "outputs" / name
    started, client = time.monotonic(), None
    with log.open("w") as said:
        run = subprocess.Popen(ramify("rl", "@", f"{name}.toml"), cwd=home, stdout=said, stderr=said)
        try:
            while run.poll() is None and not (stop and seen.reached is not None):
                if time.monotonic() - started > deadline:
                    break
                if client := client or connect_if_running(path):
                    _look(client, seen, started, enough)
                time.sleep(LOOK)
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
            code = run.wait(LEAVING)
        finally:
            run.kill()
            run.wait()
    if code not in (0, LEFT):
        raise SystemExit(f"ramify rl exited with {code}:\n{log.read_text()[-3000:]}")
    found: dict[str, list[float]] = defaultdict(list)
    for metric in read_metrics(path):
        found[metric.name].append(metric.value)
    seen.numbers, seen.rewards = dict(found), found["reward/all/mean"]
    return seen


def _look(client: StatusClient, seen: Watched, started: float, enough: Callable[[list[float]], bool]) -> None:
    try:
        status, passed = client.get("/status"), time.monotonic() - started
    except ProviderError:
        return
    seen.startup = seen.startup or passed
    if status["step"] > (seen.trained[-1][1] if seen.trained else 0):
        seen.first_step = seen.first_step or passed
        seen.trained.append((passed, status["step"]))
    fresh: list[float] = status["reward_history"]
    seen.rewards = fresh if len(fresh) >= len(seen.rewards) else seen.rewards
    if seen.reached is None and enough(fresh):
        seen.reached = passed
