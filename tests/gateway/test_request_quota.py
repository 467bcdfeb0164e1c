"""Agents that open many connections, send slow or huge bodies, or let the gateway count tokens without end.

Each rollout has a quota of its own, so the rollouts beside it are served as usual.
"""

import asyncio
import gc
import time
from urllib.parse import urlsplit

import pytest

from ramify.dialects.model_call import ModelRequest
from ramify.errors import ContextOverflow
from ramify.gateway import RolloutLimits, RolloutSession, SamplingConfig
from ramify.gateway.conversation_trie import TrieNode
from ramify.gateway.request_quota import QuotaSettings, RequestQuota
from ramify.trace import Trace
from tests.gateway.fake_client import make_session, user_request
from tests.gateway.scenario import Scenario

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


def test_slow_bodies_of_a_rollout_share_one_quota(run_scenario):
    async def check(scenario: Scenario) -> None:
        connections = [await send_part_of_body(scenario) for _ in range(20)]
        heads = [asyncio.create_task(reader.readline()) for reader, _ in connections]
        while sum(head.done() for head in heads) < 17:
            await asyncio.sleep(0.01)
        assert {head.result() for head in heads if head.done()} == {b"HTTP/1.1 429 Too Many Requests\r\n"}
        [refusal] = scenario.trace.info["refusals"]
        assert refusal["name"] == "QuotaExceeded" and refusal["count"] == 17

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

    run_scenario(["hello"], check, quota=QuotaSettings(max_bytes=MIB, request_bytes=2**16))


@pytest.mark.parametrize("path", ["/messages/count_tokens", "/responses/input_tokens", "/chat/completions"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_rendered(run_scenario, path):
    async def check(scenario: Scenario) -> None:
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

    run_scenario([], check, limits=RolloutLimits(seq_len=2048))


def count_objects(cls: type) -> int:
    gc.collect()
    return sum(isinstance(item, cls) for item in gc.get_objects())


def test_requests_that_are_counted_or_refused_leave_nothing_in_memory(run_scenario):
    async def check(scenario: Scenario) -> None:
        nodes, requests = count_objects(TrieNode), count_objects(ModelRequest)
        for number in range(20):
            body = {"messages": [{"role": "user", "content": f"{number} " * 400}]}
            assert (await scenario.post("/chat/completions/input_tokens", body)).status_code == 200
            assert (await scenario.post("/chat/completions", body)).status_code == 400
        assert count_objects(TrieNode) <= nodes + 1  # the root
        assert count_objects(ModelRequest) <= requests

    run_scenario([], check, limits=RolloutLimits(seq_len=64))


def test_a_rollout_that_used_its_time_waits():
    async def main() -> None:
        quota = RequestQuota(QuotaSettings(cpu_share=0.5, cpu_burst=0.01))
        started_at = time.monotonic()
        for is_large in (True, False):  # in a thread and in the event loop
            await quota.run(is_large, time.sleep, 0.03)
        await quota.run(False, lambda: None)
        assert time.monotonic() - started_at >= (2 * 0.03 - 0.01) / 0.5

    asyncio.run(main())


def test_large_work_of_a_rollout_runs_one_after_another_even_if_its_callers_leave():
    running = most = 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    async def main() -> None:
        quota = RequestQuota(QuotaSettings())
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(quota.run(True, work), 0.001)
        await quota.run(True, work)

    asyncio.run(main())
    assert most == 1


def test_a_harness_in_the_process_gets_the_same_refusal():
    session, client = make_session(["hi"], limits={"seq_len": 1024})
    with pytest.raises(ContextOverflow, match="1024 tokens; the prompt has 1000000 characters"):
        asyncio.run(session.generate(user_request("x" * 1_000_000)))
    assert not client.asked
