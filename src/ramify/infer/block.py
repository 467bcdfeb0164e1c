"""One block of the key-value cache, as a node in the tree of cached prefixes."""

from collections.abc import Hashable


class Block:
    """One block: its id, the number of requests that hold it, and its place in the tree."""

    __slots__ = ("block_id", "children", "parent", "ref_count", "token_key")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.parent: Block | None = None
        self.token_key: Hashable = None
        self.children: dict[Hashable, Block] = {}
