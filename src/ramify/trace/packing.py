"""Packs trees into token sequences, and assigns the packs to ranks."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ramify.trace.columns import Int32Array, StructuredArray, concat_ranges
from ramify.trace.forest import Forest, concat_forests, make_padding_forest


def split_forest(forest: Forest, max_tokens: int) -> list[Forest]:
    """Return pieces of at most `max_tokens` tokens that together hold every target exactly once.

    A piece is a union of complete root-to-leaf paths, so every target keeps its full context; context that pieces share
    is repeated without targets. A subtree that fits is never split; the subtrees of a larger one are grouped in
    depth-first order, in which neighbours share the longest paths. All targets of one model call are in one piece: the
    first that holds the call's last token. A single path with more than `max_tokens` tokens becomes its own piece.
    """
    if len(forest) <= max_tokens:
        return [forest] if len(forest) else []
    segments = forest.segments
    sizes = segments["depth"] + forest.subtree_end[segments["start"]] - segments["start"]  # with the path above
    pieces = _group_neighbours(segments, sizes, _find_fitting_subtrees(segments, sizes, max_tokens), max_tokens)
    piece_of_segment = np.full(len(segments) + 1, -1, np.int32)
    for piece, subtrees in enumerate(pieces):
        for root in subtrees:
            piece_of_segment[root : int(segments["subtree_stop"][root])] = piece
    # A segment above the subtrees belongs to the piece of its first subtree.
    for segment in np.flatnonzero(piece_of_segment[:-1] < 0)[::-1].tolist():
        piece_of_segment[segment] = piece_of_segment[segment + 1]
    calls = _assign_calls(forest, piece_of_segment, len(pieces))
    first, *others = (
        forest.select(_build_segment_mask(segments, subtrees), indices)
        for subtrees, indices in zip(pieces, calls, strict=True)
    )
    first = replace(first, flat_tokens=forest.flat_tokens, unique_tokens=forest.unique_tokens, dropped=forest.dropped)
    return [first, *others]


def _find_fitting_subtrees(segments: StructuredArray, sizes: Int32Array, max_tokens: int) -> list[int]:
    """Return the roots of the largest subtrees that fit together with the path above them, in depth-first order."""
    subtrees: list[int] = []
    fits, stops = (sizes <= max_tokens).tolist(), segments["subtree_stop"].tolist()
    segment = 0
    while segment < len(segments):
        if fits[segment] or stops[segment] == segment + 1:
            subtrees.append(segment)
            segment = stops[segment]
        else:
            segment += 1
    return subtrees


def _group_neighbours(
    segments: StructuredArray, sizes: Int32Array, subtrees: list[int], max_tokens: int
) -> list[list[int]]:
    """Group adjacent subtrees of one tree into pieces, as long as they fit."""
    pieces: list[list[int]] = []
    size = 0
    for root in subtrees:
        added = int(sizes[root])
        shared = _shared_path_length(segments, pieces[-1][-1], root) if pieces else 0
        if shared and size + added - shared <= max_tokens:
            pieces[-1].append(root)
            size += added - shared
        else:
            pieces.append([root])
            size = added
    return pieces


def _shared_path_length(segments: StructuredArray, left: int, right: int) -> int:
    """Return the number of tokens that the paths above two subtrees share."""
    ancestor = int(segments["parent"][right])
    while ancestor > left or (ancestor >= 0 and int(segments["subtree_stop"][ancestor]) <= left):
        ancestor = int(segments["parent"][ancestor])
    return int(segments["depth"][ancestor] + segments["length"][ancestor]) if ancestor >= 0 else 0


def _build_segment_mask(segments: StructuredArray, subtrees: list[int]) -> npt.NDArray[np.bool_]:
    """Return the mask of the segments of a piece: its subtrees and the paths above them."""
    mask = np.zeros(len(segments), bool)
    for root in subtrees:
        mask[root : int(segments["subtree_stop"][root])] = True
        ancestor = int(segments["parent"][root])
        while ancestor >= 0 and not mask[ancestor]:
            mask[ancestor] = True
            ancestor = int(segments["parent"][ancestor])
    return mask


def _assign_calls(forest: Forest, piece_of_segment: Int32Array, num_pieces: int) -> list[Int32Array]:
    """Return the model calls of each piece: a call belongs to the piece of its last token."""
    targets = forest.targets
    last_targets = np.searchsorted(targets.call, np.arange(len(forest.calls)), "right") - 1
    last_segments = np.searchsorted(forest.segments["start"], targets.token_index[last_targets], "right") - 1
    piece = piece_of_segment[last_segments]
    by_piece = np.argsort(piece, kind="stable").astype(np.int32)
    return np.split(by_piece, np.searchsorted(piece[by_piece], np.arange(1, num_pieces)))


def pack_trees(trees: Sequence[Forest], max_tokens: int, pad_to_multiple: int = 1) -> list[Forest]:
    """Return packs of at most `max_tokens` tokens that hold each tree once; a larger tree gets a pack of its own.

    Trees are placed by best fit, the largest first. Packs are padded to a multiple of `pad_to_multiple`, but not beyond
    `max_tokens`.
    """
    packs: list[list[int]] = []
    free_space: list[tuple[int, int]] = []  # (free tokens, pack), sorted
    for tree in sorted(range(len(trees)), key=lambda i: -len(trees[i])):
        size = len(trees[tree])
        best = bisect_left(free_space, (size, -1))
        if best < len(free_space):
            free, pack = free_space.pop(best)
        else:
            free, pack = max_tokens, len(packs)
            packs.append([])
        packs[pack].append(tree)
        insort(free_space, (free - size, pack))
    return [_build_pack([trees[i] for i in sorted(pack)], max_tokens, pad_to_multiple) for pack in packs]


def _build_pack(trees: list[Forest], max_tokens: int, pad_to_multiple: int) -> Forest:
    size = sum(len(tree) for tree in trees)
    padding = -size % pad_to_multiple if size > max_tokens else min(-size % pad_to_multiple, max_tokens - size)
    return concat_forests([*trees, make_padding_forest(padding)] if padding else trees)


def balance_packs(costs: npt.ArrayLike, num_ranks: int) -> Int32Array:
    """Assign packs to ranks. The result [rank, round] holds pack numbers, -1 where the rank computes padding.

    Ranks synchronize, so all run the same number of rounds. Sort the packs by cost and assign them in rounds of one
    pack per rank: this needs the fewest rounds, and the packs of a round cost about the same. If a few heavy packs make
    the ranks uneven, assign the packs one by one instead and fill up with padding.
    """
    cost = np.asarray(costs, np.float64)
    num_rounds = -(-len(cost) // num_ranks)
    rounds = np.full(num_rounds * num_ranks, -1, np.int32)
    rounds[: len(cost)] = np.argsort(-cost, kind="stable")
    single_packs = np.full((len(cost), num_ranks), -1, np.int32)
    single_packs[:, 0] = np.arange(len(cost))
    by_rounds = _assign_by_differencing(cost, rounds.reshape(num_rounds, num_ranks))
    one_by_one = _assign_by_differencing(cost, single_packs)
    loads = [np.bincount(rank, cost, num_ranks).max(initial=0.0) for rank in (by_rounds, one_by_one)]
    rank = by_rounds if loads[0] <= 1.01 * loads[1] else one_by_one
    order = np.lexsort((-cost, rank))  # by rank, heaviest first
    counts = np.bincount(rank, minlength=num_ranks)
    table = np.full((num_ranks, int(counts.max())), -1, np.int32)
    table[rank[order], concat_ranges(np.zeros(num_ranks, np.int32), counts)] = order
    return table


def _assign_by_differencing(costs: npt.NDArray[np.float64], rounds: Int32Array) -> Int32Array:
    """Return the rank of each pack by the largest differencing method; packs of one round get different ranks.

    Repeatedly merge the two most uneven rounds, the heaviest sum of one with the lightest of the other, until one is
    left. Then undo the merges in reverse order: each determines the ranks of the two rounds that it merged.
    """
    num_ranks = rounds.shape[1]
    weights = np.append(costs, 0.0)[rounds]  # -1 means no pack, at no cost
    order_in_round = np.argsort(weights, axis=1, kind="stable")
    sums = np.take_along_axis(weights, order_in_round, axis=1)
    heap = [(float(row[0] - row[-1]), number, row) for number, row in enumerate(sums)]
    heapq.heapify(heap)
    merges: list[tuple[int, int, npt.NDArray[np.intp]]] = []
    while len(heap) > 1:
        (_, left, heavy), (_, right, light) = heapq.heappop(heap), heapq.heappop(heap)
        merged = heavy + light[::-1]
        order = np.argsort(merged)
        merged = merged[order]
        heapq.heappush(heap, (float(merged[0] - merged[-1]), len(rounds) + len(merges), merged))
        merges.append((left, right, order))
    ranks = np.empty((len(rounds) + len(merges), num_ranks), np.int32)  # of the sums of each round, lightest first
    ranks[-1:] = np.arange(num_ranks)
    for number in reversed(range(len(merges))):
        left, right, order = merges[number]
        ranks[left, order] = ranks[len(rounds) + number]
        ranks[right] = ranks[left, ::-1]
    rank_of_pack = np.empty(len(costs) + 1, np.int32)
    rank_of_pack[np.take_along_axis(rounds, order_in_round, axis=1)] = ranks[: len(rounds)]
    return rank_of_pack[:-1]
