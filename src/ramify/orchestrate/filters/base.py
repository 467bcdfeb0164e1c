"""The interface of a filter, and its application to a group."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ramify.core.config import Config
from ramify.trace import Annotation, Trace


class FilterConfig(Config):
    """Configuration common to all filters.

    - `id`: the id that selects the filter.
    - `mode`: "monitor" counts the rollouts that the filter fires on, "enforce" also excludes them from training.
    """

    id: str = ""
    mode: Literal["monitor", "enforce"] = "monitor"


@dataclass(frozen=True, slots=True, eq=False)
class FilterInput:
    """Input of a filter: a trace, its annotations by the algorithm, and the size of the model's vocabulary."""

    trace: Trace
    annotations: tuple[Annotation, ...]
    vocab_size: int


class Filter:
    """Base class of filters. A filter is stateless; a subclass implements `fires`.

    - `config`: the options, as an object of the class that annotates this attribute.
    """

    config: FilterConfig

    def __init__(self, config: FilterConfig) -> None:
        self.config = config

    def fires(self, rollout: FilterInput) -> bool:
        """Return whether the filter detects its problem in the rollout.

        `rollout.trace` is the trace, `rollout.annotations` are those of the algorithm, and `rollout.vocab_size` is the
        size of the model's vocabulary.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define `fires`")


@dataclass(frozen=True, slots=True, eq=False)
class FilterResult:
    """The remaining annotations of a group, and the ids of the filters that fired."""

    annotations: tuple[Annotation, ...]
    filters_by_trace: dict[str, tuple[str, ...]]  # filters that fired, by trace id
    enforced_filters: tuple[str, ...]  # filters that excluded a trace
    fired_by_filter: dict[str, list[bool]]  # whether a filter fired, for each trace


def apply_filters(
    filters: Sequence[Filter], group: Sequence[Trace], annotations: Sequence[Annotation], vocab_size: int
) -> FilterResult:
    """Apply every filter to every trace of a group."""
    annotations_by_trace: defaultdict[str, list[Annotation]] = defaultdict(list)
    for annotation in annotations:
        annotations_by_trace[annotation.trace_id].append(annotation)
    filters_by_trace: dict[str, tuple[str, ...]] = {}
    enforced_filters: dict[str, None] = {}  # an ordered set
    excluded_traces: set[str] = set()
    for trace in group:
        filter_input = FilterInput(trace, tuple(annotations_by_trace[trace.id]), vocab_size)
        fired = [filter_.config for filter_ in filters if filter_.fires(filter_input)]
        if fired:
            filters_by_trace[trace.id] = tuple(config.id for config in fired)
        for config in fired:
            if config.mode == "enforce":
                excluded_traces.add(trace.id)
                enforced_filters[config.id] = None
    remaining = tuple(annotation for annotation in annotations if annotation.trace_id not in excluded_traces)
    names = [filter_.config.id for filter_ in filters]
    fired_by_filter = {name: [name in filters_by_trace.get(trace.id, ()) for trace in group] for name in names}
    return FilterResult(remaining, filters_by_trace, tuple(enforced_filters), fired_by_filter)
