"""What a plan says about a run besides its processes: the size of a step, and models that are unused or missing."""

from ramify.errors import ModelNotFound
from ramify.model.resolve import is_hub_id, resolve_model_path
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
    """Return a note for each model that no source uses, or that a run on this machine would not find."""
    return [*_list_unused_models(config), *_list_missing_models(config)]


def _list_unused_models(config: RunConfig) -> list[str]:
    """Return a note for each model of `[models]` that no source uses."""
    return [
        f"note: no source uses models.{name}; name it as `teacher` or `reference`, or remove its table"
        for name in config.models
        if not any(uses_model(source, name) for source in (*config.train, *config.eval))
    ]


def _list_missing_models(config: RunConfig) -> list[str]:
    """Return a note for each model that is neither here nor a hub id. A dry run may be for another machine."""
    models = {f"models.{name}": model.name for name, model in config.models.items() if model.is_managed}
    notes: list[str] = []
    for key, name in {"model": config.model.name, **models}.items():
        try:
            resolve_model_path(name)
        except ModelNotFound as error:
            if not is_hub_id(name):  # which the run would download
                notes.append(f"note: {key}: not checked: {error.message}")
    return notes
