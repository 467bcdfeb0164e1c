"""Which request or snapshot has which slot of the recurrent states.

A running request has a slot, whose state its tokens change. A snapshot is a copy of that state at the end of a cached
block. Unlike keys and values, a state cannot be cut at an earlier token, so a request can continue a cached prefix only
after a block with a snapshot. Snapshots are bounded: a new one takes the slot of the least recently used one. Each ends
with its block.
"""

from collections import OrderedDict
from typing import Protocol

from ramify.infer.block import Block
from ramify.infer.metrics import EngineCounters
from ramify.infer.request import NO_STATE_SLOT, EngineRequest


class StateMemory(Protocol):
    """The states themselves; see `ramify.model.recurrent_state.StatePool`."""

    def clear(self, slot: int) -> None:
        """Set a slot to the state before the first token."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy the state of one slot to another."""
        ...


class StateSlots:
    """The slots of running requests come first, then the slots of snapshots."""

    def __init__(self, memory: StateMemory, num_requests: int, num_snapshots: int, counters: EngineCounters) -> None:
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
