"""reverse-text with SmolLM2-135M on one GPU that trainer and engine share: `ramify sft`, then `ramify rl`.

SmolLM2 does not attempt to reverse a word. The warm-up shows it the format, and mostly how not to answer: a share of
the examples has the right answer, the others a question mark, so it samples the skill about as often as that. The run
`learn` has to find it by RL: from a reward of at most 0.20 to 0.75 within 40 steps of 8 groups of 16. Texts have 4 to 8
characters.

The run `speed` measures a whole step of a random model (`_random_qwen.py`): 8 groups of 16, prompts of 368 tokens, 256
new tokens. Its configuration has no setting for memory. The four parts of the engine's time add up to a step; gaps are
the share of it in which the engine computes no tokens and the trainer does not work either. With `--trl-python` TRL
takes the same step at its best of several micro-batch sizes.

The run `tail` has replies whose lengths are log-normal, the 99th percentile 8 times the median: once with
`max_staleness` 4, once in turns, in which a step waits for its longest reply.

The run `distil` starts with the same student, and a teacher that was warmed up with right answers alone. The student
learns by SFT on the teacher's replies in 20 steps, and by on-policy distillation in 40. Rewards are only reported.

The run `mismatch` samples and trains in turns, so that every token is trained by the weights that sampled it,
and shows how far the logprobs of trainer and engine are apart in bfloat16.

`--only smoke` takes two steps of each example with a random model of the shape of Qwen3-4B, and Qwen3's chat template
(`_smoke.py`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from _check import NO_COMPETITOR, Row, finish, measure_trl, parser, show
from _loop import RunObservation, find_first_window, observe_run, ramify_command

from ramify.env.tasksets import reversal

START, TARGET, WINDOW, STEPS = 0.20, 0.75, 3, 40
MISMATCH, MAX_STEP_SECONDS = 2e-4, 0.6
DISTIL_STEPS, MIN_TEACHER_REWARD, MIN_DISTILLED_REWARD = {"sft": 20, "opd": 40}, 0.9, 0.8
DISTIL_LR = {"sft": 3e-4, "opd": 1e-4}
STUDENT_TEXTS, TEACHER_TEXTS = 20_000, 40_000  # that they are trained with by SFT
DISTIL_TEXTS: dict[Literal["train", "eval"], int] = {"train": 20_000, "eval": 2_000}
TOKENS = 100_000  # that the mismatch is measured on
REFUSAL = "?"
SMI = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
SMI_PERIOD = 0.5
TIMEOUT = 400.0

WARM = """
name = "{name}"
seq_len = 256
batch_size = 128
max_steps = {steps}
epochs = 1000

[model]
name = "{model}"

[data]
path = "{data}"

[trainer]
device = "{device}"
pack_tokens = 8192

[trainer.optim]
lr = {lr}

[trainer.optim.schedule]
type = "cosine"
warmup_steps = 20
min_lr_factor = 0.1

[checkpoint]
interval = 10000
"""

RL = """
name = "{name}"
max_steps = {steps}
seed = {seed}
seq_len = 256

[model]
name = "{model}"

[inference]
device = "{device}"
max_running_requests = 256
max_num_batched_tokens = 4096
kv_memory_fraction = 0.3

[orchestrator]
batch_size = {batch}
group_size = {group}
max_staleness = {off_policy}

[trainer]
device = "{device}"
pack_tokens = 8192

[trainer.optim]
lr = {lr}

[trainer.optim.schedule]
warmup_steps = 3

[weights]
transport = "ipc"

[checkpoint]
interval = 1000

[[train]]
name = "reverse"
taskset = {{ id = "reverse-text"{taskset_keys} }}
sampling = {{ temperature = 1.0, max_tokens = 48 }}
max_turns = 1
"""

DISTIL = """algorithm = {{ id = "{algorithm}" }}
teacher = "teacher"

[[eval]]
name = "held-out"
taskset = {{ id = "reverse-text", split = "eval"{taskset_keys} }}
sampling = {{ temperature = 1.0, max_tokens = 48 }}
max_turns = 1
num_tasks = 128
interval = 10

