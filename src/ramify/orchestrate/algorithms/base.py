"""What an algorithm implements: one of two hooks.

`advantages` is enough for most: rewards of comparable rollouts in, one number for each out. `annotate` is for those
that say more: other weights, values per token, tokens the policy did not sample, reference logprobs.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ramify.config import Config
from ramify.errors import TraceInvalid
from ramify.trace import Annotation, Trace

FloatArray = npt.NDArray[np.float64]


class AlgorithmConfig(Config):
    """What every algorithm can be told."""

    id: str = "grpo"


class Algorithm:
    """Turns a scored group into annotations. Stateless: the same group gives the same annotations."""

    config: AlgorithmConfig

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    def advantages(self, rewards: FloatArray, traces: Sequence[Trace]) -> FloatArray:
        """How much better each rollout was than expected, one number each.

        The traces are those of one agent in all attempts at one task; `rewards` are theirs, in the same order.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define `advantages`, or `annotate`")

    def annotate(self, group: Sequence[Trace]) -> list[Annotation]:
        """What is trained of a group, and how much: by default all that the policy sampled, each trace alike.

        A group holds the traces of every agent of every attempt that is left, each with its reward. A token without an
        annotation is context. Whole weights are the trainer's business: it divides by the entries of the batch.
        """
        agents: defaultdict[str, list[Trace]] = defaultdict(list)
        for trace in group:
            agents[trace.agent].append(trace)
        found: list[Annotation] = []
        for traces in agents.values():
            numbers = self.advantages(_collect_rewards(traces), traces)
            for trace, advantage in zip(traces, numbers.tolist(), strict=True):
                found += [Annotation(trace.id, node, advantage=advantage) for node in get_trainable_nodes(trace)]
        return found


def get_trainable_nodes(trace: Trace) -> list[int]:
    """The nodes that the policy sampled, not another model."""
    trainable = trace.graph.nodes.view["trainable"]
    return [node for node in trace.sampled_nodes if trainable[node]]


def count_sampled_tokens(trace: Trace) -> int:
    """How many tokens the policy sampled."""
    table = trace.graph.nodes.view
    return int(((table["sampled_stop"] - table["sampled_start"]) * (table["trainable"] != 0)).sum())


def subtract_mean(values: FloatArray) -> FloatArray:
    """The values without their mean; exactly zero where all are equal."""
    return values - values.mean() if np.ptp(values) > 0 else np.zeros_like(values)


def _collect_rewards(traces: Sequence[Trace]) -> FloatArray:
    missing = [trace.id for trace in traces if trace.reward is None]
    if missing:
        raise TraceInvalid(f"traces {missing} lack a reward: they cannot be compared with the others of their group")
    return np.array([trace.reward for trace in traces], np.float64)
