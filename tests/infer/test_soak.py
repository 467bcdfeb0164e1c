"""Many clients with random disconnects and weight updates: no error, nothing leaks. Minutes with RAMIFY_FULL=1."""

import asyncio
import os
import random
import time

import httpx
import psutil
import pytest

from ramify.trace.version import PolicyVersion
from tests.support.models import build_core, publish_as, write_llama
from tests.support.native_server import run_server

FULL = bool(os.environ.get("RAMIFY_FULL"))
SECONDS, UPDATES, CLIENTS = (120, 20, 64) if FULL else (0.5, 4, 48)


@pytest.mark.timeout(SECONDS + 120)
async def test_server_survives_cancels_and_updates(tmp_path):
    directories = []
    for step in (1, 2):
        source = write_llama(tmp_path / f"source-{step}", seed=step)
        directories.append(publish_as(tmp_path / f"v{step}", source, PolicyVersion("llama", 0, step)))
    core = build_core(directories[0], kv_cache_tokens=600, max_running_requests=32, max_num_batched_tokens=128)
    memory: list[tuple[float, int]] = []
    failures: list[str] = []

    async def send_requests(client: httpx.AsyncClient, seed: int, end: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end or not (core.counters.cancelled and core.counters.preemptions):
            prompt = [7] * rng.randrange(1, 60) + [rng.randrange(3, 96) for _ in range(rng.randrange(1, 30))]
            sampling = {"max_tokens": rng.randrange(1, 160), "ignore_eos": True, "logprobs": 1}
            request = client.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling})
            timeout = rng.uniform(0.0, 0.3) if rng.random() < 0.2 else 60.0
            try:
                response = await asyncio.wait_for(request, timeout)
                if (
                    response.status_code != 200
                    or len(response.json()["choices"][0]["token_ids"]) != sampling["max_tokens"]
                ):
                    failures.append(response.text)
            except TimeoutError:
                if timeout == 60.0:
                    failures.append("a request took a minute")

    async def update_weights(client: httpx.AsyncClient, end: float) -> None:
        for index in range(UPDATES):
            await asyncio.sleep(max(0.0, (end - time.monotonic()) / (UPDATES - index + 1)))
            body = {"path": str(directories[(index + 1) % 2]), "kv": ("recompute", "keep")[index // 2 % 2]}
            response = await client.post("/update_weights", json=body)
            if response.status_code != 200:
                failures.append(response.text)
            memory.append((time.monotonic(), psutil.Process().memory_info().rss))

    with run_server(core) as (url, engine):
        limits = httpx.Limits(max_connections=CLIENTS + 8, keepalive_expiry=30)  # shorter than the server's keep-alive
        client = httpx.AsyncClient(base_url=url, timeout=90, limits=limits)
        async with asyncio.timeout(SECONDS + 100), client:
            end = time.monotonic() + SECONDS
            await asyncio.gather(
                update_weights(client, end), *(send_requests(client, seed, end) for seed in range(CLIENTS))
            )
            while core.has_unfinished_requests:  # the last cancels may still be queued
                await asyncio.sleep(0.02)
        assert engine.failure is None
    counters = core.counters
    print(counters)
    assert not failures, failures[:3]
    assert core.pool.num_free_blocks == core.pool.num_usable_blocks
    assert counters.swaps == UPDATES
    assert counters.cancelled and counters.recomputes and counters.kept and counters.preemptions
    if FULL:
        quarter = len(memory) // 4
        second = max(rss for _, rss in memory[quarter : 2 * quarter])
        last = max(rss for _, rss in memory[-quarter:])
        assert last <= 1.05 * second, memory
