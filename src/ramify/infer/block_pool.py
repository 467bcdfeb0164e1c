"""The blocks of the KV cache: which requests hold them, and which tokens they are cached for.

Cached blocks form a tree. A child continues its parent's tokens, so the path from a root is a prefix, and a new request
walks down the tree to find how much of its prompt is cached. There is one root for each scope (weight version and
`cache_salt`): what another version has computed, or another tenant's tokens, cannot be reached from it.

A block that no request holds stays in the tree until its memory is needed. `free_blocks` lists such blocks in the order
of eviction: least recently freed first, and children before parents, because a request frees its last block first. An
evicted block leaves the tree; its remaining children can no longer be reached and are evicted in turn.

If the model has recurrent layers (`states`), a cached prefix is usable up to the last block with a snapshot of the
state. A snapshot is taken after the step in which a request computes the last token of a full block. A request whose
prompt continues such a block waits for the next step.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from ramify.infer.metrics import EngineCounters
from ramify.infer.request import NO_STATE_SLOT, Block, EngineRequest

if TYPE_CHECKING:
    from ramify.model.kernels.state_pool import StatePool


class StateSlots:
    """Which request or snapshot has which slot of the recurrent states; the slots of running requests come first.

    A snapshot is a copy of a request's state at the end of a cached block, and ends with it. Unlike keys and values, a
    state cannot be cut at an earlier token, so a request can continue a cached prefix only after a block with a
    snapshot. A new snapshot takes the slot of the least recently used one.
    """

    def __init__(self, memory: "StatePool", num_requests: int, num_snapshots: int, counters: EngineCounters) -> None:
        self.memory, self.counters = memory, counters
        self.request_slots = list(range(num_requests))
        self.snapshot_slots = list(range(num_requests, num_requests + num_snapshots))
        self.snapshots: OrderedDict[Block, int] = OrderedDict()  # least recently used first

    def acquire(self, request: EngineRequest, last_block: Block | None) -> None:
        """Give a request a slot, with the snapshot of the last block of its cached prefix."""
        request.state_slot = self.request_slots.pop()
        if last_block is None:
            self.memory.clear(request.state_slot)
        else:
            self.memory.copy(self.snapshots[last_block], request.state_slot)
            self.snapshots.move_to_end(last_block)
            self.counters.snapshot_hits += 1

    def release(self, request: EngineRequest) -> None:
        """Take the slot of a request back."""
        if request.state_slot != NO_STATE_SLOT:
            self.request_slots.append(request.state_slot)
        request.state_slot, request.reply_snapshot = NO_STATE_SLOT, None

    def has_snapshot(self, block: Block) -> bool:
        """Return whether a request can continue after a block."""
        return block in self.snapshots

    def take_snapshot(self, block: Block, request: EngineRequest, *, in_reply: bool) -> None:
        """Copy the state of a request, which ends with this block.

        Of the reply only the newest snapshot is kept: a later request continues the end of a prompt or of a reply.
        """
        if request.state_slot == NO_STATE_SLOT:
            raise AssertionError(f"request {request.arrival_index} has no state to copy")
        if in_reply:
            if request.reply_snapshot is not None:
                self.drop_snapshot(request.reply_snapshot)
            request.reply_snapshot = block
        if block in self.snapshots:
            self.snapshots.move_to_end(block)
            return
        if not self.snapshot_slots and self.snapshots:
            _, slot = self.snapshots.popitem(last=False)
            self.snapshot_slots.append(slot)
            self.counters.snapshot_evictions += 1
        if self.snapshot_slots:
            self.snapshots[block] = self.snapshot_slots.pop()
            self.memory.copy(request.state_slot, self.snapshots[block])
            self.counters.snapshots += 1

    def drop_snapshot(self, block: Block) -> None:
        """Drop the snapshot of a block, if it has one."""
        if (slot := self.snapshots.pop(block, None)) is not None:
            self.snapshot_slots.append(slot)


ROOT_ID = -1


class BlockPool:
    """All blocks. Block 0 is reserved: padding is written there."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        counters: EngineCounters,
        *,
        enable_prefix_cache: bool = True,
        states: StateSlots | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_usable_blocks = num_blocks - 1
        self.enable_prefix_cache = enable_prefix_cache
        self.counters = counters
        self.states = states
        self.due_snapshots: dict[Block, EngineRequest] = {}  # to be taken after the step that is being scheduled
        self.roots: dict[Hashable, Block] = {}
        self.free_blocks: OrderedDict[int, Block] = OrderedDict(
            (block_id, Block(block_id)) for block_id in range(1, num_blocks)
        )

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no request holds."""
        return len(self.free_blocks)

    def allocate(self, request: EngineRequest, scope: Hashable, *, reserved_blocks: int, token_budget: int) -> bool:
        """Give a waiting request the blocks of its cached prefix and first chunk; return False if they do not fit.

        Tokens whose logits are needed are computed even if they are cached; the last one always is, since the next
        token is sampled from its logits. False is also returned if a snapshot of more of its prefix is due.
        """
        path: list[Block] = []
        if self.enable_prefix_cache:
            path = self._match_prefix(scope, request)
        if self.states is not None:
            request.fork_boundary = len(path) * self.block_size
            path, beyond = self._split_at_snapshot(path, self.states)
            if any(block in self.due_snapshots for block in beyond):
                return False
        start = len(path) * self.block_size
        stop = min(start + token_budget, len(request.token_ids))
        num_new = self._num_blocks_for(stop) - len(path)
        if num_new + sum(block.ref_count == 0 for block in path) + reserved_blocks > self.num_free_blocks:
            return False
        for block in path:
            self._hold(block)
        request.blocks = path
        request.num_computed_tokens = start
        request.num_shared_blocks = len(path)
        request.cache_node = None
        if self.enable_prefix_cache:
            request.cache_node = path[-1] if path else self.roots.setdefault(scope, Block(ROOT_ID, scope))
        if self.states is not None:
            self.states.acquire(request, path[-1] if path else None)
        self.counters.prefix_query_tokens += len(request.token_ids)
        self.counters.prefix_hit_tokens += start
        self.allocate_slots(request, stop)
        return True

    def allocate_slots(self, request: EngineRequest, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens of a running request; return False, and change nothing, if
        there are too few."""
        num_new = self._num_blocks_for(num_tokens) - len(request.blocks)
        if num_new > len(self.free_blocks):
            return False
        for _ in range(num_new):
            request.blocks.append(self._pop_free_block())
        return True

    def cache_full_blocks(self, request: EngineRequest, num_tokens: int) -> None:
        """Enter the full blocks among the first `num_tokens` tokens into the tree.

        This happens when they are scheduled, before they are computed: a layer writes all keys and values of a step
        before it reads any, so a request admitted to the same step may already use them. If another request already
        cached the same tokens, stop caching for this one: its later blocks would be children of a block it does not
        hold. With recurrent layers it holds that block instead of its own, because requests often compute cached
        tokens again.
        """
        size, node = self.block_size, request.cache_node
        if node is not None and node.block_id == ROOT_ID:
            node = self.roots.setdefault(node.token_key, node)  # the root may have been dropped or replaced
        for index in range(request.num_shared_blocks, num_tokens // size):
            if node is None:
                break
            key = request.get_block_key(index * size, (index + 1) * size)
            cached = node.children.get(key)
            if cached is None:
                block = request.blocks[index]
                block.parent, block.token_key = node, key
                node.children[key] = node = block
            else:
                self.counters.duplicate_blocks += 1
                is_uncomputed = request.num_computed_tokens <= index * size
                node = cached if self.states is not None and is_uncomputed else None
                if node is not None:
                    self._replace_block(request, index, node)
        has_new_blocks = num_tokens // size > request.num_shared_blocks
        if self.states is not None and node is not None and has_new_blocks and num_tokens % size == 0:
            if num_tokens > request.num_computed_tokens:
                self.due_snapshots[node] = request
            elif num_tokens == request.num_computed_tokens:  # its last token was being sampled when it was scheduled
                self._take_snapshot(node, request, self.states)
        request.cache_node = node
        request.num_shared_blocks = max(request.num_shared_blocks, num_tokens // size)

    def take_snapshots(self) -> None:
        """Take the snapshots that are due: the step has been computed, or launched before the copies."""
        for block, request in self.due_snapshots.items():
            if self.states is not None:
                self._take_snapshot(block, request, self.states)
        self.due_snapshots.clear()

    def _take_snapshot(self, block: Block, request: EngineRequest, states: StateSlots) -> None:
        in_reply = request.num_computed_tokens > len(request.prompt_token_ids)
        states.take_snapshot(block, request, in_reply=in_reply)

    def find_chunk_end(self, request: EngineRequest, stop: int) -> int:
        """Return where a chunk ends that may have the tokens up to `stop`.

        If there are recurrent layers, it ends where a snapshot may be needed: where other requests have forked, and
        at the last full block before the last token, of the prompt and of all tokens; otherwise, if the request goes
        on, at the end of a block.
        """
        if self.states is None:
            return stop
        size, start, length = self.block_size, request.num_computed_tokens, len(request.token_ids)
        last_blocks = ((count - 1) // size * size for count in (len(request.prompt_token_ids), length))
        for boundary in (request.fork_boundary, *last_blocks):
            if start < boundary:
                stop = min(stop, boundary)
        aligned = stop // size * size
        return aligned if start < aligned and stop < length else stop

    def free(self, request: EngineRequest) -> None:
        """Free all blocks of a request; those in the tree stay there until their memory is needed."""
        for block in reversed(request.blocks):
            self._release(block)
        if self.states is not None:
            self.states.release(request)
        if request.cache_node is not None:
            self._drop_empty_root(request.cache_node)
        request.blocks = []
        request.num_computed_tokens = request.num_shared_blocks = request.block_table_len = 0
        request.cache_node = None

    def reset_prefix_cache(self, running_requests: Sequence[EngineRequest]) -> None:
        """Empty the tree: the weights have changed. `running_requests` keep their blocks, but share no more."""
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

    def _match_prefix(self, scope: Hashable, request: EngineRequest) -> list[Block]:
        node, size = self.roots.get(scope), self.block_size
        path: list[Block] = []
        for start in range(0, request.num_cacheable_tokens - size + 1, size):
            node = node.children.get(request.get_block_key(start, start + size)) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def _split_at_snapshot(self, path: list[Block], states: StateSlots) -> tuple[list[Block], list[Block]]:
        """Split a cached prefix after the last block with a snapshot."""
        usable = next((count for count in range(len(path), 0, -1) if states.has_snapshot(path[count - 1])), 0)
        return path[:usable], path[usable:]

    def _replace_block(self, request: EngineRequest, index: int, cached: Block) -> None:
        """Let a request use a cached block with the same tokens instead of its own, which it has not computed yet.

        It computes the tokens all the same, for its recurrent state, and writes the keys and values that are there.
        """
        self._hold(cached)
        self._release(request.blocks[index])
        request.blocks[index] = cached
        request.block_table_len = min(request.block_table_len, index)

    def _hold(self, block: Block) -> None:
        if block.ref_count == 0:
            del self.free_blocks[block.block_id]
        block.ref_count += 1

    def _release(self, block: Block) -> None:
        block.ref_count -= 1
        if block.ref_count == 0:
            self.free_blocks[block.block_id] = block
            if block.parent is None:
                self.free_blocks.move_to_end(block.block_id, last=False)  # not cached: evict it first

    def _detach(self, block: Block) -> None:
        """Take a block out of the tree, and with it its snapshot."""
        if self.states is not None:
            self.states.drop_snapshot(block)
        block.detach()

    def _drop_empty_root(self, root: Block) -> None:
        """Remove a root without children: there may be a scope for every request."""
        if root.block_id == ROOT_ID and not root.children and self.roots.get(root.token_key) is root:
            del self.roots[root.token_key]

    def _pop_free_block(self) -> Block:
        _, block = self.free_blocks.popitem(last=False)
        if block.parent is not None:
            self.counters.evictions += 1
            parent = block.parent
            if parent.children.get(block.token_key) is block:
                del parent.children[block.token_key]
            self._drop_empty_root(parent)
        self._detach(block)
        block.ref_count = 1
        return block

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
