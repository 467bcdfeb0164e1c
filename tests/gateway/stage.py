"""A rollout's surroundings, all real: engine, client, policy, session and gateway.

Engine, client, gateway and SDKs are opened once and shared; every test gets a session and a trace of its own.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai

from ramify.client import ClientConfig, InferenceClient
from ramify.env import Endpoint
from ramify.gateway import Gateway, Policy, RolloutLimits, RolloutSession, SamplingConfig, TokenPolicy
from ramify.trace import Trace
from tests.gateway.engine import TINY, Engine

CONFIG = ClientConfig(health_interval=5, backoff=0.01, retries=0)


@dataclass
class House:
    """What all tests share. The second gateway has no patience: a stream that waits says so at once."""

    engine: Engine
    client: InferenceClient
    gateway: Gateway
    hasty: Gateway
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: httpx.AsyncClient


@dataclass
class Stage:
    house: House
    policy: Policy
    trace: Trace
    session: RolloutSession
    gateway: Gateway
    endpoint: Endpoint

    @property
    def engine(self) -> Engine:
        return self.house.engine

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        return self.house.openai.with_options(**self._address(options))

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return self.house.anthropic.with_options(**self._address(options))

    def _address(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.endpoint.base_url, "api_key": self.endpoint.api_key, "timeout": 20, **options}

    async def chat(self, *said: str, **options: Any):
        """Ask with the openai SDK: user and assistant in turns."""
        roles = ["user", "assistant"] * len(said)
        messages = [{"role": role, "content": text} for role, text in zip(roles, said)]
        return await self.openai(max_retries=0).chat.completions.create(model="any", messages=messages, **options)

    async def post(self, path: str, body: Any, *, timeout: float = 20, **headers: str) -> httpx.Response:
        """Send a body as it is, without any SDK."""
        bearer = {"authorization": f"Bearer {self.endpoint.api_key}"} | headers
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = self.endpoint.base_url + path
        return await self.house.http.post(url, content=data, headers=bearer, timeout=timeout)

    @property
    def reasons(self) -> list[str]:
        return [fork["reason"] for fork in self.trace.info.get("forks", [])]


@contextlib.asynccontextmanager
async def _house() -> AsyncIterator[House]:
    async with (
        Engine([]) as engine,
        InferenceClient(engine.url, CONFIG) as client,
        Gateway() as gateway,
        Gateway(keepalive_interval=0.02) as hasty,
        openai.AsyncOpenAI(api_key="none") as ours,
        anthropic.AsyncAnthropic(api_key="none") as theirs,
        httpx.AsyncClient(timeout=20) as http,
    ):
        yield House(engine, client, gateway, hasty, ours, theirs, http)


class Player:
    """Runs acts one after another in one event loop."""

    def __init__(self, runner: asyncio.Runner, house: House) -> None:
        self._runner, self._house = runner, house

    def __call__(
        self,
        script: list[str] | Callable[[str], str],
        act: Callable[[Stage], Awaitable[None]],
        *,
        renderer=TINY,
        hasty: bool = False,
        limits: RolloutLimits | None = None,
        **options: Any,
    ) -> None:
        """Run `act` with an engine that plays `script`."""

        async def main() -> None:
            house = self._house
            house.engine.reset(script, renderer)
            policy, trace = TokenPolicy(house.client, renderer, "tiny"), Trace(id="t1")
            session = RolloutSession(
                trace, policy, sampling=SamplingConfig(), limits=limits or RolloutLimits(), **options
            )
            gateway = house.hasty if hasty else house.gateway
            endpoint = gateway.register(session)
            try:
                async with asyncio.timeout(30):
                    await act(Stage(house, policy, trace, session, gateway, endpoint))
            finally:
                gateway.unregister(session)

        self._runner.run(main())


@contextlib.contextmanager
def player() -> Iterator[Player]:
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        house = runner.run(stack.enter_async_context(_house()))
        yield Player(runner, house)
        runner.run(stack.aclose())
