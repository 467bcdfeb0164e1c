"""What a plan says about a run besides its processes: the size of a step, and models that nothing uses."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ramify.env.chat_client import RUN_MODEL_PREFIX
from ramify.orchestrate.config import RunConfig


def describe_step_size(config: RunConfig) -> str:
    """Describe how many groups and rollouts a step has.

    The number of groups depends on `orchestrator.group_size`; a source may have groups of another size.
    """
    num_groups = config.orchestrator.admission_limits.groups_per_batch
    total_ratio = sum(source.ratio for source in config.train)
    mean_size = sum(source.ratio * config.get_group_size(source) for source in config.train) / total_ratio
    sizes = ", ".join(f"{source.source_name}: groups of {config.get_group_size(source)}" for source in config.train)
    return f"step: {num_groups} groups, about {num_groups * mean_size:.0f} rollouts ({sizes})"


def list_unused_models(config: RunConfig) -> list[str]:
    """Return a note for each model of `[models]` that no source uses."""
    sources = [*config.train, *config.eval]
    texts = {text for source in sources for text in _iter_strings(source.model_dump(mode="json"))}
    used_names = {name for source in config.train for name in (source.sampler_model, source.score_model)}
    return [
        f"note: no source uses models.{name}; name it as `teacher` or `reference`, or remove its table"
        for name in config.models
        if name not in used_names and f"{RUN_MODEL_PREFIX}{name}" not in texts
    ]


def _iter_strings(value: Any) -> Iterator[str]:
    """Yield every string in nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in cast(Mapping[str, Any], value).values():
            yield from _iter_strings(item)
    elif isinstance(value, Sequence):
        for item in cast(Sequence[Any], value):
            yield from _iter_strings(item)
