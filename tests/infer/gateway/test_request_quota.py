"""Agents that open many connections, send slow or huge bodies, or let the gateway count tokens without end.

Each rollout has a quota of its own, so the rollouts beside it are served as usual.
"""

import asyncio
import gc
import gzip
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from ramify.core.errors import ContextOverflow
from ramify.infer.dialects.model_call import ModelRequest
from ramify.infer.gateway import RolloutLimits, RolloutSession, SamplingConfig
from ramify.infer.gateway.conversation_trie import TrieNode
from ramify.infer.gateway.request_quota import MAX_RENDERED_CHARS, QuotaSettings, RequestQuota
from ramify.trace import Trace
from tests.support.scenario import Scenario, make_session, user_request

MIB = 2**20
PART = b'{"messages": [{"role": "user", "content": "' + b"x" * (MIB // 4)


async def send_part_of_body(scenario: Scenario) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the head and the start of a body whose rest never comes."""
    url = urlsplit(scenario.endpoint.base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = (
        f"POST /v1/messages/count_tokens HTTP/1.1\r\nhost: {url.netloc}\r\nx-api-key: {scenario.endpoint.api_key}\r\n"
    )
    writer.write(f"{head}content-length: {MIB}\r\n\r\n".encode() + PART)
    return reader, writer


async def test_slow_bodies_of_a_rollout_share_one_quota(open_scenario):
    async with open_scenario(["hello"], quota=QuotaSettings(max_bytes=2 * MIB, max_requests=8)) as scenario:
        connections = [await send_part_of_body(scenario) for _ in range(20)]
        heads = [asyncio.create_task(reader.readline()) for reader, _ in connections]
        while sum(head.done() for head in heads) < 12:
            await asyncio.sleep(0.01)
        assert {head.result() for head in heads if head.done()} == {b"HTTP/1.1 429 Too Many Requests\r\n"}
        [refusal] = scenario.trace.info["refusals"]
        assert refusal["name"] == "QuotaExceeded" and refusal["count"] == 12

        neighbour = RolloutSession(Trace(id="t2"), scenario.policy, sampling=SamplingConfig(), limits=RolloutLimits())
        key = scenario.gateway.register(neighbour).api_key
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = await scenario.post("/chat/completions", body, authorization=f"Bearer {key}")
        assert answer.status_code == 200, answer.text
        scenario.gateway.unregister(neighbour)

        for _, writer in connections:
            writer.close()
        while (answer := await scenario.post("/chat/completions/input_tokens", body)).status_code == 429:
            await asyncio.sleep(0.01)
        assert answer.status_code == 200, answer.text
        for head in heads:
            head.cancel()


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_bodies_for_which_there_is_no_room_wait_instead_of_being_refused(open_scenario, is_chunked):
    async with open_scenario([], quota=QuotaSettings(max_bytes=MIB)) as scenario:

        async def count(number: int) -> int:
            body = {
                "messages": [{"role": "user", "content": f"{number} {'x' * 2000}"}],
                "metadata": {"": "y" * 300_000},
            }
            data = json.dumps(body).encode()
            content = split(data) if is_chunked else data
            headers = {"authorization": f"Bearer {scenario.endpoint.api_key}"}
            url = scenario.endpoint.base_url + "/chat/completions/input_tokens"
            return (await scenario.servers.http.post(url, content=content, headers=headers)).status_code

        assert await asyncio.gather(*map(count, range(8))) == [200] * 8


async def split(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 2**16):
        yield data[start : start + 2**16]


async def test_a_body_over_the_limit_is_refused(open_scenario):
    async with open_scenario([], quota=QuotaSettings(max_bytes=MIB)) as scenario:
        body = json.dumps({"messages": [], "metadata": {"": "y" * MIB}}).encode()
        for data, headers in ((body, {}), (gzip.compress(body), {"content-encoding": "gzip"})):
            answer = await scenario.post("/chat/completions", data, **headers)
            assert answer.status_code == 400 and "larger than 1048576 bytes" in answer.text, answer.text


async def test_large_work_of_all_rollouts_of_a_gateway_shares_the_rendered_characters(open_scenario):
    async with open_scenario([]) as scenario:
        sessions = [
            RolloutSession(Trace(id=f"n{number}"), scenario.policy, sampling=SamplingConfig(), limits=RolloutLimits())
            for number in range(4)
        ]
        running = most = 0

        def render() -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            time.sleep(0.02)
            running -= 1

        for session in sessions:
            scenario.gateway.register(session)
        await asyncio.gather(*(session.quota.run(True, MAX_RENDERED_CHARS // 2, render) for session in sessions))
        assert most <= 2
        await asyncio.gather(*(session.quota.run(True, 2 * MAX_RENDERED_CHARS, render) for session in sessions))
        for session in sessions:
            scenario.gateway.unregister(session)


def burn(seconds: float) -> None:
    """Use this much time of a core."""
    started_at = time.thread_time()
    while time.thread_time() - started_at < seconds:
        pass


async def test_waiting_costs_no_time():
    quota = RequestQuota(QuotaSettings(cpu_share=1e-9, cpu_burst=0.02))
    for is_large in (True, False):
        await quota.run(is_large, 0, time.sleep, 0.05)
    async with asyncio.timeout(20):
        await quota.run(False, 0, lambda: None)


@pytest.mark.parametrize("path", ["/messages/count_tokens", "/responses/input_tokens", "/chat/completions"])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_rendered(open_scenario, path):
    async with open_scenario([], limits=RolloutLimits(seq_len=2048)) as scenario:
        text = "word " * 200_000
        tool = {"name": "f", "type": "function", "description": text, "parameters": {}, "input_schema": {}}
        message = {"role": "user", "content": text}
        for body in (
            {"messages": [message], "input": [message]},
            {"messages": [], "input": "hi", "tools": [{**tool, "function": tool}]},
            {"messages": [0] * 100_000, "input": [0] * 100_000},
        ):
            answer = await scenario.post(path, body)
            assert answer.status_code == 400 and "maximum context length is 2048 tokens" in answer.text, answer.text
        assert {refusal["name"] for refusal in scenario.trace.info["refusals"]} == {"ContextOverflow"}


def count_objects() -> Counter[type]:
    gc.collect()
    return Counter(map(type, gc.get_objects()))


async def test_requests_that_are_counted_or_refused_leave_nothing_in_memory(open_scenario):
    async with open_scenario([], limits=RolloutLimits(seq_len=64)) as scenario:
        before = count_objects()
        for number in range(20):
            body = {"messages": [{"role": "user", "content": f"{number} " * 400}]}
            assert (await scenario.post("/chat/completions/input_tokens", body)).status_code == 200
            assert (await scenario.post("/chat/completions", body)).status_code == 400
        after = count_objects()
        assert after[TrieNode] <= before[TrieNode] + 1  # the root
        assert after[ModelRequest] <= before[ModelRequest]


async def test_a_rollout_that_used_its_time_waits():
    quota = RequestQuota(QuotaSettings(cpu_share=0.5, cpu_burst=0.01))
    started_at = time.monotonic()
    for is_large in (True, False):  # in a thread and in the event loop
        await quota.run(is_large, 0, burn, 0.03)
    await quota.run(False, 0, lambda: None)
    assert time.monotonic() - started_at >= (2 * 0.03 - 0.01) / 0.5


async def test_large_work_of_a_rollout_runs_one_after_another_even_if_its_callers_leave():
    running = most = 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    quota = RequestQuota(QuotaSettings())
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(quota.run(True, 0, work), 0.001)
    await quota.run(True, 0, work)
    assert most == 1


async def test_a_harness_in_the_process_gets_the_same_refusal():
    session, client = make_session(["hi"], limits={"seq_len": 1024})
    with pytest.raises(ContextOverflow, match="1024 tokens; the prompt has 1000000 characters"):
        await session.generate(user_request("x" * 1_000_000))
    assert not client.requests
