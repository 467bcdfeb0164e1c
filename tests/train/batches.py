"""Random attempts and batches for the small models of these tests."""

from dataclasses import replace
from random import Random

from ramify.trace import Annotation, build_forest
from ramify.train.batch import Batch, pack_forests
from tests.support.forests import Attempt, Planned
from tests.train.models import VOCAB


def build_attempt(rng: Random, name: str, parents: list[int], temperature: float = 1.0, tokens: int = 10) -> Attempt:
    """Build a random attempt in which roots are prompts and all other nodes are sampled.

    Advantages, ce and (at temperature 1) ref_kl and kl are mixed.
    """
    nodes: list[Planned] = []
    for parent in parents:
        ids = tuple(rng.randrange(VOCAB) for _ in range(tokens))
        logprobs = tuple(rng.uniform(-5.0, -0.1) for _ in range(tokens - 2))
        nodes.append(Planned(parent, ids) if parent < 0 else Planned(parent, ids, (2, tokens), logprobs))
    annotations = tuple(
        Annotation(
            name,
            node,
            advantage=rng.choice([-1.0, 0.5, 2.0]),
            ce=rng.choice([0.0, 0.1]),
            ref_kl=0.2 if temperature == 1 else 0.0,
            ref_logprobs=-3.0,
            kl=0.1 if temperature == 1 else 0.0,
        )
        for node, parent in enumerate(parents)
        if parent >= 0
    )
    return Attempt(name, tuple(nodes), annotations, temperature)


def build_group(rng: Random, count: int, parents: list[int], tokens: int = 10) -> list[Attempt]:
    """Build attempts at one prompt whose first replies start with the same tokens; their temperatures differ."""
    first = build_attempt(rng, "a0", parents, tokens=tokens)
    attempts = [first]
    for index in range(1, count):
        other = build_attempt(rng, f"a{index}", parents, (1.0, 0.7)[index % 2], tokens)
        shared = first.nodes[1].tokens[: tokens // 2] + other.nodes[1].tokens[tokens // 2 :]
        nodes = (first.nodes[0], replace(other.nodes[1], tokens=shared), *other.nodes[2:])
        attempts.append(replace(other, nodes=nodes))
    return attempts


def random_batches(count: int, pack_tokens: int = 128) -> list[Batch]:
    """Build batches of unequal trees: some steps have one small tree, some have several large ones."""
    batches = []
    for step in range(count):
        rng = Random(step)
        groups = [build_group(rng, rng.randint(1, 5), [-1, 0, 1, 0]) for _ in range(rng.randint(1, 3))]
        forests = [build_forest([attempt.sample() for attempt in group]) for group in groups]
        batches.append(Batch.from_packs(step, pack_forests(forests, pack_tokens)))
    return batches
