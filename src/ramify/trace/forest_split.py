"""Cutting a tree that is larger than the budget.

A piece is a union of whole root-to-leaf paths, so every target keeps its full context; what pieces share is repeated,
and repeated context carries no targets. Subtrees that fit are never torn: only a segment too large for a piece is
entered, and its subtrees are then gathered in depth-first order, where neighbours share most.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ramify.trace.columns import Int32Array
from ramify.trace.forest import Forest, StructuredArray


def split_forest(forest: Forest, max_tokens: int) -> list[Forest]:
    """Pieces of at most `budget` tokens that together hold every target exactly once.

    All targets of one model call stay in one piece, in the first that holds its last token. A single path over the
    budget becomes a piece of its own.
    """
    if len(forest) <= max_tokens:
        return [forest] if len(forest) else []
    table = forest.segments
    pieces = _group_neighbours(table, _find_fitting_subtrees(table, max_tokens), max_tokens)
    owner = np.full(len(table) + 1, -1, np.int32)
    for number, units in enumerate(pieces):
        for unit in units:
            owner[unit : int(table["last"][unit])] = number
    # A segment that was entered belongs to the piece of its first subtree.
    for segment in np.flatnonzero(owner[:-1] < 0)[::-1].tolist():
        owner[segment] = owner[segment + 1]
    calls = _assign_sequences(forest, owner, len(pieces))
    first, *rest = (
        forest.select(_build_segment_mask(table, units), mine) for units, mine in zip(pieces, calls, strict=True)
    )
    return [replace(first, flat_tokens=forest.flat_tokens, dropped=forest.dropped), *rest]


def _find_fitting_subtrees(segments: StructuredArray, max_tokens: int) -> list[int]:
    """The largest subtrees that fit the budget together with the path above them, in depth-first order."""
    units: list[int] = []
    starts = np.append(segments["start"], segments["start"][-1] + segments["length"][-1])
    sizes = (segments["depth"] + starts[segments["last"]] - segments["start"]).tolist()
    last = segments["last"].tolist()
    at = 0
    while at < len(segments):
        if sizes[at] <= max_tokens or last[at] == at + 1:
            units.append(at)
            at = last[at]
        else:
            at += 1
    return units


def _group_neighbours(segments: StructuredArray, subtrees: list[int], max_tokens: int) -> list[list[int]]:
    """Neighbouring units of one tree together, as long as they fit."""
    starts = np.append(segments["start"], segments["start"][-1] + segments["length"][-1])
    pieces: list[list[int]] = []
    size = 0
    for unit in subtrees:
        depth = int(segments["depth"][unit])
        own = int(starts[segments["last"][unit]] - segments["start"][unit])
        shared = _shared_path_length(segments, pieces[-1][-1], unit) if pieces else 0
        if shared and size + own + depth - shared <= max_tokens:
            pieces[-1].append(unit)
            size += own + depth - shared
        else:
            pieces.append([unit])
            size = own + depth
    return pieces


def _shared_path_length(segments: StructuredArray, left: int, right: int) -> int:
    """Tokens on the path that two subtrees hang from in common."""
    above = int(segments["parent"][right])
    while above > left or (above >= 0 and int(segments["last"][above]) <= left):
        above = int(segments["parent"][above])
    return int(segments["depth"][above] + segments["length"][above]) if above >= 0 else 0


def _build_segment_mask(segments: StructuredArray, subtrees: list[int]) -> npt.NDArray[np.bool_]:
    """The segments of a piece: its subtrees and the paths above them."""
    chosen = np.zeros(len(segments), bool)
    for unit in subtrees:
        chosen[unit : int(segments["last"][unit])] = True
        above = int(segments["parent"][unit])
        while above >= 0 and not chosen[above]:
            chosen[above] = True
            above = int(segments["parent"][above])
    return chosen


def _assign_sequences(forest: Forest, piece_of_segment: Int32Array, num_pieces: int) -> list[Int32Array]:
    """For each piece which model calls are its own: a call follows its last token."""
    last = forest.targets.token_index[
        np.searchsorted(forest.targets.sequence, np.arange(len(forest.sequences)), "right") - 1
    ]
    piece = piece_of_segment[np.searchsorted(forest.segments["start"], last, "right") - 1]
    by_piece = np.argsort(piece, kind="stable").astype(np.int32)
    return np.split(by_piece, np.searchsorted(piece[by_piece], np.arange(1, num_pieces)))
