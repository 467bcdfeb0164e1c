"""Many clients, random hang-ups and weight updates for a while: no error, nothing leaks. Minutes with RAMIFY_FULL=1."""

import asyncio
import os
import random
import time

import httpx
import psutil
import pytest

from ramify.model.version import PolicyVersion
from tests.infer.llama import build_core, publish_as, write_llama
from tests.infer.serving import served

FULL = bool(os.environ.get("RAMIFY_FULL"))
SECONDS, UPDATES, CLIENTS = (120, 20, 64) if FULL else (5, 4, 64)


@pytest.mark.timeout(SECONDS + 120)
def test_the_server_holds_many_clients_through_cancels_and_updates(tmp_path):
    directories = []
    for step in (1, 2):
        source = write_llama(tmp_path / f"source-{step}", seed=step)
        directories.append(publish_as(tmp_path / f"v{step}", source, PolicyVersion("llama", 0, step)))
    core = build_core(directories[0], kv_tokens=600, max_running=32, max_batch_tokens=128)
    memory: list[tuple[float, int]] = []
    failures: list[str] = []

    async def client_life(client: httpx.AsyncClient, number: int, end: float) -> None:
        rng = random.Random(number)
        while time.monotonic() < end:
            prompt = [7] * rng.randrange(1, 60) + [rng.randrange(3, 96) for _ in range(rng.randrange(1, 30))]
            sampling = {"max_tokens": rng.randrange(1, 160), "ignore_eos": True, "logprobs": 1}
            ask = client.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling})
            patience = rng.uniform(0.0, 0.3) if rng.random() < 0.2 else 60.0
            try:
                answer = await asyncio.wait_for(ask, patience)
                if answer.status_code != 200 or len(answer.json()["choices"][0]["token_ids"]) != sampling["max_tokens"]:
                    failures.append(answer.text)
            except TimeoutError:
                if patience == 60.0:
                    failures.append("a request took a minute")

    async def updates(client: httpx.AsyncClient, end: float) -> None:
        for number in range(UPDATES):
            await asyncio.sleep(max(0.0, (end - time.monotonic()) / (UPDATES - number + 1)))
            body = {"path": str(directories[(number + 1) % 2]), "kv": ("recompute", "keep")[number // 2 % 2]}
            answer = await client.post("/update_weights", json=body)
            if answer.status_code != 200:
                failures.append(answer.text)
            memory.append((time.monotonic(), psutil.Process().memory_info().rss))

    async def main(url: str) -> None:
        limits = httpx.Limits(max_connections=CLIENTS + 8, keepalive_expiry=30)  # before the server gives up on one
        async with httpx.AsyncClient(base_url=url, timeout=90, limits=limits) as client:
            end = time.monotonic() + SECONDS
            await asyncio.gather(updates(client, end), *(client_life(client, n, end) for n in range(CLIENTS)))
            while core.has_unfinished_requests:  # the cancels of the last clients are on their way
                await asyncio.sleep(0.02)

    with served(core) as (url, engine):
        asyncio.run(asyncio.wait_for(main(url), SECONDS + 100))
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
