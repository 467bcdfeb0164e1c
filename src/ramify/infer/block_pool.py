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

from ramify.infer.metrics import EngineCounters
from ramify.infer.request import EngineRequest


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

    def __init__(
        self, num_blocks: int, block_size: int, counters: EngineCounters, *, enable_prefix_cache: bool = True
    ) -> None:
        self.block_size = block_size
        self.num_usable_blocks = num_blocks - 1
        self.enable_prefix_cache = enable_prefix_cache
        self.counters = counters
        self.roots: dict[Hashable, Block] = {}
        self.free_blocks: OrderedDict[int, Block] = OrderedDict(
            (number, Block(number)) for number in range(1, num_blocks)
        )

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self.free_blocks)

    def allocate(self, request: EngineRequest, scope: Hashable, *, reserved_blocks: int, token_budget: int) -> bool:
        """Give a waiting request the blocks of its cached prefix and of its first chunk; False if they do not fit.

        One token at least is left to compute, since the next token comes from the last one's logits.
        """
        path = (
            self._match_prefix(scope, request.token_ids[:-1])
            if self.enable_prefix_cache and not _needs_prompt_logprobs(request)
            else []
        )
        start = len(path) * self.block_size
        needed = self._num_blocks_for(min(start + token_budget, len(request.token_ids))) - len(path)
        if needed + sum(block.holders == 0 for block in path) + reserved_blocks > self.num_free_blocks:
            return False
        for block in path:
            if block.holders == 0:
                del self.free_blocks[block.number]
            block.holders += 1
        request.blocks = path
        request.num_computed_tokens = start
        request.num_shared_blocks = len(path)
        request.cache_node = (
            (path[-1] if path else self._get_or_create_root(scope)) if self.enable_prefix_cache else None
        )
        self.counters.prefix_query_tokens += len(request.token_ids)
        self.counters.prefix_hit_tokens += start
        self.allocate_slots(request, start + min(token_budget, len(request.token_ids) - start))
        return True

    def allocate_slots(self, request: EngineRequest, num_tokens: int) -> bool:
        """Make room for the first `length` tokens of a running request; False, and nothing taken, if it cannot."""
        missing = self._num_blocks_for(num_tokens) - len(request.blocks)
        if missing > len(self.free_blocks):
            return False
        for _ in range(missing):
            request.blocks.append(self._pop_free_block())
        return True

    def cache_full_blocks(self, request: EngineRequest, num_tokens: int) -> None:
        """Enter the full blocks among the first `length` tokens into the tree.

        This happens when they are scheduled, before they are computed: a layer writes all keys and values of a step
        before it reads any, so a request admitted to the same step may already build on them. Where another request
        was first with the same tokens, this one shares no further: what it does not hold it cannot build on.
        """
        size, node = self.block_size, request.cache_node
        if node is not None and node.number == -1:
            node = self.roots.setdefault(node.key, node)  # it may have been dropped, or be another by now
        for index in range(request.num_shared_blocks, num_tokens // size):
            if node is None:
                break
            key = tuple(request.token_ids[index * size : (index + 1) * size])
            if key in node.children:
                node = None
            else:
                block = request.blocks[index]
                block.parent, block.key = node, key
                node.children[key] = node = block
        request.cache_node = node
        request.num_shared_blocks = max(request.num_shared_blocks, num_tokens // size)

    def free(self, request: EngineRequest) -> None:
        """Let go of everything a request holds; what it shared stays in the tree until its memory is needed."""
        for block in reversed(request.blocks):
            block.holders -= 1
            if block.holders == 0:
                self.free_blocks[block.number] = block
                if block.parent is None:
                    self.free_blocks.move_to_end(block.number, last=False)  # known for nothing: take it first
        if request.cache_node is not None:
            self._drop_empty_root(request.cache_node)
        request.blocks = []
        request.num_computed_tokens = request.num_shared_blocks = request.block_table_len = 0
        request.cache_node = None

    def reset_prefix_cache(self, running_requests: Sequence[EngineRequest]) -> None:
        """Empty the tree: the weights have changed. Blocks stay with `holders`, which share no more."""
        for root in self.roots.values():
            pending = [root]
            while pending:
                block = pending.pop()
                pending.extend(block.children.values())
                self._detach(block)
        self.roots = {}
        for request in running_requests:
            request.cache_node = None
            for block in request.blocks:
                self._detach(block)

    def _match_prefix(self, scope: Hashable, token_ids: list[int]) -> list[Block]:
        node = self.roots.get(scope)
        path: list[Block] = []
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            node = node.children.get(tuple(token_ids[start : start + self.block_size])) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def _get_or_create_root(self, scope: Hashable) -> Block:
        if scope not in self.roots:
            self.roots[scope] = Block(-1)
            self.roots[scope].key = scope
        return self.roots[scope]

    def _drop_empty_root(self, root: Block) -> None:
        """Forget a root that leads nowhere: there may be a scope for every request."""
        if root.number == -1 and not root.children and self.roots.get(root.key) is root:
            del self.roots[root.key]

    def _pop_free_block(self) -> Block:
        _, block = self.free_blocks.popitem(last=False)
        if block.parent is not None:
            self.counters.evictions += 1
            parent = block.parent
            if parent.children.get(block.key) is block:
                del parent.children[block.key]
            self._drop_empty_root(parent)
        self._detach(block)
        block.holders = 1
        return block

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @staticmethod
    def _detach(block: Block) -> None:
        block.parent, block.key, block.children = None, None, {}


def _needs_prompt_logprobs(request: EngineRequest) -> bool:
    return request.sampling_params.prompt_logprobs and len(request.prompt_logprobs) < len(request.prompt_token_ids)
