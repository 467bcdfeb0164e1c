"""Sessions of a gateway: with real servers and a scripted engine, or alone with a scripted client.

Engine, client, gateway and SDKs are opened once and shared; every test gets its own session and trace.
"""

import asyncio
import contextlib
import json
import platform
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai

from ramify.infer.client import ClientConfig, InferenceClient
from ramify.infer.gateway import (
    Endpoint,
    Gateway,
    ModelRequest,
    Policy,
    RolloutLimits,
    RolloutSession,
    SamplingConfig,
    TokenPolicy,
)
from ramify.trace import Message, Trace
from tests.support.engine import TINY, Script, ScriptedClient, ScriptedEngine

platform.processor()  # runs `uname` once; the SDKs send it with every request
CONFIG = ClientConfig(health_interval=5, backoff=0.01, retries=0)


@dataclass
class SharedServers:
    """The servers and clients that all tests share. `quick_keepalive` is a gateway with a very short interval."""

    engine: ScriptedEngine
    client: InferenceClient
    gateway: Gateway
    quick_keepalive: Gateway
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic
    http: httpx.AsyncClient


@dataclass
class Scenario:
    """The session and the servers of one test."""

    servers: SharedServers
    policy: Policy
    trace: Trace
    session: RolloutSession
    gateway: Gateway
    endpoint: Endpoint

    @property
    def engine(self) -> ScriptedEngine:
        return self.servers.engine

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        return self.servers.openai.with_options(**self._address(options))

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return self.servers.anthropic.with_options(**self._address(options))

    def _address(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.endpoint.base_url, "api_key": self.endpoint.api_key, "timeout": 60, **options}

    async def chat(self, *texts: str, **options: Any):
        """Send a conversation of alternating user and assistant texts with the openai SDK."""
        roles = ["user", "assistant"] * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
        return await self.openai(max_retries=0).chat.completions.create(model="any", messages=messages, **options)

    async def post(self, path: str, body: Any, *, timeout: float = 60, **headers: str) -> httpx.Response:
        """Send a body unchanged, without an SDK."""
        bearer = {"authorization": f"Bearer {self.endpoint.api_key}"} | headers
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = self.endpoint.base_url + path
        return await self.servers.http.post(url, content=data, headers=bearer, timeout=timeout)

    @property
    def reasons(self) -> list[str]:
        """The reasons of all forks in the trace."""
        return [fork["reason"] for fork in self.trace.info.get("forks", [])]


@contextlib.asynccontextmanager
async def open_servers() -> AsyncIterator[SharedServers]:
    async with (
        ScriptedEngine([]) as engine,
        InferenceClient(engine.url, CONFIG) as client,
        Gateway() as gateway,
        Gateway(keepalive_interval=0.02) as quick_keepalive,
        openai.AsyncOpenAI(api_key="none") as openai_client,
        anthropic.AsyncAnthropic(api_key="none") as anthropic_client,
        httpx.AsyncClient(timeout=60) as http,
    ):
        yield SharedServers(engine, client, gateway, quick_keepalive, openai_client, anthropic_client, http)


@contextlib.asynccontextmanager
async def open_session(
    servers: SharedServers,
    script: Script,
    *,
    renderer=TINY,
    quick_keepalive: bool = False,
    limits: RolloutLimits | None = None,
    **options: Any,
) -> AsyncIterator[Scenario]:
    """Open a session whose engine replays `script`."""
    servers.engine.reset(script, renderer)
    policy, trace = TokenPolicy(servers.client, renderer, "tiny"), Trace(id="t1")
    session = RolloutSession(trace, policy, sampling=SamplingConfig(), limits=limits or RolloutLimits(), **options)
    gateway = servers.quick_keepalive if quick_keepalive else servers.gateway
    endpoint = gateway.register(session)
    try:
        async with asyncio.timeout(60):
            yield Scenario(servers, policy, trace, session, gateway, endpoint)
    finally:
        gateway.unregister(session)


def make_session(
    script: Script, *, renderer=TINY, limits: dict[str, int] | None = None, **options: Any
) -> tuple[RolloutSession, ScriptedClient]:
    """Return a session without servers, and its client, which replays `script`."""
    token_client = ScriptedClient(script, renderer)
    sampling = options.pop("sampling", SamplingConfig())
    policy = TokenPolicy(token_client, renderer, "tiny", max_model_len=options.pop("max_model_len", None))
    session = RolloutSession(
        Trace(id="t1"), policy, sampling=sampling, limits=RolloutLimits(**(limits or {})), **options
    )
    return session, token_client


def user_request(text: str, **fields: Any) -> ModelRequest:
    return ModelRequest((Message("user", text),), **fields)
