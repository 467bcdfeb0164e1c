"""`ramify sft` on one GPU: the random model of 0.48 B, 64 conversations of 1,024 tokens a step, all of them trained.

This times the command itself, with its data, packing, metrics and display, and not a loop around the trainer. With
`--trl-python` the same conversations are trained by TRL's SFTTrainer, at its best of several micro-batch sizes.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import string
import subprocess
import tempfile
import time
from pathlib import Path

from _check import Row, finish, measure_trl, parser
from _loop import ramify_command
from _random_qwen import write_random_qwen

from ramify.run.reader import read_metrics

CONVERSATIONS, TOKENS, SEQ_LEN = 64, 65_536, 1024
TARGET_TOKENS_PER_S, TARGET_RATIO = 130_000, 2.4
TRL_MICRO_BATCHES = (16, 32, 64)
STEP_LINE = re.compile(r"step=(\d+)/")
CONFIG = """
name = "sft"
seq_len = 1024
batch_size = 64
max_steps = {steps}
epochs = 1000

[model]
name = "{model}"

[data]
path = "{data}"

[trainer]
device = "cuda"
pack_tokens = 32768

[trainer.optim]
lr = 1e-5

[checkpoint]
interval = 100000
"""


def write_conversations(path: Path, count: int = 2048) -> None:
    """Write conversations that are longer than SEQ_LEN tokens; every character is a token."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            prompt, reply = ("".join(rng.choices(string.ascii_letters, k=size)) for size in (16, SEQ_LEN))
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
            file.write(json.dumps({"messages": messages}) + "\n")


def time_step(home: Path) -> float:
    """Run `ramify sft` and return the seconds of a step, from the lines it prints after a quarter of the run."""
    seen: list[tuple[int, float]] = []
    command = ramify_command("sft", "@", "sft.toml")
    with subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            if match := STEP_LINE.match(line):
                seen.append((int(match[1]), time.monotonic()))
    if run.returncode:
        raise SystemExit(f"ramify sft exited with {run.returncode}")
    later = [(step, seconds) for step, seconds in seen[:-1] if step >= seen[-1][0] // 4]  # the last is a checkpoint's
    return (later[-1][1] - later[0][1]) / (later[-1][0] - later[0][0])


def main() -> int:
    flags = parser(__doc__, shown_flags=["--trl-python"])
    flags.add_argument("--steps", type=int, default=60, help="training steps")
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        model, data = write_random_qwen(home / "random-qwen"), home / "data.jsonl"
        write_conversations(data)
        (home / "sft.toml").write_text(CONFIG.format(steps=args.steps, model=model, data=data))
        wall = time_step(home)
        metrics: dict[str, list[float]] = {}
        for metric in read_metrics(home / "outputs" / "sft"):
            metrics.setdefault(metric.name, []).append(metric.value)
        trl_step = measure_trl(args.trl_python, "sft", model, TRL_MICRO_BATCHES) if args.trl_python else None
    reference = TOKENS / trl_step if trl_step else None
    half = args.steps // 2
    speed = TOKENS / wall
    rows = [
        Row("tokens a second, whole step", speed, reference, "1/s", TARGET_TOKENS_PER_S, at_least=True),
        Row("a step", wall, None, "s"),
        Row("  of it on the GPU", statistics.median(metrics["train/seconds"][half:]), None, "s"),
        Row("MFU of the step on the GPU", statistics.median(metrics["train/mfu"][half:]), None, ""),
    ]
    if reference:
        rows.append(Row("over TRL", speed / reference, None, "x", TARGET_RATIO, at_least=True))
    return finish("benchmarks/sft_gpu.py: ramify sft, 0.48 B, 64 x 1,024 tokens a step", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
