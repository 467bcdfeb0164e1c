"""What a plan says besides the processes of a run: the size of a step, the disk, and notes on what may surprise."""

import contextlib

from ramify.core.errors import ModelNotFound
from ramify.core.names import format_count
from ramify.launch.disk import estimate_disk
from ramify.launch.run_checks import list_missing_models
from ramify.model.resolve import may_be_path, read_max_positions, resolve_model_path
from ramify.orchestrate.config import RunConfig, uses_model
from ramify.rollout.runtime.bwrap import describe_fallback


def describe_step_size(config: RunConfig) -> str:
    """Describe how many groups and rollouts a step has.

    The number of groups depends on `orchestrator.group_size`; a source may have groups of another size.
    """
    num_groups = config.orchestrator.admission_limits.groups_per_batch
    total_ratio = sum(source.ratio for source in config.train)
    mean_size = sum(source.ratio * config.get_group_size(source) for source in config.train) / total_ratio
    sizes = ", ".join(f"{source.source_name}: groups of {config.get_group_size(source)}" for source in config.train)
    return f"step: {format_count(num_groups, 'group')}, about {num_groups * mean_size:.0f} rollouts ({sizes})"


def list_start_notes(config: RunConfig) -> list[str]:
    """Return the notes that are also printed when the run starts: on lengths and on runtimes."""
    return [*_list_length_notes(config), *list_runtime_notes(config)]


def _list_length_notes(config: RunConfig) -> list[str]:
    """Return a note for each length that exceeds the length of a sequence or of the model."""
    notes: list[str] = []
    model_length = None
    with contextlib.suppress(ModelNotFound):
        model_length = read_max_positions(resolve_model_path(config.model.name))
    if model_length is not None and config.seq_len > model_length:
        notes.append(f"note: seq_len: {config.seq_len} is longer than the model allows, {model_length} tokens")
    for kind, sources in (("train", config.train), ("eval", config.eval)):
        for number, source in enumerate(sources):
            max_tokens, seq_len = source.sampling.max_tokens, source.seq_len or config.seq_len
            limit = seq_len if model_length is None else min(seq_len, model_length)
            if max_tokens is not None and max_tokens > limit:
                cause = f"seq_len, {seq_len}" if limit == seq_len else f"the model allows, {model_length}"
                effect = f"prompt and reply together end at {limit} tokens"
                key = f"{kind}.{number}.sampling.max_tokens"
                notes.append(f"note: {key}: {max_tokens} is more than {cause}: {effect}")
    return notes


def list_model_notes(config: RunConfig) -> list[str]:
    """Return a note for each model that no source uses, or that is not here: a mistyped path, or one to download."""
    unused = [
        f"note: no source uses models.{name}; name it as `teacher` or `reference`, or remove its table"
        for name in config.models
        if not any(uses_model(source, name) for source in (*config.train, *config.eval))
    ]
    # A dry run may be for another machine.
    missing = [
        f"note: {key}: not checked: {text}"
        if may_be_path(name)
        else f"note: {key}: the run downloads {name} when it starts; 'ramify model fetch {name}' downloads it before"
        for key, name, text in list_missing_models(config)
    ]
    return [*unused, *missing]


def list_disk_notes(config: RunConfig) -> list[str]:
    """Return the disk space that the run needs and has, and a warning if it is too little."""
    disk = estimate_disk(config)
    return [] if disk is None else disk.format_lines()


def list_runtime_notes(config: RunConfig) -> list[str]:
    """Return a note for each source whose sandbox is replaced by the runtime `local` on this machine."""
    tables = {f"train.{number}.runtime": source.runtime for number, source in enumerate(config.train)}
    tables |= {f"eval.{number}.runtime": source.runtime for number, source in enumerate(config.eval)}
    return [f"note: {key}: {text}" for key, table in tables.items() if (text := describe_fallback(table))]
