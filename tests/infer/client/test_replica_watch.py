"""What the task that watches a server does when the server was removed, and when the task itself fails."""

import asyncio
import time

import pytest

from ramify.core.errors import ProviderError
from ramify.infer.client import ClientConfig, ClientSampling, InferenceClient
from ramify.infer.client.http_client import HttpClient, ResponseLost
from ramify.infer.client.replica import Replica, TimedRequest
from ramify.infer.client.stall_clock import StallClock
from ramify.trace.version import PolicyVersion
from tests.infer.client.test_replica_pool import QUICK, connected
from tests.support.engine import Exchange, ScriptedEngine, hang
from tests.support.processes import async_wait_until

CONFIG = ClientConfig(health_interval=0.1, eject_after=2)


async def test_a_removed_unhealthy_server_is_checked_once_per_interval():
    leaving = ScriptedEngine()
    async with connected(leaving, config=CONFIG) as client:
        leaving.behaviour = hang
        in_flight = asyncio.create_task(client.generate([1], ClientSampling(max_tokens=3)))  # never sent again
        await async_wait_until(lambda: leaving.requests)
        client.set_urls([])
        leaving.healthy = False
        await async_wait_until(lambda: client._watch_tasks and next(iter(client._watch_tasks)).num_failed_checks >= 3)
        started, num_checks = time.monotonic(), leaving.targets.count("/health")
        await async_wait_until(lambda: leaving.targets.count("/health") >= num_checks + 6)
        assert time.monotonic() - started >= 4 * CONFIG.health_interval
        in_flight.cancel()


async def test_a_request_can_be_interrupted_twice():
    replica = Replica("http://127.0.0.1:1", HttpClient("http://127.0.0.1:1", connect_timeout=1.0, max_connections=1))
    with pytest.raises(ResponseLost):
        async with TimedRequest(replica, StallClock(), movable=True):
            replica.interrupt_movable_requests()
            try:
                await asyncio.Event().wait()
            finally:
                replica.interrupt_movable_requests()  # it is already ending


async def test_the_failure_of_a_watch_task_is_raised():
    class FailingClient(InferenceClient):
        async def check_server(self, server: Replica, *, is_requested: bool) -> None:
            if self.is_started:
                raise KeyError("a bug")
            await super().check_server(server, is_requested=is_requested)

    async with ScriptedEngine() as fake, FailingClient(fake.url, CONFIG) as client:
        with pytest.raises(KeyError, match="a bug"):
            await client.wait_failed()


async def test_start_raises_the_failure_of_a_watch_task_at_once():
    class FailingClient(InferenceClient):
        async def check_server(self, server: Replica, *, is_requested: bool) -> None:
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        async with asyncio.timeout(30), FailingClient("http://127.0.0.1:1", ClientConfig(server_wait_timeout=600)):
            pass


class RefusingFake(ScriptedEngine):
    """A server that refuses every update of its weights."""

    async def control(self, path: str, exchange: Exchange) -> None:
        if path == "/update_weights":
            await exchange.reply({"error": {"message": "a checksum is wrong", "type": "WeightsRefused"}}, 409)
        else:
            await super().control(path, exchange)


async def test_servers_join_again_after_an_update_that_they_refused():
    config = QUICK.model_copy(update={"server_wait_timeout": 2.0})  # the update waits all of it
    fake = RefusingFake()
    async with connected(fake, config=config) as client:
        await fake.__aexit__()
        await async_wait_until(lambda: fake.url in client.down_replicas)
        update = asyncio.create_task(client.update_weights("step-2", PolicyVersion("fake", 0, 2)))
        await fake.__aenter__()
        with pytest.raises(ProviderError, match="WeightsRefused: a checksum is wrong"):
            await update  # the server could not join with these weights
        await async_wait_until(lambda: client.versions == {fake.url: PolicyVersion("fake", 0, 1)})


async def test_a_client_starts_once():
    async with connected(ScriptedEngine()) as client:
        with pytest.raises(ProviderError, match="is already started"):
            await client.start()
    assert not client.is_started
    with pytest.raises(ProviderError, match="is closed"):
        await client.start()
