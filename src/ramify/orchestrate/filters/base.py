"""What a filter implements, and what firing does."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ramify.config import Config
from ramify.trace import Annotation, Trace


class FilterConfig(Config):
    """What every filter can be told."""

    id: str = ""
    mode: Literal["monitor", "enforce"] = "monitor"
    """`monitor` counts what it fires on, `enforce` also leaves it out."""


@dataclass(frozen=True, slots=True, eq=False)
class FilterInput:
    """What a filter looks at: a trace, what the algorithm said about it, and how many tokens the model knows."""

    trace: Trace
    annotations: tuple[Annotation, ...]
    vocab_size: int


class Filter:
    """Says of a rollout whether it should be left out. Stateless."""

    config: FilterConfig

    def __init__(self, config: FilterConfig) -> None:
        self.config = config

    def fires(self, rollout: FilterInput) -> bool:
        """Whether the rollout is one that this filter looks for."""
        raise NotImplementedError(f"{type(self).__qualname__} must define `fires`")


@dataclass(frozen=True, slots=True, eq=False)
class FilterResult:
    """What is left of a group's annotations, and for each trace the filters that fired on it."""

    annotations: tuple[Annotation, ...]
    filters_by_trace: dict[str, tuple[str, ...]]
    enforced_filters: tuple[str, ...]  # the filters that left something out
    fired_by_filter: dict[str, list[bool]]  # by filter, of each trace whether it did

    @property
    def describe_enforced(self) -> str:
        """Who left it out, for the ledger."""
        return ", ".join(self.enforced_filters)


def apply_filters(
    filters: Sequence[Filter], group: Sequence[Trace], annotations: Sequence[Annotation], vocab_size: int
) -> FilterResult:
    """Show every rollout of a group to every filter."""
    by_trace: defaultdict[str, list[Annotation]] = defaultdict(list)
    for note in annotations:
        by_trace[note.trace_id].append(note)
    verdicts: dict[str, tuple[str, ...]] = {}
    enforced: list[str] = []
    out: set[str] = set()
    for trace in group:
        rollout = FilterInput(trace, tuple(by_trace[trace.id]), vocab_size)
        fired = [each.config for each in filters if each.fires(rollout)]
        if fired:
            verdicts[trace.id] = tuple(config.id for config in fired)
        for config in fired:
            if config.mode == "enforce":
                out.add(trace.id)
                enforced.append(config.id)
    left = tuple(note for note in annotations if note.trace_id not in out)
    names = [each.config.id for each in filters]
    fired = {name: [name in verdicts.get(trace.id, ()) for trace in group] for name in names}
    return FilterResult(left, verdicts, tuple(dict.fromkeys(enforced)), fired)
