"""Splits a tree that has too many tokens for one pack.

A piece is a union of complete root-to-leaf paths, so every target keeps its full context. Context that several pieces
share is repeated, and repeated context carries no targets. A subtree that fits is never split; the subtrees of a larger
one are grouped in depth-first order, in which neighbours share the longest paths.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ramify.trace.columns import Int32Array, StructuredArray
from ramify.trace.forest import Forest


def split_forest(forest: Forest, max_tokens: int) -> list[Forest]:
    """Return pieces of at most `max_tokens` tokens that together hold every target exactly once.

    All targets of one model call are in one piece: the first that holds the call's last token. A single path with more
    than `max_tokens` tokens becomes its own piece.
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
    return [replace(first, flat_tokens=forest.flat_tokens, dropped=forest.dropped), *others]


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
