"""A launcher whose nodes are in this process: calls between head and node can be lost, repeated and cut off."""

import asyncio
from collections.abc import Sequence

from ramify.errors import PeerLost
from ramify.fencing.lease import RoleLeases, read_lease_clock
from ramify.launch.launcher import ClusterNode, Placement, ProcessSlot
from ramify.launch.local_launcher import LocalLauncher, LocalSlot
from ramify.launch.node_process import ExchangeReply, ExchangeRequest, NodeProcess
from ramify.launch.remote_slot import RemoteSlot, RemoteSlotSettings

SETTINGS = RemoteSlotSettings(exchange_interval=0.05)


class LossyClient:
    """A connection to a node that loses every third reply and repeats every call; while `is_cut`, nothing passes."""

    def __init__(self, node_process: NodeProcess) -> None:
        self.node_process = node_process
        self.num_calls, self.replied_at = 0, 0.0
        self.is_cut = False

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        while self.is_cut:
            await asyncio.sleep(0.01)
        self.num_calls += 1
        await self.node_process.exchange(request)
        reply = await self.node_process.exchange(request)
        if self.num_calls % 3 == 0:
            raise PeerLost("the reply is lost")
        self.replied_at = read_lease_clock()
        return reply

    async def close(self, *, is_reachable: bool) -> None:
        await self.node_process.close()


class InProcessLauncher:
    """Starts processes through `NodeProcess` objects of this process, in slots of a class."""

    def __init__(self, settings: RemoteSlotSettings = SETTINGS, *, slot_class: type[LocalSlot] = LocalSlot) -> None:
        self.settings, self.slot_class = settings, slot_class
        self.clients: list[LossyClient] = []

    def list_nodes(self) -> list[ClusterNode]:
        return LocalLauncher().list_nodes()

    async def open_slots(
        self, leases: RoleLeases, placement: Placement | None, *, timeout: float
    ) -> Sequence[ProcessSlot]:
        if placement is None:
            return await LocalLauncher().open_slots(leases, placement, timeout=timeout)
        slots = []
        for rank in range(leases.num_ranks):
            node_process = NodeProcess(
                placement.lease, node=f"node-{rank}", host="127.0.0.1", slot_class=self.slot_class
            )
            self.clients.append(LossyClient(node_process))
            slots.append(RemoteSlot(self.clients[-1], node_process.get_address(), leases, rank, self.settings))
        return slots

    async def close(self) -> None: ...
