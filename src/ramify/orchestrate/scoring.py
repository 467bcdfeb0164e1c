"""From a complete group to what is trained of it: algorithm, filters, forest; or the reason why nothing is.

A pure function of the group's traces, so a run that goes on judges a group as it was judged before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ramify.errors import ValueNotFinite
from ramify.evals.stats import safe_mean
from ramify.orchestrate.algorithms import Algorithm
from ramify.orchestrate.batches import BatchGroup
from ramify.orchestrate.filters import Filter, apply_filters
from ramify.orchestrate.group_tracker import GroupTracker
from ramify.store.group_state import DropReason
from ramify.trace import Annotation, Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """What has to be known of a source to issue and judge its groups."""

    name: str
    algorithm: Algorithm
    group_size: int = 16  # attempts of a group
    max_tries: int = 3  # how often an attempt is run at most
    temperature: float = 1.0
    group_rewards: frozenset[str] = frozenset()  # rewards that only the whole group can have
    tasks_per_epoch: int | None = None  # tasks that make an epoch, where each is to be issued once in it


@dataclass(frozen=True, slots=True)
class ScoringRules:
    """What holds for the groups of all sources."""

    vocab_size: int
    seq_len: int | None = None
    filters: tuple[Filter, ...] = ()
    min_group: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """The group as a member of a batch and its forest, or a reason; and what is worth knowing of each attempt."""

    mean_reward: float | None
    attempt_notes: dict[int, dict[str, Any]]
    fired_by_filter: dict[str, list[bool]]  # by filter, of each trace whether it did; empty where none was asked
    batch_group: BatchGroup | None = None
    forest: Forest | None = None
    drop_reason: DropReason | None = None
    drop_detail: str = ""


def build_rollout_id(group: int, attempt: int) -> str:
    """What the rollout of an attempt is called: the same on every start, so that a later one takes its place."""
    return f"{group}.{attempt}"


def score_complete_group(tracker: GroupTracker, source: SourceSpec, rules: ScoringRules) -> ScoredGroup:
    """What is trained of a complete group."""
    rewards = [trace.reward for trace in tracker.traces]
    if None in rewards:
        return ScoredGroup(
            None, {}, {}, drop_reason=DropReason.UNSCORED, drop_detail=_describe_missing_rewards(tracker)
        )
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below, by name
        return _score_rewarded_group(tracker, source, rules, [reward for reward in rewards if reward is not None])


def _score_rewarded_group(
    tracker: GroupTracker, source: SourceSpec, rules: ScoringRules, rewards: Sequence[float]
) -> ScoredGroup:
    mean = safe_mean(rewards)
    said = source.algorithm.annotate(tracker.traces)
    sifted = apply_filters(rules.filters, tracker.traces, said, rules.vocab_size)
    notes, fired = _build_attempt_notes(tracker, said, sifted.filters_by_trace), sifted.fired_by_filter
    if not said:
        return ScoredGroup(
            mean, notes, fired, drop_reason=DropReason.NOTHING_TRAINABLE, drop_detail="the policy sampled nothing"
        )
    if not sifted.annotations:
        return ScoredGroup(mean, notes, fired, drop_reason=DropReason.FILTERED, drop_detail=sifted.describe_enforced)
    rollouts = tuple(build_rollout_id(tracker.number, attempt) for attempt in sorted(tracker.rollouts))
    member = BatchGroup(tracker.number, source.name, source.temperature, rollouts, sifted.annotations)
    try:
        forest = member.build_forest(tracker.traces, rules.seq_len)
    except ValueNotFinite as error:
        detail = f"{error.message}; rewards from {min(rewards):g} to {max(rewards):g}"
        return ScoredGroup(None, notes, fired, drop_reason=DropReason.NOT_FINITE, drop_detail=detail)
    if not len(forest.targets):
        detail = (
            f"every path is over {rules.seq_len} tokens" if forest.dropped.overlong_calls else "all weights are zero"
        )
        return ScoredGroup(mean, notes, fired, drop_reason=DropReason.NOTHING_TRAINABLE, drop_detail=detail)
    return ScoredGroup(mean, notes, fired, member, forest)


def _describe_missing_rewards(tracker: GroupTracker) -> str:
    names = {name for trace in tracker.traces for name, entry in trace.rewards.items() if entry is None}
    return ", ".join(sorted(names))


def _build_attempt_notes(
    tracker: GroupTracker, annotations: Sequence[Annotation], filters_by_trace: dict[str, tuple[str, ...]]
) -> dict[int, dict[str, Any]]:
    """Reward, advantage and verdicts of each attempt; an advantage per token is told by its mean."""
    advantage: dict[str, list[float]] = {}
    for note in annotations:
        advantage.setdefault(note.trace_id, []).append(float(np.mean(note.advantage)))
    found: dict[int, dict[str, Any]] = {}
    for attempt, traces in tracker.rollouts.items():
        told = [value for trace in traces for value in advantage.get(trace.id, [])]
        filter_names = [name for trace in traces for name in filters_by_trace.get(trace.id, ())]
        found[attempt] = {
            "reward": traces[0].reward,
            "advantage": float(np.mean(told)) if told else None,
            "verdicts": sorted(set(filter_names)),
        }
    return found
