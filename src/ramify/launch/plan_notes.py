"""What a plan says about a run besides its processes: the size of a step, and models that are unused or missing."""

from pathlib import Path

from ramify.model.resolve import describe_weights_near
from ramify.orchestrate.config import RunConfig, uses_model


def describe_step_size(config: RunConfig) -> str:
    """Describe how many groups and rollouts a step has.

    The number of groups depends on `orchestrator.group_size`; a source may have groups of another size.
    """
    num_groups = config.orchestrator.admission_limits.groups_per_batch
    total_ratio = sum(source.ratio for source in config.train)
    mean_size = sum(source.ratio * config.get_group_size(source) for source in config.train) / total_ratio
    sizes = ", ".join(f"{source.source_name}: groups of {config.get_group_size(source)}" for source in config.train)
    return f"step: {num_groups} groups, about {num_groups * mean_size:.0f} rollouts ({sizes})"


def list_model_notes(config: RunConfig) -> list[str]:
    """Return a note for each model that no source uses, or whose directory does not exist on this machine."""
    return [*_list_unused_models(config), *_list_missing_models(config)]


def _list_unused_models(config: RunConfig) -> list[str]:
    """Return a note for each model of `[models]` that no source uses."""
    return [
        f"note: no source uses models.{name}; name it as `teacher` or `reference`, or remove its table"
        for name in config.models
        if not any(uses_model(source, name) for source in (*config.train, *config.eval))
    ]


def _list_missing_models(config: RunConfig) -> list[str]:
    """Return a note for each model that is a local path and does not exist. A dry run may be for another machine."""
    models = {f"models.{name}": model.name for name, model in config.models.items() if model.is_managed}
    notes: list[str] = []
    for key, name in {"model": config.model.name, **models}.items():
        path = Path(name).expanduser()
        if _is_local_path(name) and not path.exists():
            weights = describe_weights_near(path)
            notes.append(f"note: {key}: {name} does not exist; not checked" + (f"; {weights}" if weights else ""))
    return notes


def _is_local_path(name: str) -> bool:
    """Return whether the name of a model is a path, and not the id of a model on the hub."""
    return "/" in name and (name.startswith((".", "/", "~")) or Path(Path(name).parts[0]).exists())
