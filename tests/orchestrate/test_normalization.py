"""The loss of a batch with each normalization, as its formula has it, whatever else is in the batch."""

import numpy as np
import pytest

from ramify.orchestrate.batches import BatchGroup, LossNormalization, encode_batch, normalize_groups, rebuild_forests
from ramify.trace import Annotation
from tests.support.traces import make_trace, refuse_top_logprobs


def build_groups(normalization: LossNormalization, source: str = "a", first: int = 0):
    """Two groups of two rollouts of 1 to 5 tokens, with their forests and traces."""
    groups, traces = [], {}
    for number, lengths in ((first, (1, 3)), (first + 1, (5, 2))):
        annotations = []
        for attempt, length in enumerate(lengths):
            name = f"{number}.{attempt}"
            traces[name] = [make_trace(name, 1.0, range(10 * attempt + 10, 10 * attempt + 10 + length))]
            annotations.append(Annotation(name, 1, advantage=1.0, rl=0.5))
        rollout_ids = tuple(f"{number}.{attempt}" for attempt in range(2))
        groups.append(BatchGroup(number, source, 1.0, rollout_ids, tuple(annotations), normalization))
    forests = [group.build_forest([traces[name][0] for name in group.rollout_ids], None) for group in groups]
    return groups, forests, traces


def weights_by_rollout(forests) -> dict[str, list[float]]:
    return {
        name: forest.targets.rl[forest.expand_call_column("trace") == index].tolist()
        for forest in forests
        for index, name in enumerate(forest.traces)
    }


EXPECTED = {  # 11 tokens in 4 rollouts, each with a weight of 0.5
    LossNormalization(): {"0.0": 0.5, "0.1": 0.5, "1.0": 0.5, "1.1": 0.5},
    LossNormalization("sequence"): {"0.0": 11 / 8, "0.1": 11 / 24, "1.0": 11 / 40, "1.1": 11 / 16},
    LossNormalization("fixed", 8): dict.fromkeys(("0.0", "0.1", "1.0", "1.1"), 11 / 64),
}


@pytest.mark.parametrize("normalization", EXPECTED)
def test_weights_have_the_factor_of_their_normalization(normalization):
    groups, forests, traces = build_groups(normalization)
    expected = EXPECTED[normalization]
    normalized = normalize_groups(groups, forests)
    assert {name: values[0] for name, values in weights_by_rollout(normalized).items()} == pytest.approx(expected)
    rebuilt = rebuild_forests(
        encode_batch(0, list(zip(groups, normalized)), None), traces.__getitem__, refuse_top_logprobs
    )
    assert weights_by_rollout(rebuilt) == weights_by_rollout(normalized)


def test_another_source_does_not_change_the_factors():
    groups, forests, _ = build_groups(LossNormalization("sequence"))
    others, other_forests, _ = build_groups(LossNormalization(), "b", first=2)
    mixed = normalize_groups([*others, *groups], [*other_forests, *forests])
    assert weights_by_rollout(mixed[2:]) == weights_by_rollout(normalize_groups(groups, forests))
    assert all(np.array_equal(a.targets.rl, b.targets.rl) for a, b in zip(mixed, other_forests))
