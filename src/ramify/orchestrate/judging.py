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
from ramify.orchestrate.batch import Member
from ramify.orchestrate.filters import Filter, sift
from ramify.orchestrate.groups import GroupRun
from ramify.store.group_state import DropReason
from ramify.trace import Annotation, Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What has to be known of a source to issue and judge its groups."""

    name: str
    algorithm: Algorithm
    size: int = 16  # attempts of a group
    tries: int = 3  # how often an attempt is run at most
    temperature: float = 1.0
    group_rewards: frozenset[str] = frozenset()  # rewards that only the whole group can have
    epoch: int | None = None  # tasks that make an epoch, where each is to be issued once in it


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for the groups of all sources."""

    vocabulary: int
    seq_len: int | None = None
    filters: tuple[Filter, ...] = ()
    min_group: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The group as a member of a batch and its forest, or a reason; and what is worth knowing of each attempt."""

    reward: float | None
    notes: dict[int, dict[str, Any]]
    fired: dict[str, list[bool]]  # by filter, of each trace whether it did; empty where none was asked
    member: Member | None = None
    forest: Forest | None = None
    reason: DropReason | None = None
    detail: str = ""


def rollout_id(group: int, attempt: int) -> str:
    """What the rollout of an attempt is called: the same on every start, so that a later one takes its place."""
    return f"{group}.{attempt}"


def judge(group: GroupRun, source: Source, rules: Rules) -> Judged:
    """What is trained of a complete group."""
    rewards = [trace.reward for trace in group.traces]
    if None in rewards:
        return Judged(None, {}, {}, reason=DropReason.UNSCORED, detail=_missing(group))
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below, by name
        return _judge_scored(group, source, rules, [reward for reward in rewards if reward is not None])


def _judge_scored(group: GroupRun, source: Source, rules: Rules, rewards: Sequence[float]) -> Judged:
    mean = safe_mean(rewards)
    said = source.algorithm.annotate(group.traces)
    sifted = sift(rules.filters, group.traces, said, rules.vocabulary)
    notes, fired = _notes(group, said, sifted.verdicts), sifted.fired
    if not said:
        return Judged(mean, notes, fired, reason=DropReason.NOTHING_TRAINABLE, detail="the policy sampled nothing")
    if not sifted.annotations:
        return Judged(mean, notes, fired, reason=DropReason.FILTERED, detail=sifted.detail)
    rollouts = tuple(rollout_id(group.number, attempt) for attempt in sorted(group.rollouts))
    member = Member(group.number, source.name, source.temperature, rollouts, sifted.annotations)
    try:
        forest = member.grow(group.traces, rules.seq_len)
    except ValueNotFinite as error:
        detail = f"{error.message}; rewards from {min(rewards):g} to {max(rewards):g}"
        return Judged(None, notes, fired, reason=DropReason.NOT_FINITE, detail=detail)
    if not len(forest.targets):
        detail = (
            f"every path is over {rules.seq_len} tokens" if forest.dropped.overlong_calls else "all weights are zero"
        )
        return Judged(mean, notes, fired, reason=DropReason.NOTHING_TRAINABLE, detail=detail)
    return Judged(mean, notes, fired, member, forest)


def _missing(group: GroupRun) -> str:
    names = {name for trace in group.traces for name, entry in trace.rewards.items() if entry is None}
    return ", ".join(sorted(names))


def _notes(
    group: GroupRun, annotations: Sequence[Annotation], verdicts: dict[str, tuple[str, ...]]
) -> dict[int, dict[str, Any]]:
    """Reward, advantage and verdicts of each attempt; an advantage per token is told by its mean."""
    advantage: dict[str, list[float]] = {}
    for note in annotations:
        advantage.setdefault(note.trace_id, []).append(float(np.mean(note.advantage)))
    found: dict[int, dict[str, Any]] = {}
    for attempt, traces in group.rollouts.items():
        told = [value for trace in traces for value in advantage.get(trace.id, [])]
        fired = [name for trace in traces for name in verdicts.get(trace.id, ())]
        found[attempt] = {
            "reward": traces[0].reward,
            "advantage": float(np.mean(told)) if told else None,
            "verdicts": sorted(set(fired)),
        }
    return found
