"""Seconds from process start to a reward of 0.65 on reverse-text with `tiny`: `ramify rl` beside TRL's GRPOTrainer.

Both start with the same weights, draw from the same tasks, are scored by the same function, and learn with the same
batch, group size, learning rate, warmup, betas and clipping, in float32 on the same cores. The reward is the mean of 3
steps; it counts from the moment it is known. Ramify samples while it trains, on a thread each, a batch's attempts at
once. TRL does both in turns; it gets the fastest of several settings, found before the race. Seeds take turns.

A run that does not reach the reward within `--limit` seconds is ended and reported. A run of TRL then counts as if it
had reached the reward at that moment, a run of Ramify as if it never would. The benchmark takes about 20 minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _check import Row, competitor, finish, parser
from _loop import RunObservation, find_first_window, observe_run
from _reversing import similarity

from ramify.env.tasksets import reversal

TINY = Path(__file__).parent.parent / "src" / "ramify" / "model" / "bundled" / "tiny"
TARGET, WINDOW = 0.65, 3
STEPS = 1000  # never the reason to end
GAIN = 1.5
TRIAL_STEPS = 5
LIMIT = 240.0
SHARED_SETTINGS: dict[str, Any] = {
    "batch_size": 128,
    "group_size": 16,
    "max_tokens": 48,
    "temperature": 1.0,
    "lr": 1e-4,
    "warmup_steps": 10,
    "betas": [0.9, 0.95],
}
CONFIG = """
name = "{name}"
max_steps = {max_steps}
seed = {seed}
seq_len = 256

[model]
name = "{model}"

[orchestrator]
batch_size = {batch_size}
group_size = {group_size}
max_staleness = 2
max_concurrency = {batch_size}

[trainer]
pack_tokens = 4096

[trainer.optim]
lr = {lr}
betas = {betas}
max_grad_norm = 1.0

[trainer.optim.schedule]
warmup_steps = {warmup_steps}

[checkpoint]
interval = 1000

