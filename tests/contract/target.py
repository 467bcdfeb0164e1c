"""The server under test, as the contract sees it: a base URL, and the few things each engine spells its own way."""

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec


@dataclass(frozen=True)
class Target:
    """A server and two published sets of weights it can be given, `first` being the one it started with."""

    url: str
    first: Path
    second: Path
    max_model_len: int
    vocab: int

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=128, max_keepalive_connections=128)
        return httpx.AsyncClient(base_url=self.url, timeout=60.0, limits=limits)

    async def pause(self, client: httpx.AsyncClient) -> None:
        (await client.post("/pause", params={"mode": "keep"})).raise_for_status()

    async def resume(self, client: httpx.AsyncClient) -> None:
        (await client.post("/resume")).raise_for_status()

    async def update(self, client: httpx.AsyncClient, directory: Path, kv: str = "recompute") -> None:
        (await client.post("/update_weights", json={"path": str(directory), "kv": kv})).raise_for_status()

    async def gauge(self, client: httpx.AsyncClient, name: str) -> float:
        """A value of /metrics."""
        found = re.search(rf"^ramify_{name} (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)
        assert found, name
        return float(found[1])


async def generate(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """The whole answer of the generate endpoint."""
    response = await client.post("/inference/v1/generate", json=body(prompt, **fields))
    assert response.status_code == 200, response.text
    return response.json()


@contextlib.asynccontextmanager
async def streaming(client: httpx.AsyncClient, prompt: list[int], **fields: Any) -> AsyncIterator[AsyncIterator[Any]]:
    """The choices of a streamed answer, as they come."""
    async with client.stream("POST", "/inference/v1/generate", json=body(prompt, stream=True, **fields)) as response:
        assert response.status_code == 200

        async def choices() -> AsyncIterator[Any]:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield msgspec.json.decode(line.removeprefix("data: "))["choices"][0]

        yield choices()


def body(prompt: list[int], *, stream: bool = False, cache_salt: str | None = None, priority: int = 0, **sampling: Any):
    sampling = {"max_tokens": 8, "logprobs": 1, "ignore_eos": True, **sampling}
    fields = {"token_ids": prompt, "sampling_params": sampling, "stream": stream, "priority": priority}
    return {**fields, "cache_salt": cache_salt} if cache_salt else fields


def logprobs(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def versions(choice: dict[str, Any]) -> list[tuple[int, int]]:
    """(step, tokens) runs of a choice."""
    return [(step, count) for _, _, step, count in choice["policy_versions"]]