[models.teacher]
name = "{teacher}"

[models.teacher.inference]
device = "{device}"
max_running_requests = 256
max_num_batched_tokens = 4096
kv_memory_fraction = 0.1
"""

SPEED = """
max_steps = {steps}

[model]
name = "{model}"

[trainer.optim]
lr = 1e-6

[[train]]
taskset = {{ id = "{taskset}" }}
sampling = {{ max_tokens = {max_tokens} }}
"""

TAIL = """
name = "{name}"
max_steps = {steps}
seq_len = {seq_len}

[model]
name = "{model}"

[inference]
device = "{device}"
max_running_requests = 640
max_num_batched_tokens = 8192
kv_memory_fraction = 0.3

[orchestrator]
batch_size = 128
group_size = 16
max_staleness = {off_policy}

[trainer]
device = "{device}"
pack_tokens = 36864

[weights]
transport = "ipc"

[checkpoint]
interval = 1000

[[train]]
taskset = {{ id = "{taskset}" }}
sampling = {{ temperature = 1.0, max_tokens = {max_tokens} }}
max_turns = 1
{harness}
"""
SPEED_OVER_TRL = 3.0
SPEED_TARGETS = {  # size: row, target, whether it is the least
    "0.5b": {"a step": (0.78, False), "gaps": (8.0, False)},
    "4b": {"a step": (3.0, False), "MFU of training": (0.50, True)},
    "8b": {"GPU memory at most": (135.0, False)},
}
ENGINE_ACTIVITIES = ("sampling", "training", "swap", "idle")
MAX_SUM_DIFFERENCE = 2.0  # percent of a step by which its parts may miss it
TAIL_STALENESS, TAIL_SPEEDUP, TAIL_LONGEST = 4, 2.0, 2048
QWEN_VOCABULARY = 151_936
TRL_MICRO_BATCHES = (8, 16, 32, 64, 128)


def train_student(home: Path, args: Any) -> tuple[Path, float]:
    return train_by_sft(home, args, name="student", correct_fraction=args.right, num_texts=STUDENT_TEXTS)


def train_teacher(home: Path, args: Any) -> tuple[Path, float]:
    return train_by_sft(home, args, name="teacher", correct_fraction=1.0, num_texts=TEACHER_TEXTS)


def train_by_sft(home: Path, args: Any, *, name: str, correct_fraction: float, num_texts: int) -> tuple[Path, float]:
    """Train a model that gives the right answer for a share of the texts, unless `home` already has it.

    Return its directory and the seconds it took.
    """
    settings: dict[str, Any] = {"model": args.name, "device": args.device, "lr": args.warm_lr}
    config = WARM.format(name=f"make-{name}", data=f"{name}.jsonl", steps=args.warm_steps, **settings)
    digest = hashlib.sha256(f"{config}{correct_fraction}{num_texts}".encode()).hexdigest()[:8]
    model = home / f"{name}-{digest}"  # without the manifest, which has the version of a run's weights
    if model.is_dir():
        return model, 0.0
    rng = random.Random(0)
    with (home / f"{name}.jsonl").open("w") as data:
        for text in reversal.generate_texts(reversal.ReversalTextsConfig(num_tasks=num_texts)):
            reply = reversal.reverse(text) if rng.random() < correct_fraction else REFUSAL
            messages = [("system", reversal.SYSTEM), ("user", text), ("assistant", reversal.wrap_in_tags(reply))]
            data.write(
                json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]}) + "\n"
            )
    (home / f"{name}.toml").write_text(config)
    started = time.monotonic()
    result = subprocess.run(
        ramify_command("sft", "@", f"{name}.toml"), cwd=home, capture_output=True, text=True, timeout=TIMEOUT
    )
    if result.returncode:
        raise SystemExit(f"ramify sft exited with {result.returncode}:\n{(result.stdout + result.stderr)[-3000:]}")
    _, _, path = result.stdout.replace("\n", " ").rpartition("the model is ")
    partial = home / f"{name}-partial"
    shutil.copytree(home / path.strip(), partial, ignore=shutil.ignore_patterns("manifest.json"), dirs_exist_ok=True)
    partial.rename(model)
    return model, time.monotonic() - started


@contextlib.contextmanager
def gpu_load() -> Iterator[list[tuple[float, float]]]:
    """Yield a list that is filled at the end with utilization in percent and MiB in use, every half second."""
    samples: list[tuple[float, float]] = []
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile("w+"))
        try:
            process = subprocess.Popen(SMI, stdout=output, stderr=subprocess.DEVNULL)
        except FileNotFoundError:
            yield samples
            return
        try:
            yield samples
        finally:
            process.terminate()
            process.wait()
            output.seek(0)
            for line in output.read().splitlines():
                with contextlib.suppress(ValueError):
                    utilization, memory = map(float, line.split(","))
                    samples.append((utilization, memory))


def learn(home: Path, model: Path, args: Any) -> list[Row]:
    config = RL.format(
        name="learn",
        steps=args.steps,
        seed=args.seed,
        model=model,
        device=args.device,
        batch=128,
        group=16,
        taskset_keys="",
        off_policy=args.off_policy,
        lr=args.lr,
    )
    with gpu_load() as load:
        observation = observe_run(home, config, "learn", is_enough=_is_enough, stop=False, timeout=TIMEOUT)
    print("reward of every step: " + " ".join(f"{reward:.2f}" for reward in observation.rewards))
    needed = float(find_first_window(observation.rewards, TARGET, WINDOW) or "inf")
    best = max(
        statistics.fmean(observation.rewards[start : start + WINDOW])
        for start in range(max(1, len(observation.rewards) - WINDOW + 1))
    )
    rows = [
        Row("reward of the first step", observation.rewards[0], None, "", START),
        Row(f"best mean of {WINDOW} steps", best, None, "", TARGET, at_least=True),
        Row(f"steps to {TARGET}", needed, None, "", STEPS),
        Row("start-up of ramify rl", observation.startup, None, "s"),
        Row("to the first trained step", observation.first_step, None, "s"),
    ]
    return [
        *rows,
        *_step_rows(observation, None if args.model else MAX_STEP_SECONDS),
        *_gpu_rows(load, observation),
        *_mismatch_rows(observation, "of it, trained by the weights that sampled"),
    ]


def _is_enough(rewards: list[float]) -> bool:
    return find_first_window(rewards, TARGET, WINDOW) is not None


def _step_rows(observation: RunObservation, target: float | None = None) -> list[Row]:
    """Return the duration of a step and its parts, in the later half of the run, when everything is compiled."""
    later = observation.step_times[len(observation.step_times) // 2 :]
    if len(later) < 2:
        return []
    wall = (later[-1][0] - later[0][0]) / (later[-1][1] - later[0][1])
    names = {
        "training": "train/seconds",
        "batch to the trainer, training, answer": "time/train",
        "weights into the engine": "time/swap",
    }
    rows = [Row("a step", wall, None, "s", target)]
    for what, name in names.items():
        values = observation.metrics.get(name, [])
        if values:
            rows.append(Row(f"  {what}", statistics.median(values[len(values) // 2 :]), None, "s"))
    busy = statistics.median(observation.metrics["time/train"][len(observation.metrics["time/train"]) // 2 :])
    rows.append(Row("  publishing, and waiting for rollouts", max(0.0, wall - busy), None, "s"))
    rows += build_timeline_rows(observation.metrics_by_step)
    for what, name, unit in [
        ("rollouts", "rollouts_per_s", "1/s"),
        ("tokens sampled", "tokens_per_s", "1/s"),
        ("tokens trained", "train/tokens_per_second", "1/s"),
        ("flat tokens over forest tokens", "forest/token_ratio", "x"),
        ("staleness", "staleness/mean", "steps"),
        ("MFU of training", "train/mfu", ""),
    ]:
        values = observation.metrics.get(name, [])
        if values:
            rows.append(Row(what, statistics.median(values[len(values) // 2 :]), None, unit))
    return rows


def build_timeline_rows(metrics_by_step: Mapping[int, Mapping[str, float]]) -> list[Row]:
    """Return the parts of a step and the share of gaps, in the later half of the steps that report all parts."""
    names = ["time/step", *(f"time/engine/{activity}" for activity in ENGINE_ACTIVITIES)]
    steps = [metrics for _, metrics in sorted(metrics_by_step.items()) if all(name in metrics for name in names)]
    if not steps:
        return []
    step, *parts = (statistics.fmean(metrics[name] for metrics in steps[len(steps) // 2 :]) for name in names)
    sampling, training, *_ = parts
    difference = 100 * abs(sum(parts) - step) / step
    return [
        *(Row(f"  engine: {activity}", part, None, "s") for activity, part in zip(ENGINE_ACTIVITIES, parts)),
        Row("  sum of the four", sum(parts), step, "s"),
        Row("  difference of their sum from the step", difference, None, "%", MAX_SUM_DIFFERENCE),
        Row("gaps", 100 * (step - sampling - training) / step, None, "%"),
    ]


def _gpu_rows(load: list[tuple[float, float]], observation: RunObservation) -> list[Row]:
    during = load[int(observation.first_step / SMI_PERIOD) :]
    if not during:
        return []
    return [
        Row("GPU in use since the first step", statistics.fmean(utilization for utilization, _ in during), None, "%"),
        Row("GPU memory at most", max(memory for _, memory in during) / 1024, None, "GiB"),
    ]


def _mismatch_rows(
    observation: RunObservation, what: str, age: str = "/reverse/age_0", target: float | None = None
) -> list[Row]:
    """Return how far the logprobs of trainer and engine are apart, over all tokens of one staleness."""
    counts = observation.metrics.get(f"entries{age}", [])
    if not counts:
        return []
    means, largest = observation.metrics[f"mismatch_kl{age}"], observation.metrics[f"max_log_ratio{age}"]
    mean = sum(count * kl for count, kl in zip(counts, means)) / sum(counts)
    rows = [
        Row(f"tokens {what}", sum(counts), None, ""),
        Row("  mismatch KL, mean", mean, None, "", target),
        Row("  |log ratio|, largest", max(largest), None, ""),
    ]
    tails = observation.metrics.get(f"p999_log_ratio{age}")
    if tails:
        rows.insert(2, Row("  |log ratio|, 99.9 % (median of steps)", statistics.median(tails), None, ""))
    return rows


def speed(home: Path, args: Any) -> list[Row]:
    """Return the seconds of a step of a random model, asynchronous and in turns, without a setting for memory."""
    model = home / f"random-{args.size}-{args.vocabulary}"
    script, taskset = Path(__file__).with_name("_random_qwen.py"), Path(__file__).with_name("_long_prompts.py")
    # In a process of its own, so that this one uses no GPU memory during the measurement.
    subprocess.run([sys.executable, script, model, args.size, str(args.vocabulary)], check=True, timeout=TIMEOUT)
    trl_step = measure_trl(args.trl_python, "grpo", model, TRL_MICRO_BATCHES) if args.trl_python else None
    rows: list[Row] = []
    for max_staleness in (1, 0) if args.staleness is None else (args.staleness,):
        config = SPEED.format(model=model, steps=args.speed_steps, taskset=taskset, max_tokens=args.max_tokens)
        flags = ["--orchestrator.max_staleness", str(max_staleness), *args.rl_flags.split()]
        observe = functools.partial(
            observe_run, home, config, f"speed-{max_staleness}", timeout=TIMEOUT, output=args.output
        )
        with gpu_load() as load:
            observation = observe(flags=flags)
        step_rows = [*_step_rows(observation), *_gpu_rows(load, observation)]
        if args.resume:
            resumed = observe(flags=[*flags, "--max-steps", str(args.speed_steps + 1)])
            count = len(resumed.metrics["train/seconds"]) - len(observation.metrics["train/seconds"])
            step_rows.append(Row("steps after loading the last checkpoint", count, None, "", 1, at_least=True))
        rows += show(*set_targets(step_rows, args.size, max_staleness, trl_step))
    return rows


def set_targets(rows: Sequence[Row], size: str, max_staleness: int, trl_step: float | None) -> list[Row]:
    """Return the rows of `speed` with the targets of asynchronous runs, and beside TRL.

    A row that has a target and is missing is NaN, which misses it.
    """
    targets = SPEED_TARGETS.get(size, {}) if max_staleness else {}
    missing = [Row(name, math.nan, None, "") for name in targets if name not in {row.name for row in rows}]
    result: list[Row] = []
    for row in (*rows, *missing):
        target, at_least = targets.get(row.name, (row.target, row.at_least))
        reference = trl_step if row.name == "a step" else row.reference
        name = f"max_staleness {max_staleness}: {row.name}"
        result.append(Row(name, row.ours, reference, row.unit, target, at_least=at_least))
        if max_staleness and row.name == "a step" and trl_step:
            result.append(Row(f"{name}, over TRL", trl_step / row.ours, None, "x", SPEED_OVER_TRL, at_least=True))
    return result


def tail(home: Path, args: Any) -> list[Row]:
    """Return the seconds of a step whose replies have long-tailed lengths, asynchronous and in turns."""
    from _random_qwen import write_random_qwen

    model = args.model or write_random_qwen(home / "random-qwen")
    here = Path(__file__).parent
    steps: dict[int, float] = {}
    rows: list[Row] = []
    for max_staleness in (TAIL_STALENESS, 0):
        name = f"tail-{max_staleness}"
        config = TAIL.format(
            name=name,
            model=model,
            device=args.device,
            steps=args.tail_steps,
            off_policy=max_staleness,
            taskset=here / "_long_prompts.py",
            seq_len=512 + args.tail_longest,
            max_tokens=args.tail_longest,
            harness=f'harness = {{ id = "{here / "_long_tail.py"}", max_tokens = {args.tail_longest} }}',
        )
        observation = observe_run(home, config, name, timeout=TIMEOUT)
        step_rows = _step_rows(observation)
        steps[max_staleness] = step_rows[0].ours
        rows += show(
            *(Row(f"max_staleness {max_staleness}: {row.name}", row.ours, None, row.unit) for row in step_rows)
        )
        stalest = max(observation.metrics.get("staleness/max", [0.0]))
        rows.append(Row(f"max_staleness {max_staleness}: largest staleness", stalest, None, "steps", max_staleness))
    speedup = steps[0] / steps[TAIL_STALENESS]
    return [*rows, Row("faster than in turns", speedup, None, "x", TAIL_SPEEDUP, at_least=True)]


def distil(home: Path, student: Path, args: Any) -> list[Row]:
    """Return the held-out reward of the student before and after learning from a teacher, and the teacher's reward."""
    teacher, seconds = train_teacher(home, args)
    path = write_two_word_texts(home / "texts.txt")
    taskset_keys = f', path = "{path}", num_tasks = {DISTIL_TEXTS["train"]}'
    reward = measure_held_out_reward(home, teacher, path, args)
    rows = [
        Row("warm-up of the teacher", seconds, None, "s"),
        Row("held-out reward of the teacher", reward, None, "", MIN_TEACHER_REWARD, at_least=True),
    ]
    for algorithm, steps in DISTIL_STEPS.items():
        settings: dict[str, Any] = {"seed": args.seed, "model": student, "device": args.device}
        settings |= {"batch": args.distil_batch, "group": 1, "off_policy": 2, "taskset_keys": taskset_keys}
        name, steps = f"distil-{algorithm}", min(steps, args.steps)
        config = RL.format(name=name, steps=steps, lr=args.distil_lr or DISTIL_LR[algorithm], **settings)
        config += DISTIL.format(algorithm=algorithm, teacher=teacher, device=args.device, taskset_keys=taskset_keys)
        observation = observe_run(home, config, name, timeout=TIMEOUT)
        if len(observation.rewards) < steps:
            raise SystemExit(f"{name} trained {len(observation.rewards)} of {steps} steps in {TIMEOUT:g} s")
        rewards = observation.metrics["eval/held-out/avg"]
        print(f"{algorithm}: held-out reward " + " ".join(f"{reward:.3f}" for reward in rewards), flush=True)
        rows.append(Row(f"{algorithm}: held-out reward before", rewards[0], None, "", START))
        rows.append(Row(f"  after {steps} steps", rewards[-1], None, "", MIN_DISTILLED_REWARD, at_least=True))
        rows += [Row(f"  {row.name}", row.ours, None, row.unit) for row in _step_rows(observation)[:1]]
    return rows


