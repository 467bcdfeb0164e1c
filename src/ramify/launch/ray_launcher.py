"""Starts processes on the nodes of a Ray cluster, with one small actor per process.

The placement of a process chooses its node, and Ray runs the actor there. The actor holds a `NodeProcess`, which starts
the process and reports about it. Actors are never restarted and calls never repeated by Ray, because the supervisor
decides what happens after a failure. Ray's view of what is dead does not count either: a node that Ray has declared
dead may live on. Only an exit that was seen counts, or the end of a lease. Replies are small and bypass Ray's object
store.
"""

import asyncio
import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

from ramify.core.async_calls import call_in_daemon_thread, cancel_all
from ramify.core.errors import ConfigInvalid, DeadlineExceeded, PeerLost, ProcessDied, RamifyError
from ramify.core.interactive import run_coroutine
from ramify.core.terminal import hide_log_records
from ramify.launch.launcher import ASSUMED_GPU_BYTES, ClusterNode, PlacementRequest, ProcessSlot, ProcessSpec
from ramify.launch.local_launcher import LocalLauncher
from ramify.launch.placement import format_room
from ramify.launch.remote_slot import ExchangeReply, ExchangeRequest, NodeProcess, RemoteSlot, SlotAddress
from ramify.processes.child import KILL_TIMEOUT, STOP_TIMEOUT
from ramify.run.fencing.lease import LeaseTerms, RoleLeases

ADDRESS_VARIABLE = "RAY_ADDRESS"  # Ray uses its value for the address `auto`
TCP_TIMEOUT = 5.0  # seconds to open a TCP connection
INIT_TIMEOUT = 60.0  # seconds for all of it; Ray needs a few if the machine is not busy
# Ray says so because it is not in the main thread. The supervisor handles the signal.
SIGTERM_WARNING = "SIGTERM handler is not set"


def connect_to_ray(address: str, *, timeout: float = INIT_TIMEOUT) -> Any:
    """Return the module `ray`, connected to the cluster at `address`: `auto`, HOST:PORT or ray://HOST:PORT.

    `ray.init` waits without end, in native code, for an address at which nobody answers. So the address is tried first
    with a TCP connection, and `ray.init` runs in a thread that can be left behind. Raises ConfigInvalid if Ray is
    missing or the cluster does not answer within `timeout` seconds.
    """
    try:
        ray: Any = import_module("ray")
        import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ConfigInvalid("'ray' needs the extra `ray`: pip install 'ramify[ray]'", key="cluster.launcher") from error
    variable = os.environ.get(ADDRESS_VARIABLE, "") if address == "auto" else ""

    def initialize() -> None:
        _check_listening(variable or address)
        with hide_log_records("ray._private.worker", SIGTERM_WARNING):
            ray.init(address=address, namespace="ramify", log_to_driver=False, logging_level="warning")

    try:
        run_coroutine(_run_with_deadline(initialize, timeout))
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = f"{variable!r} ({ADDRESS_VARIABLE})" if variable else repr(address)
        reason = str(error) or f"no answer within {timeout:g} s"
        advice = "start it with `ray start --head`, or set cluster.address"
        raise ConfigInvalid(f"no Ray cluster answers at {where}: {reason}; {advice}", key="cluster.address") from error
    return ray


async def _run_with_deadline(initialize: Callable[[], None], timeout: float) -> None:
    async with asyncio.timeout(timeout):
        await call_in_daemon_thread(initialize, "ray.init")


