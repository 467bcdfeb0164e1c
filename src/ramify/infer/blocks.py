"""The blocks of the cache: who holds them, and which tokens they are known for.

Blocks form a tree. A child continues its parent's tokens, so the path from a root spells a prefix, and a new request
walks down the tree to find how much of its prompt is there already. There is one root for each scope (weight version
and `cache_salt`): what another version computed, or another tenant's tokens, cannot be reached from here.

A block that nobody holds stays in the tree until its memory is needed. `idle` lists such blocks in the order in which
they will be taken: least recently released first, and children before parents, because a request lets go of its last
block first. A taken block leaves the tree; children it may still have can no longer be reached and are taken in turn.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from ramify.infer.metrics import Counters
from ramify.infer.request import Request


class Block:
    """One block: its number, how many requests hold it, and its place in the tree."""

    __slots__ = ("children", "holders", "key", "number", "parent")

    def __init__(self, number: int) -> None:
        self.number = number
        self.holders = 0
        self.parent: Block | None = None
        self.key: Hashable = None
        self.children: dict[Hashable, Block] = {}


class BlockPool:
    """All blocks. Number 0 is kept back: padding writes there."""

    def __init__(self, blocks: int, block_size: int, counters: Counters, *, sharing: bool = True) -> None:
        self.size = block_size
        self.capacity = blocks - 1
        self.sharing = sharing
        self.counters = counters
        self.roots: dict[Hashable, Block] = {}
        self.idle: OrderedDict[int, Block] = OrderedDict((number, Block(number)) for number in range(1, blocks))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self.idle)

    def admit(self, request: Request, scope: Hashable, *, reserve: int, budget: int) -> bool:
        """Give a waiting request the blocks of its cached prefix and of its first chunk; False if they do not fit.

        One token at least is left to compute, since the next token comes from the last one's logits.
        """
        path = self._match(scope, request.tokens[:-1]) if self.sharing and not _needs_every_row(request) else []
        start = len(path) * self.size
        needed = self._needed(min(start + budget, len(request.tokens))) - len(path)
        if needed + sum(block.holders == 0 for block in path) + reserve > self.free:
            return False
        for block in path:
            if block.holders == 0:
                del self.idle[block.number]
            block.holders += 1
        request.blocks = path
        request.computed = start
        request.published = len(path)
        request.node = (path[-1] if path else self._root(scope)) if self.sharing else None
        self.counters.prefix_query_tokens += len(request.tokens)
        self.counters.prefix_hit_tokens += start
        self.extend(request, start + min(budget, len(request.tokens) - start))
        return True

    def extend(self, request: Request, length: int) -> bool:
        """Make room for the first `length` tokens of a running request; False, and nothing taken, if it cannot."""
        missing = self._needed(length) - len(request.blocks)
        if missing > len(self.idle):
            return False
        for _ in range(missing):
            request.blocks.append(self._take())
        return True

    def share(self, request: Request, length: int) -> None:
        """Enter the full blocks among the first `length` tokens into the tree.

        This happens when they are scheduled, before they are computed: a layer writes all keys and values of a step
        before it reads any, so a request admitted to the same step may already build on them. Where another request
        was first with the same tokens, this one shares no further: what it does not hold it cannot build on.
        """
        size, node = self.size, request.node
        if node is not None and node.number == -1:
            node = self.roots.setdefault(node.key, node)  # it may have been dropped, or be another by now
        for index in range(request.published, length // size):
            if node is None:
                break
            key = tuple(request.tokens[index * size : (index + 1) * size])
            if key in node.children:
                node = None
            else:
                block = request.blocks[index]
                block.parent, block.key = node, key
                node.children[key] = node = block
        request.node = node
        request.published = max(request.published, length // size)

    def release(self, request: Request) -> None:
        """Let go of everything a request holds; what it shared stays in the tree until its memory is needed."""
        for block in reversed(request.blocks):
            block.holders -= 1
            if block.holders == 0:
                self.idle[block.number] = block
                if block.parent is None:
                    self.idle.move_to_end(block.number, last=False)  # known for nothing: take it first
        if request.node is not None:
            self._drop_if_bare(request.node)
        request.blocks = []
        request.computed = request.published = request.tabled = 0
        request.node = None

    def forget(self, holders: Sequence[Request]) -> None:
        """Empty the tree: the weights have changed. Blocks stay with `holders`, which share no more."""
        for root in self.roots.values():
            pending = [root]
            while pending:
                block = pending.pop()
                pending.extend(block.children.values())
                self._leave(block)
        self.roots = {}
        for request in holders:
            request.node = None
            for block in request.blocks:
                self._leave(block)

    def _match(self, scope: Hashable, tokens: list[int]) -> list[Block]:
        node = self.roots.get(scope)
        path: list[Block] = []
        for start in range(0, len(tokens) - self.size + 1, self.size):
            node = node.children.get(tuple(tokens[start : start + self.size])) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def _root(self, scope: Hashable) -> Block:
        if scope not in self.roots:
            self.roots[scope] = Block(-1)
            self.roots[scope].key = scope
        return self.roots[scope]

    def _drop_if_bare(self, root: Block) -> None:
        """Forget a root that leads nowhere: there may be a scope for every request."""
        if root.number == -1 and not root.children and self.roots.get(root.key) is root:
            del self.roots[root.key]

    def _take(self) -> Block:
        _, block = self.idle.popitem(last=False)
        if block.parent is not None:
            self.counters.evictions += 1
            parent = block.parent
            if parent.children.get(block.key) is block:
                del parent.children[block.key]
            self._drop_if_bare(parent)
        self._leave(block)
        block.holders = 1
        return block

    def _needed(self, length: int) -> int:
        return -(-length // self.size)

    @staticmethod
    def _leave(block: Block) -> None:
        block.parent, block.key, block.children = None, None, {}


def _needs_every_row(request: Request) -> bool:
    return request.sampling.prompt_logprobs and len(request.prompt_logprobs) < len(request.prompt)