[[train]]
name = "reverse"
taskset = {{ id = "reverse-text" }}
sampling = {{ temperature = {temperature}, max_tokens = {max_tokens} }}
max_turns = 1
"""


def same_reward(texts: list[str]) -> None:
    """The competitor's reward is the taskset's."""
    for text, other in itertools.pairwise(texts):
        for reply in (
            text,
            reversal.wrap_in_tags(text),
            reversal.wrap_in_tags(other[::-1]),
            f"{reversal.wrap_in_tags(' ' + text)}?",
        ):
            assert similarity(reply, text[::-1]) == reversal.score_similarity(reply, reversal.reverse(text))


def is_enough(rewards: list[float]) -> bool:
    return find_first_window(rewards, TARGET, WINDOW) is not None


def run_ramify(home: Path, seed: int, limit: float) -> RunObservation:
    name = f"seed{seed}"
    config = CONFIG.format(name=name, seed=seed, max_steps=STEPS, model=TINY, **SHARED_SETTINGS)
    observation = observe_run(home, config, name, is_enough=is_enough, stop=True, timeout=limit)
    print_result("Ramify", seed, observation.reached_at, observation.rewards, limit)
    return observation


def print_result(who: str, seed: int, reached: float | None, rewards: list[float], limit: float) -> None:
    """Print one line about a run that has ended."""
    when = f"not reached within {limit:.0f} s" if reached is None else f"{reached:.1f} s"
    last = statistics.fmean(rewards[-WINDOW:])
    print(f"{who}, seed {seed}: {when}, {len(rewards)} steps, last {WINDOW} of them {last:.3f}", flush=True)


class Trl:
    """The competitor, with the settings that suit it best on this machine."""

    def __init__(self, python: str | None, check: bool, texts: list[str], limit: float) -> None:
        self.python, self.check, self.texts, self.limit = python, check, texts, limit
        cores = len(os.sched_getaffinity(0))
        self.choices = [(threads, micro) for threads in sorted({cores, 1}, reverse=True) for micro in (128, 32)]
        self.threads, self.micro = self.choices[0]

    def choose_settings(self) -> bool:
        """Measure the settings and choose the fastest; return False if TRL is not available."""
        seconds: dict[tuple[int, int], float] = {}
        for choice in self.choices:
            self.threads, self.micro = choice
            result = self._run(0, TRIAL_STEPS, target=2.0)
            if result is None:
                return False
            seconds[choice] = (result["sampling"] + result["training"]) / result["steps"]
        self.threads, self.micro = min(seconds, key=lambda choice: seconds[choice])
        measured = ", ".join(
            f"{threads} threads, {micro} at once: {s:.2f} s" for (threads, micro), s in seconds.items()
        )
        print(f"TRL, a step: {measured}", flush=True)
        return True

    def run(self, seed: int) -> dict[str, Any]:
        """Run until the target reward or the time limit."""
        result = self._run(seed, STEPS, TARGET)
        assert result is not None, "choose_settings() found TRL"
        print_result("TRL", seed, result["seconds"], result["rewards"], self.limit)
        return result

    def _run(self, seed: int, max_steps: int, target: float) -> dict[str, Any] | None:
        settings = {
            **SHARED_SETTINGS,
            "model": str(TINY),
            "system": reversal.SYSTEM,
            "texts": self.texts,
            "threads": self.threads,
            "micro": self.micro,
            "seed": seed,
            "max_steps": max_steps,
            "target": target,
            "window": WINDOW,
            "limit": self.limit,
            "started": time.time(),
        }
        script = ("_trl_grpo.py", "trl==1.16.0", "--trl-python")
        return competitor(self.python, *script, self.check, [json.dumps(settings)])


def build_rows(mine: list[RunObservation], theirs: list[dict[str, Any]], limit: float) -> list[Row]:
    """Return medians over the seeds, and the time of each seed."""

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    def beside(key: str) -> float | None:
        return middle([each[key] for each in theirs]) if theirs else None

    times = [each.reached_at or float("inf") for each in mine]
    others: list[float] = [each["seconds"] or limit for each in theirs]
    steps = [float(find_first_window(each.rewards, TARGET, WINDOW) or len(each.rewards)) for each in mine]
    training = [sum(each.metrics["train/seconds"]) for each in mine]
    looped = [time - each.startup for time, each in zip(times, mine)]
    rows = [
        Row(f"to a reward of {TARGET}, seed {seed}", time, others[seed] if others else None, "s")
        for seed, time in enumerate(times)
    ]
    rows.append(Row("median", middle(times), middle(others) if others else None, "s"))
    if others:
        rows.append(Row("TRL's time over ours", middle(others) / middle(times), None, "x", GAIN, at_least=True))
    return [
        *rows,
        Row("of it start-up", middle([each.startup for each in mine]), beside("startup"), "s"),
        Row("sampling (ours: all the time since)", middle(looped), beside("sampling"), "s"),
        Row("training (ours: meanwhile)", middle(training), beside("training"), "s"),
        Row("steps", middle(steps), beside("steps"), ""),
        Row(
            "a step, without start-up",
            middle([time / count for time, count in zip(looped, steps)]),
            middle([(each["sampling"] + each["training"]) / each["steps"] for each in theirs]) if theirs else None,
            "s",
        ),
        Row("reward of the first 3 steps", middle([_mean(each.rewards) for each in mine]), _first(theirs), ""),
    ]


def _mean(rewards: list[float]) -> float:
    return statistics.fmean(rewards[:WINDOW])


def _first(theirs: list[dict[str, Any]]) -> float | None:
    return statistics.median(_mean(each["rewards"]) for each in theirs) if theirs else None


def main() -> int:
    flags = parser(__doc__, shown_flags=["--trl-python"])
    flags.add_argument("--seeds", type=int, default=3, help="runs of each side, with the seeds 0, 1, ...")
    flags.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a run is ended")
    args: Any = flags.parse_args()
    texts = list(reversal.generate_texts(reversal.ReversalTextsConfig()))
    same_reward(texts)
    trl = Trl(args.trl_python, args.check, texts, args.limit)
    has_trl = trl.choose_settings()
    mine: list[RunObservation] = []
    theirs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        for seed in range(args.seeds):
            mine.append(run_ramify(Path(home), seed, args.limit))
            if has_trl:
                theirs.append(trl.run(seed))
    return finish("benchmarks/rl_cpu.py: reverse-text to a reward, on CPU", build_rows(mine, theirs, args.limit), args)


if __name__ == "__main__":
    raise SystemExit(main())
