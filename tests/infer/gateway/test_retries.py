"""A retry gets the reply of the original call; any other request is a new sample. With real connections and SDKs."""

import asyncio

import httpx
import openai
import pytest

from tests.support.engine import check_tokens
from tests.support.scenario import Scenario


def numbered_replies():
    """Return a script of distinct replies."""
    count = 0

    def reply(_: str) -> str:
        nonlocal count
        count += 1
        return f"reply {count}"

    return reply


def post(scenario: Scenario, text: str = "hi", **headers: str):
    body = {"model": "x", "messages": [{"role": "user", "content": text}]}
    return scenario.post("/chat/completions", body, **headers)


def text_of(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


async def wait_for_requests(scenario: Scenario, count: int) -> None:
    """Wait until the engine has received `count` requests."""
    while len(scenario.engine.requests) < count:
        await asyncio.sleep(0.002)


async def post_and_hang_up(scenario: Scenario) -> None:
    """Send a request, and close the connection when the engine has it."""
    call = asyncio.create_task(post(scenario))
    await wait_for_requests(scenario, 1)
    call.cancel()
    await asyncio.wait({call})


async def test_concurrent_equal_requests_are_separate_samples(open_scenario):
    async with open_scenario(numbered_replies()) as scenario:
        answers = await asyncio.gather(*(scenario.chat("hi") for _ in range(5)))
        texts = {answer.choices[0].message.content for answer in answers}
        assert len(texts) == 5 == scenario.session.num_turns
        assert len(scenario.trace.leaves) == 5 and len(scenario.trace.nodes) == 6
        assert scenario.reasons == ["sample"] * 4
        check_tokens(scenario.trace, scenario.engine)


async def test_a_retry_of_an_sdk_joins_the_original_call(open_scenario):
    async with open_scenario(numbered_replies()) as scenario:
        scenario.engine.gate.clear()
        sent, twice = [], asyncio.Event()

        async def count(request) -> None:
            sent.append(request.headers["x-stainless-retry-count"])
            if len(sent) == 2:
                twice.set()

        http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [count]})
        client = scenario.openai(timeout=0.3, max_retries=5, http_client=http)
        messages = [{"role": "user", "content": "hi"}]
        call = asyncio.create_task(client.chat.completions.create(model="x", messages=messages))
        await twice.wait()
        scenario.engine.gate.set()
        answer = await call
        await http.aclose()
        assert sent[:2] == ["0", "1"]
        assert answer.choices[0].message.content == "reply 1"
        assert len(scenario.engine.requests) == 1 == scenario.session.num_turns
        assert not scenario.reasons


async def test_requests_with_one_idempotency_key_share_one_call(open_scenario):
    async with open_scenario(numbered_replies()) as scenario:
        key = {"idempotency-key": "k1"}
        scenario.engine.gate.clear()
        calls = [asyncio.create_task(post(scenario, **key)) for _ in range(2)]
        await wait_for_requests(scenario, 1)
        scenario.engine.gate.set()
        answers = [await call for call in calls] + [await post(scenario, **key)]
        assert {text_of(answer) for answer in answers} == {"reply 1"}
        assert text_of(await post(scenario, **{"idempotency-key": "k2"})) == "reply 2"
        assert scenario.session.num_turns == 2


async def test_a_retry_of_a_delivered_reply_gets_the_newest_equal_reply(open_scenario):
    async with open_scenario(numbered_replies()) as scenario:
        first, retry = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}
        assert text_of(await post(scenario, **first)) == "reply 1"
        assert text_of(await post(scenario, **retry)) == "reply 1"
        assert text_of(await post(scenario, **first)) == "reply 2"
        assert text_of(await post(scenario, "never seen", **retry)) == "reply 3"
        assert scenario.session.num_turns == 3


async def test_an_undelivered_reply_is_returned_to_an_equal_request(open_scenario):
    async with open_scenario(numbered_replies()) as scenario:
        scenario.engine.gate.clear()
        await post_and_hang_up(scenario)
        scenario.engine.gate.set()
        while not scenario.session.num_turns:  # recorded although no client waits for it
            await asyncio.sleep(0.002)
        assert text_of(await post(scenario)) == "reply 1"
        assert text_of(await post(scenario)) == "reply 2"


async def test_a_call_is_cancelled_if_its_client_does_not_return(open_scenario):
    async with open_scenario(numbered_replies(), reconnect_timeout=0.05) as scenario:
        scenario.engine.gate.clear()
        await post_and_hang_up(scenario)
        await scenario.engine.disconnected.wait()
        scenario.engine.gate.set()
        assert text_of(await post(scenario)) == "reply 1"
        assert scenario.session.num_turns == 1 and len(scenario.engine.requests) == 2


async def test_a_retry_of_a_failed_call_starts_a_new_call(open_scenario):
    async with open_scenario(numbered_replies()) as scenario:
        with pytest.raises(openai.BadRequestError):
            await scenario.chat("hi", temperature=-1)
        assert text_of(await post(scenario, **{"x-stainless-retry-count": "1"})) == "reply 1"
