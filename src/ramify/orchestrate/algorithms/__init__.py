"""Algorithms turn the rewards of a group into advantages and weights of its tokens.

Each algorithm is one short file. It returns annotations; nothing after it depends on which algorithm made them. A
plugin subclasses `Algorithm` and is named in the configuration like any plugin.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ramify.core.config import Config
from ramify.core.errors import OperationInvalid
from ramify.run.store.group_state import DropReason
from ramify.trace import Annotation, Trace

FloatArray = npt.NDArray[np.float64]


class AlgorithmConfig(Config):
    """Configuration common to all algorithms: `id`, which selects the algorithm."""

    id: str = "grpo"


class Algorithm:
    """Base class of algorithms. A subclass implements one of three hooks.

    - `advantages`: the rewards of comparable rollouts in, one advantage for each out; most algorithms.
    - `annotate`: other weights, per-token values, tokens the policy did not sample, reference logprobs.
    - `annotate_with_state`: also remembers something of earlier groups.

    An algorithm object keeps no state: the same group and the same state give the same annotations.

    - `config`: the options, as an object of the class that annotates this attribute.
    - `compares_attempts`: whether advantages are 0 in a group of one attempt, so that such a group teaches nothing.
    """

    config: AlgorithmConfig
    compares_attempts: ClassVar[bool] = False

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    def advantages(self, rewards: FloatArray, traces: Sequence[Trace]) -> FloatArray:
        """Return the advantage of each rollout: how much better it was than expected.

        `traces` belong to one agent, in all attempts at one task; `rewards` has their rewards, in the same order.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define `advantages`, or `annotate`")

    def annotate(self, group: Sequence[Trace]) -> list[Annotation]:
        """Return the annotations of a group: by default the advantage of its trace for every sampled token.

        The group holds the traces of every agent of every kept attempt, each with its reward. A token without an
        annotation is context. Weights need no normalization: the trainer divides by the entries of the batch.
        """
        annotations: list[Annotation] = []
        for traces, rewards in group_by_agent(group).values():
            for trace, advantage in zip(traces, self.advantages(rewards, traces).tolist(), strict=True):
                annotations += annotate_advantage(trace, advantage)
        return annotations

    def annotate_with_state(
        self, group: Sequence[Trace], state: Mapping[str, Any]
    ) -> tuple[list[Annotation], dict[str, Any] | None]:
        """Return the annotations of a group, and the state for the next group of the source.

        The state is plain data, {} before the first group; None says that the algorithm remembers nothing. The ledger
        stores it in the transaction that scores the group, so each group counts once, also after a crash. Which tokens
        are annotated must not depend on it.
        """
        return self.annotate(group), None

    def get_drop_reason(self, group: Sequence[Trace]) -> tuple[DropReason, str]:
        """Return why a group without annotations is dropped: the reason and its detail."""
        if any(get_trainable_nodes(trace) for trace in group):
            return DropReason.NOTHING_TRAINABLE, "the algorithm annotated no token"
        excluded = Counter(str(entry["reason"]) for trace in group for entry in trace.info.get("untrained", ()))
        reasons = [f"{count} calls are not trained ({reason})" for reason, count in excluded.most_common()]
        return DropReason.NOTHING_TRAINABLE, "; ".join(reasons) or "no sampled tokens"


def group_by_agent(group: Sequence[Trace]) -> dict[str, tuple[list[Trace], FloatArray]]:
    """Return the traces of each agent with their rewards. Raises OperationInvalid if a reward is missing."""
    agents: defaultdict[str, list[Trace]] = defaultdict(list)
    for trace in group:
        agents[trace.agent].append(trace)
    if missing := [trace.id for trace in group if trace.reward is None]:
        raise OperationInvalid(
            f"traces {missing} have no reward, so they cannot be compared with others of their group"
        )
    return {
        agent: (traces, np.array([trace.reward for trace in traces], np.float64)) for agent, traces in agents.items()
    }


def annotate_advantage(trace: Trace, advantage: float) -> list[Annotation]:
    """Return the annotations that give every sampled token of a trace the same advantage."""
    return [Annotation(trace.id, node, advantage=advantage) for node in get_trainable_nodes(trace)]


def get_trainable_nodes(trace: Trace) -> list[int]:
    """Return the nodes that the policy sampled, not another model."""
    trainable = trace.graph.nodes.view["trainable"]
    return [node for node in trace.sampled_nodes if trainable[node]]


def count_sampled_tokens(trace: Trace) -> int:
    """Return the number of tokens that the policy sampled."""
    table = trace.graph.nodes.view
    return int(((table["sampled_stop"] - table["sampled_start"]) * (table["trainable"] != 0)).sum())


def subtract_mean(values: FloatArray) -> FloatArray:
    """Subtract the mean from the values; the result is exactly zero if all are equal."""
    return values - values.mean() if np.ptp(values) > 0 else np.zeros_like(values)
