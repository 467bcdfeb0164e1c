"""Who asks again gets the same answer; who asks anew gets a new sample. Over real connections, with real SDKs."""

import asyncio

import httpx
import openai
import pytest

from tests.gateway.engine import check_tokens
from tests.gateway.stage import Stage


def numbered():
    """Replies that can be told apart."""
    count = 0

    def reply(_: str) -> str:
        nonlocal count
        count += 1
        return f"reply {count}"

    return reply


def post(stage: Stage, text: str = "hi", *, timeout: float = 20, **headers: str):
    body = {"model": "x", "messages": [{"role": "user", "content": text}]}
    return stage.post("/chat/completions", body, timeout=timeout, **headers)


def text_of(response: httpx.Response) -> str:
    return response.json()["choices"][0]["message"]["content"]


async def asked_for(stage: Stage, count: int) -> None:
    """Until the engine was asked this often."""
    while len(stage.engine.asked) < count:
        await asyncio.sleep(0.002)


def test_five_equal_parallel_requests_are_five_samples(play):
    async def act(stage: Stage) -> None:
        answers = await asyncio.gather(*(stage.chat("hi") for _ in range(5)))
        texts = {answer.choices[0].message.content for answer in answers}
        assert len(texts) == 5 == stage.session.num_turns
        assert len(stage.trace.leaves) == 5 and len(stage.trace.nodes) == 6
        assert stage.reasons == ["sample"] * 4
        check_tokens(stage.trace, stage.engine)

    play(numbered(), act)


def test_an_sdk_that_times_out_and_tries_again_joins_its_first_call(play):
    async def act(stage: Stage) -> None:
        stage.engine.gate.clear()
        sent, twice = [], asyncio.Event()

        async def count(request) -> None:
            sent.append(request.headers["x-stainless-retry-count"])
            if len(sent) == 2:
                twice.set()

        http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [count]})
        client = stage.openai(timeout=0.3, max_retries=5, http_client=http)
        messages = [{"role": "user", "content": "hi"}]
        call = asyncio.create_task(client.chat.completions.create(model="x", messages=messages))
        await twice.wait()
        stage.engine.gate.set()
        answer = await call
        await http.aclose()
        assert sent[:2] == ["0", "1"]
        assert answer.choices[0].message.content == "reply 1"
        assert len(stage.engine.asked) == 1 == stage.session.num_turns
        assert not stage.reasons

    play(numbered(), act)


def test_an_idempotency_key_is_one_call_while_it_runs_and_afterwards(play):
    async def act(stage: Stage) -> None:
        key = {"idempotency-key": "k1"}
        stage.engine.gate.clear()
        calls = [asyncio.create_task(post(stage, **key)) for _ in range(2)]
        await asked_for(stage, 1)
        stage.engine.gate.set()
        answers = [await call for call in calls] + [await post(stage, **key)]
        assert {text_of(answer) for answer in answers} == {"reply 1"}
        assert text_of(await post(stage, **{"idempotency-key": "k2"})) == "reply 2"
        assert stage.session.num_turns == 2

    play(numbered(), act)


def test_a_retry_of_an_answer_that_was_delivered_gets_the_newest_equal_one(play):
    async def act(stage: Stage) -> None:
        first, again = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}
        assert text_of(await post(stage, **first)) == "reply 1"
        assert text_of(await post(stage, **again)) == "reply 1"
        assert text_of(await post(stage, **first)) == "reply 2"
        assert text_of(await post(stage, "never seen", **again)) == "reply 3"
        assert stage.session.num_turns == 3

    play(numbered(), act)


def test_an_answer_whose_client_was_gone_is_given_to_an_equal_request(play):
    async def act(stage: Stage) -> None:
        stage.engine.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            await post(stage, timeout=0.2)
        stage.engine.gate.set()
        while not stage.session.num_turns:  # nobody waits for it, and it is recorded
            await asyncio.sleep(0.002)
        assert text_of(await post(stage)) == "reply 1"
        assert text_of(await post(stage)) == "reply 2"

    play(numbered(), act)


def test_sampling_for_a_client_that_does_not_come_back_is_given_up(play):
    async def act(stage: Stage) -> None:
        stage.engine.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            await post(stage, timeout=0.2)
        await stage.engine.hung_up.wait()
        stage.engine.gate.set()
        assert text_of(await post(stage)) == "reply 1"
        assert stage.session.num_turns == 1 and len(stage.engine.asked) == 2

    play(numbered(), act, abandon_after=0.05)


def test_a_call_that_failed_is_made_anew_by_a_retry(play):
    async def act(stage: Stage) -> None:
        with pytest.raises(openai.BadRequestError):
            await stage.chat("hi", temperature=-1)
        assert text_of(await post(stage, **{"x-stainless-retry-count": "1"})) == "reply 1"

    play(numbered(), act)
