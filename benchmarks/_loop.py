"""Runs `ramify rl` for a benchmark: starts it, polls its rewards, and stops it when they reach a target.

Rewards are read from the status address, which costs the run next to nothing.
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

from ramify.orchestrate.run_config import EXIT_RESUMABLE
from ramify.run import reader
from ramify.run.reader import read_metrics

POLL_INTERVAL = 0.1  # seconds
STOP_TIMEOUT = 150.0  # seconds for the last checkpoint


@dataclass
class RunObservation:
    """Times and metrics of a run. Seconds count from the start of its process."""

    startup: float = 0.0
    """Seconds until the orchestrator answers: engine and environments are ready, sampling starts."""
    first_step: float = 0.0
    """Seconds until the first step was trained."""
    step_times: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Seconds and number of trained steps, at every change."""
    reached_at: float | None = None
    """Seconds until the rewards reached the target; None if they did not."""
    rewards: list[float] = field(default_factory=list[float])
    """Mean reward of every step."""
    metrics: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Values of every metric, in the order of steps."""
    metrics_by_step: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    """The same, by step and metric."""


def find_first_window(rewards: Sequence[float], target: float, window: int) -> int | None:
    """Return the number of steps after which the mean of `window` steps reaches `target`; None if it never does."""
    for end in range(window, len(rewards) + 1):
        if sum(rewards[end - window : end]) / window >= target:
            return end
    return None


def ramify_command(*arguments: str) -> list[str]:
    """Return the command line of a ramify command."""
    return [sys.executable, "-m", "ramify", *arguments]


def observe_run(
    home: Path,
    config: str,
    name: str,
    *,
    is_enough: Callable[[list[float]], bool] = lambda _: False,
    stop: bool = False,
    timeout: float,
    output: Path | None = None,
    flags: Sequence[str] = (),
) -> RunObservation:
    """Run `config` in `home` until it ends or, with `stop`, until `is_enough` returns True for its rewards.

    `output` is the directory of its runs, by default in `home`; `flags` are given to the command besides.
    """
    (home / f"{name}.toml").write_text(config)
    log, observation, output = home / f"{name}.log", RunObservation(), output or home / "outputs"
    path = output / name
    started_at = time.monotonic()
    with log.open("w") as log_file:
        command = ramify_command("rl", "@", f"{name}.toml", "--name", name, "-o", str(output), *flags)
        run = subprocess.Popen(command, cwd=home, stdout=log_file, stderr=log_file)
        try:
            while run.poll() is None and not (stop and observation.reached_at is not None):
                if time.monotonic() - started_at > timeout:
                    break
                _poll(path, observation, started_at, is_enough)
                time.sleep(POLL_INTERVAL)
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
            code = run.wait(STOP_TIMEOUT)
        finally:
            run.kill()
            run.wait()
    if code not in (0, EXIT_RESUMABLE):
        raise SystemExit(f"ramify rl exited with {code}:\n{log.read_text()[-3000:]}")
    metrics: dict[str, list[float]] = defaultdict(list)
    for metric in read_metrics(path):
        metrics[metric.name].append(metric.value)
        observation.metrics_by_step.setdefault(metric.step, {})[metric.name] = metric.value
    observation.metrics, observation.rewards = dict(metrics), metrics["reward/all/mean"]
    return observation


def _poll(path: Path, observation: RunObservation, started_at: float, is_enough: Callable[[list[float]], bool]) -> None:
    observed, seconds = reader.observe_run(path), time.monotonic() - started_at
    status = observed.state.orchestrator
    if not observed.is_live or status is None:
        return
    observation.startup = observation.startup or seconds
    if status.step > (observation.step_times[-1][1] if observation.step_times else 0):
        observation.first_step = observation.first_step or seconds
        observation.step_times.append((seconds, status.step))
    rewards = [reward for reward in status.reward_history if reward is not None]
    observation.rewards = rewards if len(rewards) >= len(observation.rewards) else observation.rewards
    if observation.reached_at is None and is_enough(rewards):
        observation.reached_at = seconds