def write_two_word_texts(path: Path) -> Path:
    """Write texts of two words for training and for the held-out eval, and return the path.

    Two thirds of the default held-out tasks are single words, of which many are in no training text. SmolLM2 has to
    know how a word is spelled to reverse it, so a model that reverses all training texts fails on some of those.
    """
    configs = [reversal.ReversalTextsConfig(split=split, num_tasks=count) for split, count in DISTIL_TEXTS.items()]
    texts = [text for config in configs for text in reversal.generate_texts(config) if " " in text]
    path.write_text("\n".join(texts))
    return path


def measure_held_out_reward(home: Path, model: Path, texts: Path, args: Any) -> float:
    """Return the mean reward of a model on the held-out tasks of `distil`."""
    name = f"eval-{model.name}"
    flags = f"--name {name} -m {model} -n 128 -r 1 -c 128 --max-turns 1 --inference.device {args.device}".split()
    flags += ["--sampling.temperature", "1.0", "--sampling.max-tokens", "48"]
    flags += ["--taskset.split", "eval", "--taskset.path", str(texts)]
    command = ramify_command("eval", "reverse-text", *flags)
    result = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=TIMEOUT)
    if result.returncode:
        raise SystemExit(f"ramify eval exited with {result.returncode}:\n{(result.stdout + result.stderr)[-3000:]}")
    return float(result.stdout.split("avg@1")[1].split()[0])


