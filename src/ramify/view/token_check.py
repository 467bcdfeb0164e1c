"""Checks that what was trained is what was sampled: the first promise of a run, token by token."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ramify.orchestrate.batches import rebuild_forests
from ramify.store import Ledger, RunStore
from ramify.trace import Forest, Trace


@dataclass(slots=True)
class TokenCheck:
    """How many batches and trained entries were compared, and what differs."""

    num_batches: int = 0
    num_entries: int = 0
    problems: list[str] = field(default_factory=list[str])


def check_trained_tokens(store: RunStore) -> TokenCheck:
    """Compare the entries of every batch of a run with the sampled tokens and logprobs of its stored traces.

    Raises BatchCorrupt if a batch cannot be built from the traces any more, and ConfigInvalid without a ledger.
    """
    check = TokenCheck()
    traces: dict[str, Trace] = {}

    def read_traces(rollout_id: str) -> list[Trace]:
        rollout_traces = list(store.read_traces(rollout_id))
        traces.update({trace.id: trace for trace in rollout_traces})
        return rollout_traces

    for batch in Ledger.open_readonly(store).batches():
        traces.clear()
        for forest in rebuild_forests(batch, read_traces):
            check.num_entries += len(forest.targets)
            check.problems += [f"step {batch.step}: {problem}" for problem in _compare(forest, traces)]
        check.num_batches += 1
    return check


def _compare(forest: Forest, traces: Mapping[str, Trace]) -> list[str]:
    """Return one line for each model call whose entries are not tokens that the policy sampled in it."""
    problems: list[str] = []
    targets = forest.targets
    bounds = np.searchsorted(targets.call, np.arange(len(forest.calls) + 1))
    for call, start, stop in zip(forest.calls, bounds, bounds[1:]):
        node = traces[forest.traces[call["trace"]]].nodes[int(call["node"])]
        entries = slice(int(start), int(stop))
        on_policy = np.isfinite(targets.logprob[entries])  # entries with only a cross entropy need not be sampled
        first, last = node.sampled_span
        sampled = set(zip(node.token_ids[first:last].tolist(), node.logprobs.tolist()))
        trained = zip(targets.token[entries][on_policy].tolist(), targets.logprob[entries][on_policy].tolist())
        is_laid_out = np.array_equal(forest.token_ids[targets.token_index[entries]], targets.token[entries])
        if not is_laid_out or any(entry not in sampled for entry in trained):
            problems.append(f"node {node.index} of trace {node.trace.id} has entries that were not sampled there")
    return problems
