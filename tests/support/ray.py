"""A stand-in for Ray: nodes whose actors answer, wait for room, fail or die, as the test says."""

import asyncio
import threading
from types import SimpleNamespace

from ramify.launch.remote_slot import SlotAddress


class RayError(Exception): ...


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(f"traceback\n{cause}")
        self.cause = cause


class RayActorError(RayError):
    def __init__(self, message: str, *, actor_init_failed: bool = False) -> None:
        super().__init__(message)
        self.actor_init_failed = actor_init_failed


class NodeAffinitySchedulingStrategy:
    def __init__(self, node_id: str, *, soft: bool) -> None:
        self.node_id, self.soft = node_id, soft


class StubActor:
    """An actor on a node, of which only the address is ever asked for."""

    def __init__(self, ray: "StubRay", strategy) -> None:
        self.ray, self.strategy = ray, strategy
        self.is_killed, self.is_cancelled = False, False
        self.num_reports_left = 0  # that still count its core when it was killed
        self.get_address = SimpleNamespace(remote=self._get_address)
        ray.actors.append(self)

    @property
    def node(self) -> str:
        return self.strategy.node_id.removeprefix("id-")

    @property
    def has_core(self) -> bool:
        return self.ray.failures.get(self.node) != "full" and (not self.is_killed or self.num_reports_left > 0)

    async def _get_address(self) -> SlotAddress:
        name, failure = self.node, self.ray.failures.get(self.node)
        if failure in ("full", "slow"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.is_cancelled = True
                raise
        if failure == "crashes":
            raise RayActorError("the actor died\nits worker has crashed")
        if failure == "dies":
            self.ray.names.remove(name)
            raise RayActorError("the actor died\nits node is dead")
        if isinstance(failure, Exception):
            raise RayTaskError(failure)
        if failure is not None:
            raise RayActorError(f"the actor died\n{failure}\n", actor_init_failed=True)
        return SlotAddress(name, "127.0.0.1", 1, "/nowhere")


class StubRay:
    """What `RayLauncher` uses of Ray.

    `failures` says what happens to actors on a node: `full` (they wait for a core), `slow` (they have one and never
    start), `crashes`, `dies` (the node), the text of an error in their constructor, or an exception of a method.
    Each node has `num_gpus`. `used_cores` are in use by other jobs. `num_late_reports` of what is free still count the
    core of a killed actor. If `released` is set, `shutdown` waits for it.
    """

    def __init__(self, *names: str, failures: dict[str, str | Exception] | None = None) -> None:
        self.names, self.failures = list(names), failures or {}
        self.actors: list[StubActor] = []
        self.num_gpus, self.used_cores, self.num_late_reports = 0, 0, 0
        self.released: threading.Event | None = None
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=NodeAffinitySchedulingStrategy)
        self.util = SimpleNamespace(scheduling_strategies=strategies)
        self.exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def nodes(self) -> list[dict]:
        return [
            {
                "NodeName": name,
                "NodeID": f"id-{name}",
                "NodeManagerAddress": name,
                "Alive": True,
                "Resources": {"CPU": 4, "GPU": self.num_gpus},
            }
            for name in self.names
        ]

    def available_resources(self) -> dict[str, float]:
        num_running = sum(actor.has_core for actor in self.actors)
        for actor in self.actors:
            actor.num_reports_left -= 1
        return {
            "GPU": float(self.num_gpus * len(self.names)),
            "CPU": 4.0 * len(set(self.names)) - self.used_cores - num_running,
        }

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: f"id-{self.names[0]}")

    def remote(self, actor_class):
        def options(*, scheduling_strategy, **_):
            return SimpleNamespace(remote=lambda terms, node: StubActor(self, scheduling_strategy))

        return SimpleNamespace(options=options)

    def kill(self, actor: StubActor) -> None:
        actor.is_killed = True
        actor.num_reports_left = self.num_late_reports

    def shutdown(self) -> None:
        if self.released is not None:
            self.released.wait(60)