def mismatch(home: Path, model: Path, args: Any) -> list[Row]:
    """Alternate sampling and training until there are enough tokens."""
    config = RL.format(
        name="mismatch",
        steps=args.mismatch_steps,
        seed=args.seed,
        model=model,
        device=args.device,
        batch=args.mismatch_batch,
        group=16,
        taskset_keys="",
        off_policy=0,
        lr=args.lr,
    )
    observation = observe_run(home, config, "mismatch", timeout=TIMEOUT)
    rows = _mismatch_rows(observation, "in turns", target=MISMATCH)
    needed = TOKENS if args.mismatch_steps >= 10 else None
    tokens = Row("tokens sampled and trained in turns", rows[0].ours, None, "", needed, at_least=True)
    return [tokens, *rows[1:]]


def smoke(home: Path, args: Any) -> int:
    """Take two steps of each example with a random model; return 1 if one of them failed."""
    from _smoke import run_examples

    if args.model:
        return run_examples(Path(args.model).absolute(), home, args)
    model, script = home / f"random-{args.shape}-chat", Path(__file__).with_name("_random_qwen.py")
    vocabulary = QWEN_VOCABULARY if args.device == "cuda" else 9_000
    # In a process of its own, so that this one uses no GPU memory.
    subprocess.run([sys.executable, script, model, args.shape, str(vocabulary), "chat"], check=True, timeout=TIMEOUT)
    return run_examples(model, home, args)


