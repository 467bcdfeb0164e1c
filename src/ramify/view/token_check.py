"""Checks, token by token, that what was trained is what was sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.orchestrate.batches import read_top_logprobs, rebuild_forests
from ramify.run.store import Ledger, RunStore
from ramify.trace import Forest, Trace


@dataclass(slots=True)
class TokenCheck:
    """How many batches and trained entries were compared, and what differs."""

    num_batches: int = 0
    num_entries: int = 0
    problems: list[str] = field(default_factory=list[str])


def check_trained_tokens(store: RunStore) -> TokenCheck:
    """Compare the entries of every batch of a run with the sampled tokens and logprobs of its stored traces.

    Raises DataCorrupt if a batch cannot be built from the traces any more, and ConfigInvalid without a ledger.
    """
    check = TokenCheck()
    traces: dict[str, Trace] = {}

    def read_traces(rollout_id: str) -> list[Trace]:
        rollout_traces = list(store.read_traces(rollout_id))
        traces.update({trace.id: trace for trace in rollout_traces})
        return rollout_traces

    for batch in Ledger.open_readonly(store).batches():
        traces.clear()
        for forest in rebuild_forests(batch, read_traces, lambda number: read_top_logprobs(store.path, number)):
            check.num_entries += len(forest.targets)
            check.problems += [f"step {batch.step}: {problem}" for problem in find_differing_calls(forest, traces)]
        check.num_batches += 1
    return check


def find_differing_calls(forest: Forest, traces: Mapping[str, Trace]) -> list[str]:
    """Return one line for each model call of which an entry is not what was sampled at its position."""
    problems: list[str] = []
    targets = forest.targets
    depths = _compute_depths(forest)[targets.token_index]
    is_on_policy = (targets.rl != 0) | (targets.ref_kl != 0) | (targets.kl != 0)  # others have only a cross entropy
    has_forest_token = forest.token_ids[targets.token_index] == targets.token
    bounds = np.searchsorted(targets.call, np.arange(len(forest.calls) + 1))
    for call, start, stop in zip(forest.calls, bounds, bounds[1:]):
        node = traces[forest.traces[call["trace"]]].nodes[int(call["node"])]
        entries = slice(int(start), int(stop))
        positions = depths[entries] - node.trace.graph.depth(node.index)
        on_policy = is_on_policy[entries]
        is_sampled = (
            has_forest_token[entries].all()
            and (np.diff(positions) > 0).all()
            and _has_values_at(node.token_ids, positions, targets.token[entries])
            and _has_values_at(
                node.logprobs, positions[on_policy] - node.sampled_span[0], targets.logprob[entries][on_policy]
            )
        )
        if not is_sampled:
            problems.append(f"node {node.index} of trace {node.trace.id}: its entries are not what was sampled there")
    return problems


def _compute_depths(forest: Forest) -> npt.NDArray[np.int64]:
    """Return for each token of the forest the number of tokens before it on its path."""
    segments = forest.segments
    return np.arange(forest.num_tokens) + np.repeat(segments["depth"] - segments["start"], segments["length"])


def _has_values_at(column: npt.NDArray[Any], positions: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> bool:
    """Return whether the column has these values at these positions; NaN equals nothing."""
    is_inside = (positions >= 0) & (positions < len(column))
    return bool(is_inside.all()) and np.array_equal(column[positions], values)
