"""The segments of a pack, as layers with a state read them.

A recurrent layer or a convolution reads tokens from left to right. Over a forest it reads segments: the first token of
a segment continues from the state after the last token of its parent, which all children of the parent share. In the
backward pass their gradients of that state are added. Importable without torch.
"""

from dataclasses import dataclass

import numpy as np

from ramify.trace import Forest
from ramify.trace.columns import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class ForestSegments:
    """Runs of tokens without forks, in the order of the pack; together they hold every token of it once.

    A segment has no child or at least two, so segments are as long as they can be. A run of padding is a root.
    """

    start: Int32Array  # [segments] index of the first token
    stop: Int32Array  # [segments] index after the last token
    parent: Int32Array  # [segments] -1 for a root; a parent comes before its children

    def __len__(self) -> int:
        return len(self.start)

    @classmethod
    def from_forest(cls, forest: Forest) -> "ForestSegments":
        """Merge the segments of a forest that do not fork, and add its padding."""
        table = forest.segments
        num_children = np.bincount(table["parent"][table["parent"] >= 0], minlength=len(table))
        is_first = np.append(num_children, 0)[table["parent"]] != 1  # an only child continues the segment above it
        is_last = np.append(is_first[1:], True)[: len(table)]
        merged_index = np.append(np.cumsum(is_first) - 1, -1)
        parent = merged_index[table["parent"][is_first]]
        start, stop = table["start"][is_first], (table["start"] + table["length"])[is_last]
        gap_start, gap_stop = np.append(0, stop), np.append(start, len(forest))
        is_gap = gap_start < gap_stop
        starts = np.concatenate([start, gap_start[is_gap]])
        order = np.argsort(starts, kind="stable")
        new_index = np.append(np.argsort(order), -1)
        stops = np.concatenate([stop, gap_stop[is_gap]])
        parents = np.concatenate([new_index[parent], np.full(np.count_nonzero(is_gap), -1)])
        return cls(*(array[order].astype(np.int32) for array in (starts, stops, parents)))