def main() -> int:
    flags = parser(__doc__, shown_flags=["--trl-python", "--smollm2"])
    flags.add_argument("--model", help="another model than --smollm2: a name or a directory")
    flags.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device of engine and trainer")
    flags.add_argument(
        "--only", choices=["learn", "mismatch", "distil", "speed", "tail", "smoke"], help="do only one of the runs"
    )
    flags.add_argument("--shape", choices=["tiny", "0.5b", "4b", "8b"], default="4b", help="model of `smoke`")
    flags.add_argument("--examples", nargs="+", default=[], metavar="NAME", help="only these of `smoke`: wordle/rl ...")
    flags.add_argument("--run-timeout", type=float, default=120.0, help="seconds of a run of `smoke`")
    flags.add_argument("--limit", type=float, default=3600.0, help="seconds after which `smoke` starts no more runs")
    flags.add_argument("--staleness", type=int, choices=[0, 1], help="max_staleness of `speed`; both if not given")
    flags.add_argument("--speed-steps", type=int, default=16, help="steps of `speed`")
    flags.add_argument("--size", choices=list(SPEED_TARGETS), default="0.5b", help="size of the model of `speed`")
    flags.add_argument("--vocabulary", type=int, default=39_000, help="vocabulary of the model of `speed`")
    flags.add_argument("--max-tokens", type=int, default=256, help="new tokens of `speed`")
    flags.add_argument("--resume", action="store_true", help="continue `speed` for a step from its last checkpoint")
    flags.add_argument("--output", type=Path, help="output directory of `speed` and `smoke`, such as one in memory")
    flags.add_argument(
        "--rl-flags", default="", help="more flags for `ramify rl` of `speed` and `smoke`, such as LoRA's"
    )
    flags.add_argument("--tail-steps", type=int, default=24, help="steps of `tail`")
    flags.add_argument("--tail-longest", type=int, default=TAIL_LONGEST, help="tokens of the longest reply of `tail`")
    flags.add_argument("--home", type=Path, help="keep the runs here; a warm-up that is there is not made again")
    flags.add_argument("--seed", type=int, default=0, help="seed of `learn`, `mismatch` and `distil`")
    flags.add_argument("--steps", type=int, default=STEPS, help="steps of `learn`, and most steps of `distil`")
    flags.add_argument("--lr", type=float, default=3e-5, help="learning rate of `learn` and `mismatch`")
    flags.add_argument("--distil-lr", type=float, help=f"learning rate of `distil`; by default {DISTIL_LR}")
    flags.add_argument("--distil-batch", type=int, default=512, help="rollouts per step of `distil`")
    flags.add_argument("--off-policy", type=int, default=1, help="max_staleness of `learn`")
    flags.add_argument("--right", type=float, default=0.15, help="share of right answers in the warm-up")
    flags.add_argument("--warm-steps", type=int, default=400, help="steps of the warm-up")
    flags.add_argument("--warm-lr", type=float, default=5e-4, help="learning rate of the warm-up")
    flags.add_argument("--mismatch-steps", type=int, default=14, help="steps of `mismatch`")
    flags.add_argument("--mismatch-batch", type=int, default=512, help="rollouts per step of `mismatch`")
    args: Any = flags.parse_args()
    args.name = args.model or args.smollm2
    if args.name is None and args.only not in ("speed", "tail", "smoke"):
        print("SmolLM2 (--smollm2) or another --model is needed", file=sys.stderr)
        return NO_COMPETITOR if args.check else 0
    if args.name and Path(args.name).is_dir():
        args.name = Path(args.name).resolve()
    with contextlib.ExitStack() as stack:
        home: Path = args.home or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        home.mkdir(parents=True, exist_ok=True)
        home = home.resolve()
        if args.only == "smoke":
            return smoke(home, args)
        rows: list[Row] = speed(home, args) if args.only in (None, "speed") else []
        rows += tail(home, args) if args.only in (None, "tail") else []
        if args.only in ("speed", "tail"):
            return finish(f"benchmarks/rl_gpu.py: a random model of {args.size} on one {_device(args)}", rows, args)
        model, seconds = train_student(home, args)
        rows.append(Row("warm-up by ramify sft", seconds, None, "s"))
        for run in (learn, mismatch, distil):
            if args.only in (None, run.__name__):
                rows += show(*run(home, model, args))
    return finish(
        f"benchmarks/rl_gpu.py: {Path(args.name).name} learns reverse-text on one {_device(args)}", rows, args
    )


def _device(args: Any) -> str:
    if args.device == "cpu":
        return "CPU"
    import torch  # imported late, so that this process uses no GPU memory during the measurement

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    raise SystemExit(main())
