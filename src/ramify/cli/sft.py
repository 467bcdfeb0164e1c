"""`ramify sft @ config.toml`: fine-tune a model on conversations (SFT); rerun to resume."""

import os
import sys
from collections.abc import Sequence

from ramify.cli.heavy_imports import pause_garbage_collection
from ramify.cli.parser import format_resume_command
from ramify.cli.short_flags import expand_short_flags
from ramify.core.config import dry_run, parse, pop_flags
from ramify.core.display import choose_display
from ramify.core.errors import StorageFull
from ramify.core.names import format_count
from ramify.train.sft.config import SftConfig

COMMAND_FLAGS = ("--fresh", "--dry-run")
SHORT_FLAGS = {"-m": "--model.name", "-o": "--output", "-d": "--data.path"}
USAGE = """usage: ramify sft [@ FILE] [-m MODEL] [-d DATA] [-o OUTPUTS] [--key value]

  -d DATA     conversations: a jsonl, parquet, arrow, csv or json file, a directory of them, or a cached dataset's id
  --fresh     start over; the old run directory is renamed
  --dry-run   check the configuration and the data, and exit

Rerun the same command to resume the run. On several GPUs: torchrun --nproc-per-node N -m ramify sft ... Keys:
"""


def run(argv: Sequence[str]) -> int:
    """Read the configuration, train the remaining steps, and print where the weights are."""
    (fresh, dry), rest = pop_flags(argv, COMMAND_FLAGS)
    args = expand_short_flags(rest, SHORT_FLAGS)
    config = parse(SftConfig, args, prog="ramify sft", usage=USAGE, command_flags=COMMAND_FLAGS)
    if dry:
        from ramify.train.sft.plan import build_sft_plan, describe_plan

        plan = build_sft_plan(config)
        dry_run(config, plan.path, describe_plan(plan, config))
        return 0
    with pause_garbage_collection():
        from ramify.model.precision import disable_tf32_convolutions  # torch is loaded here, not for help
        from ramify.train.sft.display import SftContent
        from ramify.train.sft.run import run_sft

    disable_tf32_convolutions()
    resume_command = format_resume_command("sft", argv)
    try:
        result = run_sft(config, fresh=fresh, display=choose_display(SftContent()))
    except StorageFull as error:
        raise StorageFull(f"{error.message}; resume with: {resume_command}") from error
    if os.environ.get("RANK", "0") != "0":  # of torchrun's processes, only the first prints
        return 0
    if result.weights is None:
        print(f"stopped after {format_count(result.steps, 'step')}; resume with: {resume_command}", file=sys.stderr)
        return 130
    outcome = "finished" if result.steps_run else f"{result.path} is already finished"
    print(f"{outcome}: {format_count(result.steps, 'step')}; the model is {result.weights}")
    return 0
