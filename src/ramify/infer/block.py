"""One block of the key-value cache, as a node in the tree of cached prefixes."""

from collections.abc import Hashable


class Block:
    """One block: its id, the number of requests that hold it, and its place in the tree."""

    __slots__ = ("block_id", "children", "parent", "ref_count", "token_key")

    def __init__(self, block_id: int, token_key: Hashable = None) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.parent: Block | None = None
        self.token_key = token_key
        self.children: dict[Hashable, Block] = {}

    def detach(self) -> None:
        """Forget the place in the tree."""
        self.parent, self.token_key, self.children = None, None, {}
