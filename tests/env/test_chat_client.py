"""Chat clients bound what they send: calls in flight, calls per minute, and schemas only where they are taken."""

import asyncio

import pytest

from ramify.core.errors import ProviderError
from ramify.env import ChatClient, ChatClientConfig
from ramify.env.chat_client import CallPacer
from tests.support.engine import ScriptedEngine, run_engine

SCHEMA = {"type": "object", "properties": {}}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with run_engine(ScriptedEngine()) as server:
        yield server


def client(server, **keys) -> ChatClient:
    return ChatClient(ChatClientConfig(base_url=f"{server.url}/v1", model="m", retries=0, **keys))


def refuse_schema(server):
    """Answer requests with a schema as an endpoint that does not know `response_format`."""
    return lambda _: (400, "unknown field") if "response_format" in server.requests[-1] else "hello"


async def test_a_refused_schema_is_not_sent_again(server):
    server.reset(refuse_schema(server))
    chat_client = client(server)
    for _ in range(2):
        assert (await chat_client.complete(MESSAGES, schema=SCHEMA)).text == "hello"
    assert ["response_format" in request for request in server.requests] == [True, False, False]


async def test_a_request_refused_for_another_reason_keeps_its_schema(server):
    server.reset([(400, "too long"), (400, "too long"), "hello"])
    chat_client = client(server)
    with pytest.raises(ProviderError, match="too long"):
        await chat_client.complete(MESSAGES, schema=SCHEMA)
    await chat_client.complete(MESSAGES, schema=SCHEMA)
    assert server.requests[-1]["response_format"]["json_schema"]["schema"] == SCHEMA


class CountingEngine(ScriptedEngine):
    """Counts the chat requests in flight; `most` is their maximum."""

    in_flight = most = 0

    async def _complete_chat(self, exchange) -> None:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await super()._complete_chat(exchange)
        self.in_flight -= 1


async def test_calls_in_flight_are_bounded():
    engine = CountingEngine(lambda _: "hello", delay=0.01)
    async with engine:
        chat_client = client(engine, concurrency=2)
        await asyncio.gather(*(chat_client.complete(MESSAGES) for _ in range(12)))
        assert (engine.most, len(engine.requests)) == (2, 12)


def test_calls_are_spaced_evenly():
    pacer = CallPacer(requests_per_minute=60)
    assert [pacer.reserve(now) for now in (100.0, 100.0, 100.5, 110.0, 110.25)] == [0.0, 1.0, 1.5, 0.0, 0.75]
    unlimited = CallPacer(None)
    assert [unlimited.reserve(100.0) for _ in range(3)] == [0.0] * 3
