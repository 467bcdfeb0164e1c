"""The server under test, as the contract sees it: a base URL, and the few things each engine spells its own way."""

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ramify.infer.client.engine_adapter import WeightUpdate
from ramify.infer.client.http_client import HttpClient
from ramify.infer.client.vllm_adapter import VLLMAdapter
from ramify.model.weights_manifest import Manifest
from ramify.trace.version import PolicyVersion


@dataclass
class Target:
    """A server and two published sets of weights it can be given, `first` being the one it started with."""

    url: str
    first: Path
    second: Path
    max_model_len: int
    vocab: int
    flight: int = 400  # tokens of a request that has to be still on its way when something is done to the server

    def client(self) -> contextlib.AbstractAsyncContextManager[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=128, max_keepalive_connections=128, keepalive_expiry=2)
        return httpx.AsyncClient(base_url=self.url, timeout=60.0, limits=limits)

    # -- sampling ------------------------------------------------------------------------------------------------------

    async def generate(self, client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """The whole answer of the generate endpoint."""
        response = await client.post("/inference/v1/generate", json=self.body(prompt, **fields))
        assert response.status_code == 200, response.text
        return response.json()

    @contextlib.asynccontextmanager
    async def streaming(
        self, client: httpx.AsyncClient, prompt: list[int], **fields: Any
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """The choices of a streamed answer, as they come."""
        body = self.body(prompt, stream=True, **fields)
        async with client.stream("POST", "/inference/v1/generate", json=body) as response:
            assert response.status_code == 200

            async def choices() -> AsyncIterator[Any]:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        yield msgspec.json.decode(line.removeprefix("data: "))["choices"][0]

            yield choices()

    def body(self, prompt: list[int], *, stream: bool = False, cache_salt: str = "", priority: int = 0, **knobs: Any):
        knobs = {"max_tokens": 8, "logprobs": 1, "ignore_eos": True, **knobs}
        fields = {"token_ids": prompt, "sampling_params": knobs, "stream": stream, "priority": priority}
        salt = self.salt(cache_salt)
        return {**fields, "cache_salt": salt} if salt else fields

    def salt(self, salt: str) -> str:
        return salt

    def versions(self, choice: dict[str, Any]) -> list[tuple[int, int]]:
        """(step, tokens) runs of a choice."""
        return [(step, count) for _, _, step, count in choice["policy_versions"]]

    # -- control -------------------------------------------------------------------------------------------------------

    async def pause(self, client: httpx.AsyncClient) -> None:
        (await client.post("/pause", params={"mode": "keep"})).raise_for_status()

    async def resume(self, client: httpx.AsyncClient) -> None:
        (await client.post("/resume")).raise_for_status()

    async def update(self, client: httpx.AsyncClient, directory: Path, kv: str = "recompute") -> None:
        (await client.post("/update_weights", json={"path": str(directory), "kv": kv})).raise_for_status()

    # -- what is going on there ----------------------------------------------------------------------------------------

    async def running(self, client: httpx.AsyncClient) -> float:
        """Requests that are being computed."""
        return await self.gauge(client, "ramify_running")

    async def held(self, client: httpx.AsyncClient) -> float:
        """Requests that have come and are not answered."""
        return await self.gauge(client, "ramify_running") + await self.gauge(client, "ramify_waiting")

    async def sampled(self, client: httpx.AsyncClient) -> float:
        """Tokens sampled so far."""
        return await self.gauge(client, "ramify_sampled_tokens_total")

    async def gauge(self, client: httpx.AsyncClient, name: str) -> float:
        """A value of /metrics."""
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)
        assert found, name
        return float(found[1])


@dataclass
class VLLMTarget(Target):
    """A stock vLLM. Weights, pauses and salts go through the client's adapter, which is part of the contract."""

    adapter: VLLMAdapter = field(init=False)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        http = HttpClient(self.url, connect_timeout=5.0, max_connections=128)
        self.adapter = VLLMAdapter(self.url, http, Manifest.read(self.first).version, model_root=str(self.first))
        try:
            async with super().client() as client:
                yield client
        finally:
            await http.aclose()

    def salt(self, salt: str) -> str:
        return self.adapter.versioned_cache_salt(salt)

    def versions(self, choice: dict[str, Any]) -> list[tuple[int, int]]:
        """vLLM reports them with the last part of a stream, for all of it."""
        spans = choice["weight_versions"] or []
        found = [(PolicyVersion.parse(span["version"]), span["end"] - span["start"]) for span in spans]
        return [(version.step, count) for version, count in found if version is not None]

    async def pause(self, client: httpx.AsyncClient) -> None:
        await self.adapter.pause("keep")

    async def resume(self, client: httpx.AsyncClient) -> None:
        await self.adapter.resume()

    async def update(self, client: httpx.AsyncClient, directory: Path, kv: str = "recompute") -> None:
        update = WeightUpdate(directory, Manifest.read(directory).version, "keep" if kv == "keep" else "recompute")
        await self.adapter.update(update)

    async def running(self, client: httpx.AsyncClient) -> float:
        """Its gauges stand still while it does nothing, so give it something to do first."""
        await self.generate(client, [5], max_tokens=1)
        return await self.gauge(client, "vllm:num_requests_running")

    async def held(self, client: httpx.AsyncClient) -> float:
        return (await client.get("/load")).json()["server_load"]

    async def sampled(self, client: httpx.AsyncClient) -> float:
        return await self.gauge(client, "vllm:generation_tokens_total")


def logprobs(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]
