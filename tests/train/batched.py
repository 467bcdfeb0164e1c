"""Random batches for the small models of these tests."""

from random import Random

from ramify.trace import build_forest
from ramify.train.batch import Batch, pack_forests
from tests.train.test_gradients import merged


def random_batches(count: int, budget: int = 128) -> list[Batch]:
    """Batches of unequal trees: some steps have one small tree, some have several large ones."""
    found = []
    for step in range(count):
        rng = Random(step)
        groups = [merged(rng, rng.randint(1, 5), [-1, 0, 1, 0]) for _ in range(rng.randint(1, 3))]
        forests = [build_forest([each.sample() for each in attempts]) for attempts in groups]
        found.append(Batch.from_packs(step, pack_forests(forests, budget)))
    return found