def _check_listening(address: str) -> None:
    """Raise OSError if nobody listens at HOST:PORT; an address of another form is left to Ray."""
    try:
        parts = urlsplit(f"//{address.removeprefix('ray://')}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return
    if host and port:
        socket.create_connection((host, port), timeout=TCP_TIMEOUT).close()


CLOSE_TIMEOUT = STOP_TIMEOUT + KILL_TIMEOUT + 2.0  # seconds for an actor to stop its process
LIST_NODES_TIMEOUT = 10.0  # seconds for Ray to list its nodes for the text of an error
MAX_OPEN_TRIES = 3  # a node that neither starts an actor nor dies takes this part of the time to find a place
LIST_NODES = "list its nodes"  # in the text of errors
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RayLauncherSettings:
    """Intervals and timeouts of a RayLauncher, in seconds."""

    retry_interval: float = 1.0
    """Delay before another try to place a process whose node has just died."""
    node_avoidance: float = 120.0
    """Time for which a node is avoided after a process was lost there. Ray notices a dead node after about a minute."""
    node_poll_interval: float = 1.0
    """Time between two checks of which nodes have joined."""
    node_report_interval: float = 30.0
    """Time between two lines about the nodes that are waited for."""
    release_timeout: float = 5.0
    """Time for Ray to report the resources of ended actors as free."""
    release_poll_interval: float = 0.2
    """Time between two polls of the free resources."""
    shutdown_timeout: float = 30.0
    """Time to disconnect from Ray."""


class RayLauncher:
    """Starts processes with a placement on the nodes of Ray, and all others on this machine."""

    can_lose_nodes = True

    def __init__(
        self, ray: Any, settings: RayLauncherSettings | None = None, *, gpu_bytes: int = ASSUMED_GPU_BYTES
    ) -> None:
        """Use an initialized `ray`, whose GPUs have `gpu_bytes` of memory each; `connect` is the usual way."""
        self._ray, self._local, self._settings = ray, LocalLauncher(), settings or RayLauncherSettings()
        self._gpu_bytes = gpu_bytes
        self._avoided_until: dict[str, float] = {}  # monotonic time, by node
        self._clients: list[_RayClient] = []  # of actors that were not ended
        self._actor_class = ray.remote(_NodeProcessActor)

    @classmethod
    def connect(cls, address: str = "auto", *, gpu_bytes: int = ASSUMED_GPU_BYTES) -> Self:
        """Connect to a running Ray cluster, whose GPUs have `gpu_bytes` of memory each: Ray does not report it.

        Raises ConfigInvalid if Ray is missing or the cluster does not answer.
        """
        return cls(connect_to_ray(address), gpu_bytes=gpu_bytes)

    def list_nodes(self) -> list[ClusterNode]:
        """Return the nodes that Ray takes for alive; the head is the one of this process."""
        return self._to_cluster_nodes(self._list_alive_nodes())

    def prepare(self, specs: Sequence[ProcessSpec]) -> contextlib.AbstractContextManager[None]:
        """Do nothing: ports are reserved on each node when a slot is opened."""
        return contextlib.nullcontext()

    def _to_cluster_nodes(self, ray_nodes: Sequence[dict[str, Any]]) -> list[ClusterNode]:
        head_id = self._ray.get_runtime_context().get_node_id()
        return [
            ClusterNode(
                node["NodeName"],
                node["NodeManagerAddress"],
                num_cpus=node["Resources"].get("CPU", 0.0),
                num_gpus=node["Resources"].get("GPU", 0.0),
                memory=int(node["Resources"].get("memory", 0)) or None,
                gpu_memory=self._gpu_bytes,
                is_head=node["NodeID"] == head_id,
            )
            for node in ray_nodes
        ]

    def _list_alive_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive. Ray lists a node twice for a while if Ray was started there again."""
        return list({node["NodeName"]: node for node in self._ray.nodes() if node["Alive"]}.values())

    async def _call_ray(self, function: Callable[[], T], action: str) -> T:
        """Return the result of a call to Ray, which hangs if Ray's control service does.

        Raises PeerLost with the action that failed, such as "list its nodes".
        """
        try:
            return await call_in_daemon_thread(function, f"Ray: {action}")
        except (ConnectionError, RuntimeError, self._ray.exceptions.RayError) as error:
            reason = _get_last_line(error) or type(error).__name__
            raise PeerLost(f"Ray did not {action}: {reason}; check the cluster with `ray status`") from error

    async def open_slots(
        self, leases: RoleLeases, placement: PlacementRequest | None, *, timeout: float
    ) -> Sequence[ProcessSlot]:
        """Return one slot per rank; nodes are chosen again if one dies or does not answer meanwhile.

        Raises DeadlineExceeded if no nodes are found within `timeout` seconds, and ProcessDied if the actor of a rank
        cannot be started on its node.
        """
        if placement is None:
            return await self._local.open_slots(leases, placement, timeout=timeout)
        last_failure = ""
        try:
            async with asyncio.timeout(timeout) as scope:
                while not scope.expired():  # an error while a try is cancelled would end the cancellation
                    try:
                        nodes = await self._choose_nodes(placement)
                        if not nodes:
                            last_failure = ""
                        else:
                            async with asyncio.timeout(timeout / MAX_OPEN_TRIES):
                                return await self._open_on(nodes, leases, placement)
                    except PeerLost as error:
                        last_failure = f"; the last try failed: {error.message}"
                    except TimeoutError:  # the nodes that did not answer are avoided now
                        last_failure = ""
                    await asyncio.sleep(self._settings.retry_interval)
                raise TimeoutError
        except TimeoutError as error:
            shortage = await self._describe_shortage(leases, placement)
            message = f"{leases.role} could not be placed within {timeout:g} s"
            raise DeadlineExceeded(f"{message}: {shortage}{last_failure}") from error

    async def _choose_nodes(self, placement: PlacementRequest) -> "list[_RayNode]":
        """Return the node of each rank, or an empty list if they do not all fit now.

        A node on which a process was lost is chosen only if the others have no room.
        """
        ray_nodes = await self._call_ray(self._list_alive_nodes, LIST_NODES)
        ids = {node["NodeName"]: node["NodeID"] for node in ray_nodes}
        nodes, now = self._to_cluster_nodes(ray_nodes), time.monotonic()
        preferred = [node for node in nodes if self._avoided_until.get(node.name, now) <= now]
        places = placement.choose_places(preferred) or placement.choose_places(nodes)
        names = [place.node for place in places]  # Ray chooses the GPUs
        return [_RayNode(name, ids[name]) for name in names] if ids.keys() >= set(names) else []

    def _avoid(self, node: "_RayNode") -> None:
        self._avoided_until[node.name] = time.monotonic() + self._settings.node_avoidance

    async def _open_on(
        self, nodes: "Sequence[_RayNode]", leases: RoleLeases, placement: PlacementRequest
    ) -> list[RemoteSlot]:
        """Start one actor per rank. If one of them fails, all are ended."""
        clients = [
            _RayClient(
                self._ray, self._create_actor(placement, node), node, placement, on_lost=partial(self._avoid, node)
            )
            for node in nodes
        ]
        self._clients = [client for client in (*self._clients, *clients) if not client.is_closed]
        tasks = [asyncio.create_task(client.open()) for client in clients]
        try:
            addresses = await asyncio.gather(*tasks)
        except BaseException:
            for task, node in zip(tasks, nodes):
                if task.cancelled():  # by the timeout
                    self._avoid(node)
            for client in clients:  # before anything is awaited: the timeout may end this method there
                client.kill()
            await cancel_all(tasks)
            raise
        return [
            RemoteSlot(client, address, leases, rank) for rank, (client, address) in enumerate(zip(clients, addresses))
        ]

    def _create_actor(self, placement: PlacementRequest, node: "_RayNode") -> Any:
        strategies = self._ray.util.scheduling_strategies
        options = self._actor_class.options(
            num_cpus=placement.num_cpus,
            num_gpus=placement.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        return options.remote(placement.lease, node.name)

    async def _describe_shortage(self, leases: RoleLeases, placement: PlacementRequest) -> str:
        """Return what the ranks of a process need, and what the nodes have."""
        needed = f"{format_room(placement.num_gpus, placement.num_cpus)} on a node"
        ranks = f"each of {leases.num_ranks} ranks needs" if leases.num_ranks > 1 else "it needs"
        try:
            async with asyncio.timeout(LIST_NODES_TIMEOUT):
                nodes = await self._call_ray(self.list_nodes, LIST_NODES)
        except PeerLost as error:
            return f"{ranks} {needed}; {error.message}"
        except TimeoutError:
            problem = f"Ray did not {LIST_NODES} within {LIST_NODES_TIMEOUT:g} s"
            return f"{ranks} {needed}; {problem}; check the cluster with `ray status`"
        sizes = ", ".join(f"{node.name}: {format_room(node.num_gpus, node.num_cpus)}" for node in nodes)
        advice = "add a node, or lower the cores and GPUs of this process in [cluster]"
        if usage := await self._describe_usage_after_release(nodes):
            advice = f"{usage}; wait until they end, {advice}"
        return f"{ranks} {needed}; the nodes have in total {sizes}; {advice}"

    def describe_usage(self, nodes: Sequence[ClusterNode]) -> str:
        """Return what other Ray jobs use of these nodes, as text; empty for nothing, or if Ray does not answer."""
        return run_coroutine(self._describe_usage_within_timeout(nodes))

    async def _describe_usage_after_release(self, nodes: Sequence[ClusterNode]) -> str:
        """Poll `describe_usage` until Ray has released the actors that were just ended.

        It polls at most `release_timeout` seconds.
        """
        deadline = time.monotonic() + self._settings.release_timeout
        while usage := await self._describe_usage_within_timeout(nodes):
            if time.monotonic() >= deadline or not any(client.is_closed for client in self._clients):
                break
            await asyncio.sleep(self._settings.release_poll_interval)
        return usage

    async def _describe_usage_within_timeout(self, nodes: Sequence[ClusterNode]) -> str:
        with contextlib.suppress(PeerLost, TimeoutError):
            async with asyncio.timeout(LIST_NODES_TIMEOUT):
                return await self._call_ray(lambda: self._describe_usage(nodes), "report what is free")
        return ""

    def _describe_usage(self, nodes: Sequence[ClusterNode]) -> str:
        """Compare what Ray says is free with what the nodes have, less the running actors of this launcher.

        Ray does not report whether an actor that has not answered is pending or already holds resources.
        """
        free: dict[str, float] = self._ray.available_resources()
        clients = [client for client in self._clients if not client.is_closed]
        placements = [client.placement for client in clients if client.is_open]
        free_gpus, free_cores = free.get("GPU", 0.0), free.get("CPU", 0.0)
        gpus = sum(node.num_gpus for node in nodes) - free_gpus - sum(placement.num_gpus for placement in placements)
        cores = sum(node.num_cpus for node in nodes) - free_cores - sum(placement.num_cpus for placement in placements)
        if gpus <= 0 and cores <= 0:
            return ""
        users = "other Ray jobs"
        if len(placements) < len(clients):
            users = f"{users}, or processes of this run that have not started yet,"
        used = format_room(max(0.0, gpus), max(0.0, cores))
        return f"{users} use {used}, and {format_room(free_gpus, free_cores)} are free"

    def wait_for_nodes(
        self, num_nodes: int, *, timeout: float, print_line: Callable[[str], None] = print
    ) -> list[ClusterNode]:
        """Return the nodes when there are `num_nodes`; meanwhile, print how many there are.

        Raises DeadlineExceeded after `timeout` seconds.
        """
        return run_coroutine(self._wait_for_nodes(num_nodes, timeout, print_line))

    async def _wait_for_nodes(
        self, num_nodes: int, timeout: float, print_line: Callable[[str], None]
    ) -> list[ClusterNode]:
        nodes: list[ClusterNode] = []
        failure = ""
        next_report = time.monotonic()
        deadline = next_report + timeout
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        nodes, failure = await self._call_ray(self.list_nodes, LIST_NODES), ""
                    except PeerLost as error:
                        failure = f"; {error.message}"
                    if len(nodes) >= num_nodes:
                        return nodes
                    if (now := time.monotonic()) >= next_report:
                        next_report = now + self._settings.node_report_interval
                        joined = describe_joined(nodes, num_nodes)
                        print_line(f"{joined}; waiting up to {deadline - now:.0f} s{failure}")
                    await asyncio.sleep(self._settings.node_poll_interval)
        except TimeoutError as error:
            message = f"after {timeout:g} s, {describe_joined(nodes, num_nodes)}, fewer than cluster.num_nodes"
            raise DeadlineExceeded(f"{message}; start Ray on the other nodes{failure}") from error

    def disconnect(self, print_line: Callable[[str], None] = print) -> None:
        """Disconnect from Ray, which ends all actors that are left. Print a line if Ray does not answer in time."""
        run_coroutine(self._disconnect(print_line))

    async def _disconnect(self, print_line: Callable[[str], None]) -> None:
        try:
            async with asyncio.timeout(self._settings.shutdown_timeout):
                await call_in_daemon_thread(self._ray.shutdown, "ray.shutdown")
        except TimeoutError:
            atexit.unregister(self._ray.shutdown)  # it would hang again when this process exits
            problem = f"Ray did not disconnect within {self._settings.shutdown_timeout:g} s"
            consequence = "processes on its nodes end with their leases"
            print_line(f"DeadlineExceeded: {problem}; {consequence}; check the cluster with `ray status`")


def describe_joined(nodes: Sequence[ClusterNode], num_nodes: int) -> str:
    """Return how many of the expected nodes have joined, and which."""
    names = f" ({', '.join(node.name for node in nodes)})" if nodes else ""
    return f"{len(nodes)} of {num_nodes} nodes have joined{names}"


class _RayNode(NamedTuple):
    """A node that an actor must run on."""

    name: str
    id: str


class _NodeProcessActor(NodeProcess):
    """What the actor runs: a `NodeProcess`. `node` is the name of its node."""

    def __init__(self, terms: LeaseTerms, node: str) -> None:
        ray: Any = import_module("ray")
        super().__init__(terms, node=node, host=ray.util.get_node_ip_address())


class _RayClient:
    """The connection to one actor."""

    def __init__(
        self, ray: Any, actor: Any, node: _RayNode, placement: PlacementRequest, *, on_lost: Callable[[], None]
    ) -> None:
        self.placement, self.is_open, self.is_closed = placement, False, False
        self._ray, self._actor, self._on_lost = ray, actor, on_lost
        self._node = node.name

    async def open(self) -> SlotAddress:
        """Wait until the actor runs, and return where.

        Raises PeerLost if it dies with its node, and ProcessDied if it cannot be started there.
        """
        try:
            address: SlotAddress = await self._call(self._actor.get_address.remote())
        except PeerLost as error:
            self._on_lost()
            if getattr(error.__cause__, "actor_init_failed", False):
                problem = f"the actor of a process cannot be started on {self._node}: {_get_last_line(error.__cause__)}"
                raise ProcessDied(f"{problem}; install the same packages on all nodes") from error
            raise
        self.is_open = True
        return address

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """Call the actor. Raises PeerLost if it does not answer."""
        return await self._call(self._actor.exchange.remote(request))

    async def _call(self, reference: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return await reference
        except exceptions.RayTaskError as error:  # the method itself failed
            cause: object = getattr(error, "cause", None)
            if isinstance(cause, RamifyError):
                raise cause from None
            raise
        except exceptions.RayError as error:
            problem = f"the actor of a process on {self._node} does not answer: {_get_last_line(error)}"
            raise PeerLost(problem) from error

    async def close(self, *, is_reachable: bool) -> None:
        """Let the actor stop its process and remove its files, if it can, and end it."""
        if not is_reachable:
            self._on_lost()
        try:
            if is_reachable and not self.is_closed:
                with contextlib.suppress(RamifyError, TimeoutError, self._ray.exceptions.RayError):
                    async with asyncio.timeout(CLOSE_TIMEOUT):
                        await self._call(self._actor.close.remote())
        finally:
            self.kill()

    def kill(self) -> None:
        """End the actor at once; its watcher stops the process."""
        if not self.is_closed:
            self.is_closed = True
            self._ray.kill(self._actor)


def _get_last_line(error: BaseException | None) -> str:
    """Return the last line of an error of Ray, which is the cause if it has a traceback."""
    return str(error).strip().rpartition("\n")[2].strip()
