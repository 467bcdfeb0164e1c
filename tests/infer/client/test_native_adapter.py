"""The client against native servers: real weights, cancellation and weight updates."""

import asyncio
import contextlib

import numpy as np
import pytest

from ramify.core.errors import ContextOverflow, QueueFull, RequestInvalid, WeightsRefused
from ramify.infer.client import ClientConfig, ClientSampling, InferenceClient
from ramify.infer.client.http_client import send_request
from ramify.trace.version import PolicyVersion
from tests.support.models import build_core, publish_as, write_llama
from tests.support.native_server import run_server
from tests.support.processes import async_wait_until

FIRST, SECOND = PolicyVersion("llama", 0, 1), PolicyVersion("llama", 0, 2)
PROMPT = [5, 17, 33, 60, 8, 91]
CONFIG = ClientConfig(health_interval=0.2, backoff=0.02)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    home = tmp_path_factory.mktemp("weights")
    directories = {}
    for version in (FIRST, SECOND):
        source = write_llama(home / f"source-{version.step}", seed=version.step, positions=1024)
        directories[version] = publish_as(home / f"step-{version.step}", source, version)
    return directories


@pytest.fixture(scope="module")
def servers(published):
    with contextlib.ExitStack() as stack:
        cores = [
            build_core(published[FIRST], FIRST, kv_cache_tokens=8192, max_queued_requests=64, max_running_requests=16)
            for _ in range(2)
        ]
        yield [stack.enter_context(run_server(core)) for core in cores]


@contextlib.asynccontextmanager
async def connect(servers, published, config: ClientConfig = CONFIG):
    """Yield a client, and leave the servers with the weights they started with."""
    async with InferenceClient([url for url, _ in servers], config) as client:
        try:
            yield client
        finally:
            await client.resume()
            await client.update_weights(published[FIRST], FIRST)


@pytest.fixture
async def client(servers, published):
    async with connect(servers, published) as client:
        yield client


@pytest.mark.promise
async def test_sampled_logprobs_equal_scored_logprobs(client):
    done = await client.generate(PROMPT, ClientSampling(max_tokens=12, seed=3, ignore_eos=True), session="a")
    scored = await client.score([*PROMPT, *done.token_ids.tolist()], session="a")
    assert np.isnan(scored[0]) and scored.dtype == np.float32
    assert done.logprobs == pytest.approx(scored[-12:], abs=2e-4)
    assert [(run.step, run.count) for run in done.version_spans] == [(1, 12)]
    tail = await client.score([*PROMPT, *done.token_ids.tolist()], session="a", start=len(PROMPT))
    assert np.isnan(tail[: len(PROMPT)]).all() and done.logprobs == pytest.approx(tail[-12:], abs=2e-4)


async def test_a_later_turn_of_a_session_reuses_its_prefix(client):
    first = await client.generate(PROMPT * 8, ClientSampling(max_tokens=4, ignore_eos=True), session="b")
    prompt = [*PROMPT * 8, *first.token_ids.tolist(), 9]
    second = await client.generate(prompt, ClientSampling(max_tokens=1), session="b")
    assert second.server == first.server
    assert second.usage.cached_tokens >= 48


async def test_concurrent_samples_on_two_servers_equal_sequential_ones(client, servers):
    def generate(seed):
        return client.generate([seed + 3, *PROMPT], ClientSampling(max_tokens=16, seed=seed, ignore_eos=True))

    together = await asyncio.gather(*map(generate, range(64)))
    counts = [sum(done.server == url for done in together) for url, _ in servers]
    assert min(counts) >= 16 and sum(counts) == 64
    for seed in (0, 63):
        assert (await generate(seed)).token_ids.tolist() == together[seed].token_ids.tolist()


async def test_cancelled_calls_free_the_cache_of_the_engine(client, servers):
    before = [engine.core.counters.cancelled for _, engine in servers]
    calls = [
        asyncio.create_task(client.generate(PROMPT, ClientSampling(max_tokens=900, ignore_eos=True))) for _ in range(8)
    ]
    await async_wait_until(lambda: sum(len(engine.core.scheduler.running) for _, engine in servers) == 8)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert all(call.cancelled() for call in calls)
    for replica in client.servers:
        assert replica.num_in_flight == 0
        while gauge(text := (await send_request(replica.http, "GET", "/metrics")).decode(), "running"):
            await asyncio.sleep(0.01)
        assert gauge(text, "kv_blocks_free") == gauge(text, "kv_blocks")
    after = [engine.core.counters.cancelled for _, engine in servers]
    assert sum(after) - sum(before) == 8


def gauge(text: str, name: str) -> float:
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"ramify_{name} "))


async def test_invalid_requests_raise_named_failures(client):
    with pytest.raises(ContextOverflow, match=r"length is 1024 tokens.*has 2000 tokens"):
        await client.generate([5] * 2000, ClientSampling())
    with pytest.raises(RequestInvalid, match="token id 96"):
        await client.generate([96], ClientSampling())
    with pytest.raises(RequestInvalid, match="top_p"):
        await client.generate([5], ClientSampling(top_p=-1))


async def test_a_queue_that_stays_full_raises_queue_full(servers, published):
    async with connect(servers, published, CONFIG.model_copy(update={"retries": 2})) as client:
        await client.pause()
        calls = [asyncio.create_task(client.generate([5], ClientSampling(max_tokens=1))) for _ in range(129)]
        done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1 and isinstance(done.pop().exception(), QueueFull)
        await client.resume()
        assert all(completion.token_ids.size == 1 for completion in await asyncio.gather(*waiting))


@pytest.mark.parametrize("kv", ["recompute", "keep"])
async def test_requests_in_flight_continue_with_new_weights_and_report_both_versions(client, servers, published, kv):
    sampling = ClientSampling(max_tokens=400, ignore_eos=True)
    calls = [asyncio.create_task(client.generate(PROMPT, sampling)) for _ in range(6)]
    while (
        sum(len(request.logprobs) for _, engine in servers for request in engine.core.list_unfinished_requests()) < 60
    ):
        await asyncio.sleep(0.005)
    done = await client.update_weights(published[SECOND], SECOND, kv)
    assert {ack.version for ack in done} == {SECOND} and len(done) == 2
    for completion in await asyncio.gather(*calls):
        assert [run.step for run in completion.version_spans] in ([1, 2], [2])
        assert sum(run.count for run in completion.version_spans) == 400
    fresh = await client.generate(PROMPT, ClientSampling(max_tokens=2, ignore_eos=True))
    assert [run.step for run in fresh.version_spans] == [2]


async def test_refused_weights_keep_the_old_ones_and_the_servers_up(client, tmp_path):
    with pytest.raises(WeightsRefused, match=r"manifest\.json"):
        await client.update_weights(tmp_path, SECOND)
    assert set(client.versions.values()) == {FIRST} and not client.down_replicas
