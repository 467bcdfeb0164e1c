"""Filters detect rollouts that should not be trained on, after the algorithm has annotated them.

In `monitor` mode a filter only counts. In `enforce` mode a rollout that it fires on loses its annotations, and a group
without annotations is dropped. A plugin subclasses `Filter` and is named in the configuration like any plugin.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ramify.core.config import Config
from ramify.orchestrate.algorithms import get_trainable_nodes
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

        `rollout.trace` is the trace, `rollout.annotations` come from the algorithm, and `rollout.vocab_size` is the
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


# Detects gibberish: a rare token that was sampled although it was very unlikely.


class GibberishConfig(FilterConfig):
    """Configuration of the gibberish filter."""

    token_id_threshold: int = Field(default=100_000, ge=0)
    """Token ids above this count as rare: tokenizers number tokens in the order of their merges."""
    logprob_offset: float = Field(default=2.0, ge=0)
    """How far the logprob must be below the logprob of a uniform guess, in nats."""


class Gibberish(Filter):
    """Fires on a token id above `token_id_threshold` whose logprob is below −ln V − `logprob_offset`.

    V is the size of the vocabulary.
    """

    config: GibberishConfig

    def fires(self, rollout: FilterInput) -> bool:
        """Return whether the policy sampled a rare token whose logprob is below the limit."""
        limit = -math.log(rollout.vocab_size) - self.config.logprob_offset
        logprobs = rollout.trace.graph.logprobs.view
        if not np.any(logprobs < limit):
            return False  # most rollouts end here: what follows is slow
        nodes = rollout.trace.nodes
        for node in map(nodes.__getitem__, get_trainable_nodes(rollout.trace)):
            rare = node.token_ids[slice(*node.sampled_span)] > self.config.token_id_threshold
            if np.any(rare & (node.logprobs < limit)):
                return True
        return False


# Detects repetition: a model that repeats itself is almost certain of every token.


class RepetitionConfig(FilterConfig):
    """Configuration of the repetition filter."""

    window: int = Field(default=3000, ge=1)
    """Number of consecutive tokens."""
    prob_threshold: float = Field(default=0.99, gt=0, lt=1)
    """Probability that each of them must exceed."""


class Repetition(Filter):
    """Fires on `window` consecutive tokens of one reply, each with a probability above `prob_threshold`."""

    config: RepetitionConfig

    def fires(self, rollout: FilterInput) -> bool:
        """Return whether a long run of tokens was sampled almost with certainty."""
        if rollout.trace.completion_len < self.config.window:
            return False  # most rollouts end here: what follows is slow
        limit = math.log(self.config.prob_threshold)
        nodes = rollout.trace.nodes
        runs = (_longest_run(nodes[node].logprobs > limit) for node in get_trainable_nodes(rollout.trace))
        return max(runs, default=0) >= self.config.window


def _longest_run(is_confident: npt.NDArray[np.bool_]) -> int:
    """Return the length of the longest run of True."""
    edges = np.flatnonzero(np.diff(is_confident, prepend=False, append=False))
    return int((edges[1::2] - edges[::2]).max(initial=0))


# Detects replies that were cut: their reward judges a reply that the model did not finish.


class Truncated(Filter):
    """Fires if the last reply was cut by a length limit: `sampling.max_tokens` or `seq_len`."""

    def fires(self, rollout: FilterInput) -> bool:
        """Return whether the last model call ended at its length limit."""
        calls = (call for node in reversed(rollout.trace.nodes) if (call := node.call) is not None)
        last_call = next(calls, None)
        return last_call is not None and last_call.finish_reason == "length"


# Detects rollouts without a training signal: all attempts at a task earned the same reward.

ZERO_TOLERANCE = 1e-8


class ZeroAdvantage(Filter):
    """Fires if every advantage is zero and no other loss component is trained."""

    def fires(self, rollout: FilterInput) -> bool:
        """Return whether no annotation of the rollout has an effect."""
        return not any(_has_effect(annotation) for annotation in rollout.annotations)


def _has_effect(annotation: Annotation) -> bool:
    advantage, ce = annotation.advantage, annotation.ce
    if isinstance(advantage, int | float) and isinstance(ce, int | float):  # numpy takes ten times as long
        return abs(advantage) > ZERO_TOLERANCE or ce != 0 or annotation.needs_reference
    return bool(np.any(np.abs(advantage) > ZERO_TOLERANCE) or np.any(ce) or annotation.needs_reference)
