"""The batch of a training step: formed once, packed, and split across ranks.

Whoever forms a batch sees all of it, so N_c, the number of entries of each component on all ranks, is fixed there and
travels with every share. A rank then needs nothing from the others: it runs its packs, and gradients are summed. All
shares have the same number of packs, because the ranks run collectives in every pack; a rank without work runs a filler
pack. Importable without torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ramify.model.pack_layout import PackLayout
from ramify.trace import Forest, balance_packs, concat_forests, make_padding_forest, pack_trees, split_forest
from ramify.trace.forest import LOSS_COMPONENTS, START_LOGPROB

START_REFERENCE_COUNT = "start_reference"  # the count of entries whose reference logprob the trainer computes
FILLER_TOKENS = 128  # length of a pack that trains nothing


@dataclass(slots=True, frozen=True, eq=False)
class Batch:
    """The input of one step on one rank."""

    step: int  # counted from 0; training on it makes the weights of step + 1
    packs: Sequence[Forest]  # the packs of this rank
    entry_counts: Mapping[str, int]  # component: the number of its entries on all ranks

    @classmethod
    def from_packs(cls, step: int, packs: Sequence[Forest]) -> "Batch":
        """Build a batch that is not split across ranks."""
        return cls(step, packs, count_entries(packs))


def count_entries(forests: Sequence[Forest]) -> dict[str, int]:
    """Return the number of entries of each component in these forests, and START_REFERENCE_COUNT if it is not 0."""
    counts = [forest.count_by_component() for forest in forests]
    totals = {name: sum(count[name] for count in counts) for name in LOSS_COMPONENTS}
    num_start = sum(int(np.count_nonzero(forest.targets.ref_logprob == START_LOGPROB)) for forest in forests)
    return {**totals, START_REFERENCE_COUNT: num_start} if num_start else totals


class PackSpec(msgspec.Struct, frozen=True):
    """How a trainer wants its packs: their layout and size, and what they cost it."""

    layout: PackLayout = PackLayout.FOREST
    pack_tokens: int = 16384
    flops_per_token: float = msgspec.field(default=1.0, name="per_token")
    flops_per_pair: float = msgspec.field(default=0.0, name="per_pair")


def pack_forests(
    forests: Sequence[Forest], pack_tokens: int, layout: PackLayout = PackLayout.FOREST, *, flat: bool = False
) -> list[Forest]:
    """Pack forests into packs of about `pack_tokens` tokens that hold every target exactly once.

    If `flat`, every root-to-leaf path becomes a tree of its own: the same gradients without shared prefixes.
    """
    if layout is PackLayout.CHAINS:
        return _pack_chains([chain for forest in forests for chain in split_forest(forest, 0)], pack_tokens)
    max_tokens = 0 if flat else pack_tokens
    return pack_trees([piece for forest in forests for piece in split_forest(forest, max_tokens)], pack_tokens)


def split_across_ranks(batch: Batch, pack_spec: PackSpec, world_size: int) -> list[Batch]:
    """Return the batch of each rank: packs balanced by their cost, the same number on all ranks."""
    packs = [pack for pack in batch.packs if pack.num_tokens]
    if not packs:
        return [Batch(batch.step, [make_padding_forest(FILLER_TOKENS)], batch.entry_counts)] * world_size
    costs = [pack.flops(pack_spec.flops_per_token, pack_spec.flops_per_pair) for pack in packs]
    return [
        Batch(batch.step, [packs[i] if i >= 0 else make_padding_forest(FILLER_TOKENS) for i in row], batch.entry_counts)
        for row in balance_packs(costs, world_size).tolist()
    ]


def repack(shares: Sequence[Batch], pack_spec: PackSpec, *, flat: bool = False) -> Batch:
    """Merge all shares of a step into one batch packed by `pack_spec`; its entries and their counts do not change."""
    forests = [pack for share in shares for pack in share.packs if pack.num_tokens]
    is_too_long = any(len(forest) > pack_spec.pack_tokens for forest in forests)
    if flat or is_too_long or pack_spec.layout is PackLayout.CHAINS:
        forests = pack_forests(forests, pack_spec.pack_tokens, pack_spec.layout, flat=flat)
    return Batch(shares[0].step, forests, shares[0].entry_counts)


def _pack_chains(chains: list[Forest], pack_tokens: int) -> list[Forest]:
    """Pack chains of similar length together, as many as fit when each is padded to the longest."""
    packs: list[list[Forest]] = []
    for chain in sorted(chains, key=len, reverse=True):
        if packs and (len(packs[-1]) + 1) * len(packs[-1][0]) <= pack_tokens:
            packs[-1].append(chain)
        else:
            packs.append([chain])
    return [concat_forests(chains) for chains in packs]
