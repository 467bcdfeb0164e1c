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
from ramify.model.config_check import check_model_config
from ramify.run.store import RunStore
from ramify.run.store.index import DATABASE_NAME
from ramify.run.store.run_directory import check_identity
from ramify.train.checkpoint_manifest import CHECKPOINTS_DIR, find_saved_optimizer
from ramify.train.sft.config import SftConfig
from ramify.train.sft.pinned_data import pin_sft_datasets
from ramify.train.sft.plan import build_sft_plan, describe_plan


def run(call: ConfigCall[SftConfig]) -> int:
    """Train the remaining steps, and print where the weights are."""
    is_dry_run, resume_command = call.flags.dry_run, call.resume_command
    config = pin_sft_datasets(call.config, fresh=call.flags.fresh, log=None if is_dry_run else print_to_stderr)
    check_sft_evals(config)
    if is_dry_run:
        return _print_plan(config, fresh=call.flags.fresh)
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


def _print_plan(config: SftConfig, *, fresh: bool) -> int:
    """Check the model, and the identity and optimizer of an earlier run, as a run does; then print the plan."""
    check_model_config(config.model.name, by_trainer=True, by_engine=False, fetch=False, skip_without_transformers=True)
    plan = build_sft_plan(config)
    if not fresh:
        if (plan.path / DATABASE_NAME).is_file():
            with RunStore.open(plan.path, write=False) as store:
                check_identity(store, plan.identity, None)
        if (saved := find_saved_optimizer(plan.path / CHECKPOINTS_DIR)) is not None:
            saved.check_matches(config.trainer.optim)
    dry_run(config, plan.path, describe_plan(plan, config))
    return 0
