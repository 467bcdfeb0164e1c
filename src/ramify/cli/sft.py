"""`ramify sft @ config.toml`: fine-tune a model on conversations (SFT); rerun to resume."""

import os
import sys

from ramify.cli.arguments import ConfigCall
from ramify.cli.commands import pause_garbage_collection
from ramify.core.config import dry_run
from ramify.core.display import choose_display
from ramify.core.errors import StorageFull
from ramify.core.hub import print_to_stderr
from ramify.core.names import format_count
from ramify.launch.plugin_check import check_sft_evals
from ramify.train.sft.config import SftConfig
from ramify.train.sft.pinned_data import pin_sft_datasets
from ramify.train.sft.plan import build_sft_plan, describe_plan


def run(call: ConfigCall[SftConfig]) -> int:
    """Train the remaining steps, and print where the weights are."""
    is_dry_run, resume_command = call.flags.dry_run, call.resume_command
    config = pin_sft_datasets(call.config, fresh=call.flags.fresh, log=None if is_dry_run else print_to_stderr)
    check_sft_evals(config)
    if is_dry_run:
        plan = build_sft_plan(config)
        dry_run(config, plan.path, describe_plan(plan, config))
        return 0
    with pause_garbage_collection():
        from ramify.launch.sft_evals import RolloutEvals
        from ramify.model.precision import disable_tf32_convolutions  # torch is loaded here, not for a dry run
        from ramify.train.sft.display import SftContent
        from ramify.train.sft.run import run_sft

    disable_tf32_convolutions()
    try:
        display, evals = choose_display(SftContent()), RolloutEvals.from_config(config)
        result = run_sft(config, fresh=call.flags.fresh, display=display, evals=evals)
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
