"""Scoring of a complete group: algorithm, filters and forest, or the reason why it cannot be trained on.

Scoring is a pure function of the group's traces and of the algorithm's state, which is stored with the group, so a
resumed run scores a group as it was scored before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ramify.core.errors import ValueNotFinite
from ramify.orchestrate.algorithms import Algorithm
from ramify.orchestrate.batches import TOKEN_MEAN, BatchGroup, LossNormalization
from ramify.orchestrate.filters import Filter, apply_filters
from ramify.orchestrate.group_tracker import GroupTracker
from ramify.orchestrate.reference_scores import NodeScores
from ramify.rollout.evals.stats import safe_mean
from ramify.run.store.group_state import DropReason
from ramify.trace import Annotation, Forest
from ramify.trace.forest import START_LOGPROB


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """What the core needs to issue and score the groups of a source."""

    name: str
    algorithm: Algorithm
    group_size: int = 16  # attempts per group
    max_tries: int = 3  # most tries of an attempt
    temperature: float = 1.0
    normalization: LossNormalization = TOKEN_MEAN
    is_scored_by_trainer: bool = False  # whether the trainer computes the reference, with its adapters off
    group_rewards: frozenset[str] = frozenset()  # names of the rewards that compare all attempts of a group
    tasks_per_epoch: int | None = None  # None if its curriculum has no epochs


@dataclass(frozen=True, slots=True)
class ScoringRules:
    """What the core needs to score the groups of any source."""

    vocab_size: int
    seq_len: int | None = None
    filters: tuple[Filter, ...] = ()
    min_group_size: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """A scored group: `batch_group` and `forest` if it can be trained on, `drop_reason` if not."""

    mean_reward: float | None
    attempt_notes: dict[int, dict[str, Any]]  # reward, advantage and fired filters, by attempt
    fired_by_filter: dict[str, list[bool]]  # by filter: whether it fired, for each trace
    state_after: dict[str, Any] | None  # of the algorithm, for the next group of the source; None if it has no state
    batch_group: BatchGroup | None = None
    forest: Forest | None = None
    drop_reason: DropReason | None = None
    drop_detail: str = ""


def build_rollout_id(group: int, attempt: int) -> str:
    """Return the rollout id of an attempt; it is the same for every try, so a retry replaces the rollout."""
    return f"{group}.{attempt}"


@np.errstate(over="ignore", invalid="ignore")  # values that are not finite raise ValueNotFinite
def score_complete_group(
    tracker: GroupTracker,
    source: SourceSpec,
    rules: ScoringRules,
    reference_scores: NodeScores | None,
    state_before: Mapping[str, Any] | None,
) -> ScoredGroup:
    """Score a complete group. If it cannot be trained on, the result says why.

    `reference_scores` has the logprobs of another model for the annotations that need them. `state_before` is what the
    algorithm remembers of the groups before.
    """
    rewards = [trace.reward for trace in tracker.traces if trace.reward is not None]
    if len(rewards) < len(tracker.traces):
        names = {name for trace in tracker.traces for name, entry in trace.rewards.items() if entry is None}
        return ScoredGroup(None, {}, {}, None, drop_reason=DropReason.UNSCORED, drop_detail=", ".join(sorted(names)))
    mean = safe_mean(rewards)
    annotations, state_after = source.algorithm.annotate_with_state(tracker.traces, state_before or {})
    annotations = [
        _add_reference(annotation, reference_scores or {}, is_scored_by_trainer=source.is_scored_by_trainer)
        for annotation in annotations
    ]
    filtered = apply_filters(rules.filters, tracker.traces, annotations, rules.vocab_size)
    notes = _build_attempt_notes(tracker, annotations, filtered.filters_by_trace)

    def drop(reason: DropReason, detail: str, mean: float | None = mean) -> ScoredGroup:
        return ScoredGroup(mean, notes, filtered.fired_by_filter, state_after, drop_reason=reason, drop_detail=detail)

    if not annotations:
        return drop(*source.algorithm.get_drop_reason(tracker.traces))
    if not filtered.annotations:
        return drop(DropReason.FILTERED, ", ".join(filtered.enforced_filters))
    rollout_ids = tuple(build_rollout_id(tracker.number, attempt) for attempt in sorted(tracker.rollouts))
    group = BatchGroup(
        tracker.number, source.name, source.temperature, rollout_ids, filtered.annotations, source.normalization
    )
    try:
        forest = group.build_forest(tracker.traces, rules.seq_len)
    except ValueNotFinite as error:
        rewards_range = f"rewards from {min(rewards):g} to {max(rewards):g}"
        return drop(DropReason.NOT_FINITE, f"{error.message}; {rewards_range}", mean=None)
    if not len(forest.targets):
        overlong = f"every path is over {rules.seq_len} tokens"
        detail = overlong if forest.dropped.overlong_calls else "all token weights are zero"
        return drop(DropReason.NOTHING_TRAINABLE, detail)
    return ScoredGroup(mean, notes, filtered.fired_by_filter, state_after, group, forest)


def _add_reference(annotation: Annotation, reference_scores: NodeScores, *, is_scored_by_trainer: bool) -> Annotation:
    """Return the annotation with the reference logprobs of its tokens, if it needs them."""
    score = reference_scores.get((annotation.trace_id, annotation.node))
    if is_scored_by_trainer and annotation.needs_reference:
        return replace(annotation, ref_logprobs=START_LOGPROB)
    if score is None or annotation.ref_logprobs is not None:
        return annotation
    top = score.top_logprobs if annotation.top_k else None
    return replace(annotation, ref_logprobs=score.logprobs, ref_top=None if top is None else top[:, : annotation.top_k])


def _build_attempt_notes(
    tracker: GroupTracker, annotations: Sequence[Annotation], filters_by_trace: dict[str, tuple[str, ...]]
) -> dict[int, dict[str, Any]]:
    """Return reward, mean advantage and fired filters of each attempt, as the ledger stores them."""
    advantages_by_trace: dict[str, list[float]] = {}
    for annotation in annotations:
        advantage = annotation.advantage  # one number for all tokens, or one for each
        mean = float(advantage) if isinstance(advantage, int | float) else float(np.mean(advantage))
        advantages_by_trace.setdefault(annotation.trace_id, []).append(mean)
    notes: dict[int, dict[str, Any]] = {}
    for attempt, traces in tracker.rollouts.items():
        advantages = [advantage for trace in traces for advantage in advantages_by_trace.get(trace.id, [])]
        filter_names = {name for trace in traces for name in filters_by_trace.get(trace.id, ())}
        notes[attempt] = {
            "reward": traces[0].reward,
            "advantage": sum(advantages) / len(advantages) if advantages else None,
            "verdicts": sorted(filter_names),
        }
    return notes
