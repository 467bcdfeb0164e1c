"""What every inference server of Ramify does, asked over HTTP only."""

import asyncio

import pytest

from tests.contract.target import logprobs

pytestmark = pytest.mark.process

CLOSE = 2e-4
PROMPT = [5, 17, 33, 60, 8, 91, 12, 44, 70, 23, 9]
LONG = [(11 * index) % 90 + 3 for index in range(200)]


async def test_health_and_models(target, http):
    assert (await http.get("/health")).status_code == 200
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert card["max_model_len"] == target.max_model_len
    assert (await http.get("/metrics")).status_code == 200


async def test_generate_returns_ids_and_a_logprob_for_each(target, http):
    (choice,) = (await target.generate(http, PROMPT, max_tokens=9))["choices"]
    assert len(choice["token_ids"]) == len(logprobs(choice)) == 9
    assert choice["finish_reason"] == "length"
    assert all(0 <= token < target.vocab for token in choice["token_ids"])
    assert all(logprob <= 0 for logprob in logprobs(choice))
    assert target.versions(choice) == [(1, 9)]


async def test_logprobs_are_after_temperature_over_the_whole_vocabulary(target, http):
    """Between two tokens of one place the difference is that at temperature 1, divided by T."""
    for temperature in (0.5, 2.0):
        sampled = await asyncio.gather(
            *(target.generate(http, PROMPT, max_tokens=1, seed=seed, temperature=temperature) for seed in range(12))
        )
        found = {one["choices"][0]["token_ids"][0]: logprobs(one["choices"][0])[0] for one in sampled}
        plain = {token: (await rescored(target, http, [*PROMPT, token]))[-1] for token in found}
        first = next(iter(found))
        for token in found:
            ratio = (plain[token] - plain[first]) / temperature
            assert found[token] - found[first] == pytest.approx(ratio, abs=CLOSE)
    assert len(found) > 1


async def rescored(target, http, ids: list[int]) -> list[float]:
    answer = await target.generate(http, ids, max_tokens=1, prompt_logprobs=1)
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    return [entry[str(token)]["logprob"] for entry, token in zip(rest, ids[1:])]


async def test_a_seed_decides_the_tokens(target, http):
    answers = [await target.generate(http, PROMPT, seed=seed, max_tokens=24) for seed in (7, 7, 8)]
    first, same, other = (answer["choices"][0]["token_ids"] for answer in answers)
    assert first == same != other


async def test_temperature_zero_is_greedy(target, http):
    answers = [await target.generate(http, PROMPT, temperature=0.0, seed=seed, max_tokens=16) for seed in (1, 2)]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]


async def test_a_stop_id_ends_the_reply_and_is_part_of_it(target, http):
    (free,) = (await target.generate(http, PROMPT, seed=5, max_tokens=12))["choices"]
    stop = free["token_ids"][6]
    (stopped,) = (await target.generate(http, PROMPT, seed=5, max_tokens=12, stop_token_ids=[stop]))["choices"]
    assert stopped["token_ids"] == free["token_ids"][: free["token_ids"].index(stop) + 1]
    assert len(logprobs(stopped)) == len(stopped["token_ids"])
    assert stopped["finish_reason"] == "stop"


async def test_a_client_that_hangs_up_is_cancelled(target, http):
    for _ in range(5):  # on a busy machine a server may have finished before it hears of it
        before = await target.sampled(http)
        async with target.streaming(http, PROMPT, max_tokens=4000) as choices:
            await anext(choices)
        await until(lambda: target.running(http), 0)
        if await target.sampled(http) - before < 4000:
            return
    pytest.fail("a request went on to its end although its client was gone")


async def until(read, value: float) -> None:
    """Poll until `read()` returns `value`."""
    async with asyncio.timeout(120):
        while await read() != value:
            await asyncio.sleep(0.02)


async def test_pause_holds_requests_in_flight_and_resume_lets_them_go_on(target, http):
    straight = (await target.generate(http, PROMPT, seed=2, max_tokens=target.flight))["choices"][0]["token_ids"]
    async with target.streaming(http, PROMPT, seed=2, max_tokens=target.flight) as choices:
        tokens = (await anext(choices))["token_ids"]
        await target.pause(http)
        before = await target.held(http)  # only now: vLLM may count one that was hung up for a while
        queued = asyncio.ensure_future(target.generate(http, PROMPT, max_tokens=2))
        while await target.held(http) == before:
            await asyncio.sleep(0.02)
        held = await target.sampled(http)
        for _ in range(5):
            assert (await http.get("/health")).status_code == 200
            assert await target.sampled(http) == held
        assert not queued.done()
        await target.resume(http)
        async for choice in choices:
            tokens += choice["token_ids"]
    assert tokens == straight
    assert len((await queued)["choices"][0]["token_ids"]) == 2


async def test_a_weight_update_changes_outputs_and_version(target, http):
    answers = []
    for directory in (None, target.second, target.first):
        if directory is not None:
            await target.update(http, directory)
        answers.append((await target.generate(http, PROMPT, temperature=0.0, max_tokens=16))["choices"][0])
    old, new, back = answers
    assert old["token_ids"] == back["token_ids"] != new["token_ids"]
    assert [target.versions(answer) for answer in answers] == [[(1, 16)], [(2, 16)], [(1, 16)]]


@pytest.mark.promise
@pytest.mark.parametrize("kv", ["recompute", "keep"])
async def test_no_prefix_is_stale_after_a_weight_update(target, http, kv):
    await target.generate(http, LONG, max_tokens=1)  # the first weights' keys and values are in the cache
    async with target.streaming(http, LONG, max_tokens=3500) as choices:
        await anext(choices)  # and a request that holds them is running
        await target.update(http, target.second, kv)
        reused = (await target.generate(http, LONG, max_tokens=8, temperature=0.0))["choices"][0]
        fresh = (await target.generate(http, LONG, max_tokens=8, temperature=0.0, cache_salt=f"fresh {kv}"))["choices"][
            0
        ]
    assert reused["token_ids"] == fresh["token_ids"]
    assert logprobs(reused) == pytest.approx(logprobs(fresh), abs=CLOSE)


async def test_an_overlong_prompt_is_refused_with_both_lengths(target, http):
    length = target.max_model_len + 5
    response = await http.post("/inference/v1/generate", json=target.body([5] * length))
    assert response.status_code == 400
    assert str(length) in response.text and str(target.max_model_len) in response.text


async def test_64_clients_at_once_get_what_they_get_alone(target, http):
    def ask(seed: int):
        return target.generate(http, [seed + 3, *PROMPT], seed=seed, max_tokens=24)

    together = await asyncio.gather(*map(ask, range(64)))
    assert all(len(answer["choices"][0]["token_ids"]) == 24 for answer in together)
    for seed in (0, 31, 63):
        alone = await ask(seed)
        assert alone["choices"][0]["token_ids"] == together[seed]["choices"][0]["token_ids"]
