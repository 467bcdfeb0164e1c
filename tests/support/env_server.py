"""An env server without an environment, over real sockets: it answers when it may, and records what it is asked."""

import asyncio
import socket
from typing import Any, Self

from ramify.core.errors import EnvironmentChanged, RamifyError
from ramify.processes.wire import IncomingRequest, WireMessage, WireServer, WireSettings
from ramify.processes.wire.listener import PortReservation
from ramify.rollout.envserver.messages import (
    AddressUpdate,
    EnvServerHealth,
    EnvServerInfo,
    RolloutRequest,
    RolloutResponse,
    TaskItem,
    TaskPage,
    TasksRequest,
)
from ramify.trace import Episode, encode_episode
from tests.support.traces import make_trace

QUICK = WireSettings(heartbeat_interval=0.05, server_timeout=1.0, session_timeout=5.0)


class StubEnvServer:
    """One server. Rollouts wait while `may_answer` is not set, and then fail with `refusal`; `health` is its state.

    Pages of tasks wait while `may_list` is not set. `started` and `finished` list the ids of rollouts, `updates` the
    addresses that it was told.
    """

    def __init__(self, name: str = "stub", address: str = "tcp://127.0.0.1:0", environment: str = "same") -> None:
        self.name, self.health, self.environment = name, "ok", environment
        self.may_answer, self.may_list = asyncio.Event(), asyncio.Event()
        self.may_answer.set()
        self.may_list.set()
        self.refusal: RamifyError | None = None
        self.started: list[str] = []
        self.finished: list[str] = []
        self.updates: list[AddressUpdate] = []
        handlers = {
            "info": self._info,
            "health": self._health,
            "tasks": self._tasks,
            "run": self._run,
            "addresses": self._addresses,
        }
        self._server = WireServer(handlers, address, settings=QUICK, name=name)

    @property
    def address(self) -> str:
        return self._server.address

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    def _build_info(self) -> EnvServerInfo:
        values: dict[str, Any] = {name: {} for name in ("taskset", "harness", "runtime", "sampling", "limits")}
        environment = {"code": {"env.py": self.environment}}
        return EnvServerInfo(
            name="stub",
            version="1",
            model="tiny",
            trainable=True,
            rewards={"score": 1.0},
            group_rewards={},
            metrics=[],
            environment=environment,
            **values,
        )

    async def _info(self, _: IncomingRequest) -> WireMessage:
        return WireMessage.encode(self._build_info())

    async def _health(self, _: IncomingRequest) -> WireMessage:
        health = EnvServerHealth(state=self.health, reason="no fuel", running=0, waiting=0, workers=[], deaths=[])
        return WireMessage.encode(health)

    async def _tasks(self, request: IncomingRequest) -> WireMessage:
        await self.may_list.wait()
        page = request.decode(TasksRequest)
        tasks = [TaskItem(str(number), {"prompt": str(number)}) for number in range(page.start, 10)]
        return WireMessage.encode(TaskPage(tasks, end=True))

    async def _run(self, request: IncomingRequest) -> WireMessage:
        rollout = request.decode(RolloutRequest)
        if rollout.environment not in ("", self._build_info().environment_digest):
            raise EnvironmentChanged("the run started with another environment")
        request_id = rollout.id
        self.started.append(request_id)
        await self.may_answer.wait()
        if self.refusal is not None:
            raise self.refusal
        self.finished.append(request_id)
        episode = encode_episode(Episode((make_trace(request_id, 1.0),)))
        return WireMessage.encode(RolloutResponse(worker=self.name), episode)

    async def _addresses(self, request: IncomingRequest) -> WireMessage:
        self.updates.append(request.decode(AddressUpdate))
        return WireMessage.encode()


def reserve_address() -> str:
    """Return an address whose port no outgoing connection takes while its server is restarted."""
    with PortReservation({"server": "tcp://127.0.0.1:0"}) as reservation:
        return reservation.addresses["server"]


async def restart_at(address: str, name: str, environment: str = "same") -> StubEnvServer:
    """Return a server for an address whose last listener is still being closed."""
    while True:
        try:
            socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))).close()
            return StubEnvServer(name, address, environment)
        except OSError:
            await asyncio.sleep(0.05)
