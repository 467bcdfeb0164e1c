"""The client behaves the same with either engine."""

import asyncio

import numpy as np
import pytest

from ramify.core.errors import ContextOverflow, RequestInvalid, WeightsRefused
from ramify.infer.client import ClientSampling
from ramify.trace.version import PolicyVersion

pytestmark = pytest.mark.process

PROMPT = [5, 17, 33, 60, 8, 91, 12, 44, 70, 23, 9]
CLOSE = 1e-3  # the two sets of weights are nats apart
FIRST, SECOND = PolicyVersion("llama", 0, 1), PolicyVersion("llama", 0, 2)


@pytest.mark.promise
async def test_sampled_logprobs_equal_scored_logprobs(client):
    done = await client.generate(PROMPT, ClientSampling(max_tokens=12, seed=3, ignore_eos=True), session="a")
    scored = await client.score([*PROMPT, *done.token_ids.tolist()], session="a")
    assert done.token_ids.dtype == np.int32 and done.logprobs.dtype == np.float32 and done.finish_reason == "length"
    assert done.logprobs == pytest.approx(scored[-12:], abs=2e-4)
    assert [(run_.policy, run_.incarnation, run_.step, run_.count) for run_ in done.version_spans] == [(*FIRST, 12)]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(PROMPT), 12)
    tail = await client.score([*PROMPT, *done.token_ids.tolist()], start=len(PROMPT))
    assert np.isnan(tail[: len(PROMPT)]).all() and tail[-12:] == pytest.approx(scored[-12:], abs=2e-4)


async def test_the_likeliest_tokens_of_a_prompt_are_in_order_and_have_its_logprobs(client):
    logprobs, top = await client.score_top(PROMPT, 5)
    scored = await client.score(PROMPT)
    assert logprobs[1:] == pytest.approx(scored[1:], abs=2e-4)
    assert top.shape == (len(PROMPT), 5)
    assert (np.diff(top["logprob"][1:], axis=1) <= 0).all()
    for token, logprob, row in zip(PROMPT[1:], logprobs[1:], top[1:]):
        expected = row["logprob"][row["token"] == token]
        assert expected == pytest.approx(logprob, abs=2e-4) if len(expected) else logprob <= row["logprob"][-1]


async def test_a_second_turn_reuses_the_prefix_of_the_first(client):
    first = await client.generate(PROMPT * 20, ClientSampling(max_tokens=4, ignore_eos=True), session="b")
    second = await client.generate([*PROMPT * 20, *first.token_ids.tolist()], ClientSampling(max_tokens=1), session="b")
    assert second.usage.cached_tokens >= 128


async def sample_across_update(client, target, kv):
    """Return four samples that span a weight update; try again if one was finished before it."""
    sampling = ClientSampling(max_tokens=target.flight, ignore_eos=True)
    async with target.client() as http:
        for _ in range(5):
            calls = [asyncio.create_task(client.generate(PROMPT, sampling)) for _ in range(4)]
            while await target.held(http) < 4 and not any(call.done() for call in calls):
                await asyncio.sleep(0.01)
            before = await target.sampled(http)
            while await target.sampled(http) - before < 40 and not any(call.done() for call in calls):
                await asyncio.sleep(0.01)
            await target.pause(http)
            (seconds,) = (await client.update_weights(target.second, SECOND, kv)).values()
            assert 0 < seconds < 60
            await target.resume(http)
            samples = await asyncio.gather(*calls)
            if all(len(done.version_spans) > 1 for done in samples):
                return samples
            await client.update_weights(target.first, FIRST)
    pytest.fail("the samples were always finished before the pause")


@pytest.mark.promise
@pytest.mark.parametrize("kv", ["recompute", "keep"])
async def test_every_token_has_the_version_that_sampled_it(client, target, kv):
    """On both sides of the version change, the logprobs must match the reported version."""
    samples = await sample_across_update(client, target, kv)
    for done in samples:
        assert [run_.step for run_ in done.version_spans] == [1, 2]
        assert sum(run_.count for run_ in done.version_spans) == target.flight
    fresh = await client.generate(PROMPT, ClientSampling(max_tokens=12, ignore_eos=True))
    assert [run_.step for run_ in fresh.version_spans] == [2]
    scored = await client.score([*PROMPT, *fresh.token_ids.tolist()], cache_salt=f"unused {kv}")
    assert fresh.logprobs == pytest.approx(scored[-12:], abs=2e-4)
    new = [await score_sample(client, done, f"unused {kv}") for done in samples]
    await client.update_weights(target.first, FIRST)
    old = [await score_sample(client, done, f"unused {kv} again") for done in samples]
    for done, by_old, by_new in zip(samples, old, new):
        change = done.version_spans[0].count
        before, after = slice(max(0, change - 8), change), slice(change, change + 8)
        assert done.logprobs[before] == pytest.approx(by_old[before], abs=CLOSE)
        assert done.logprobs[before] != pytest.approx(by_new[before], abs=CLOSE)
        assert done.logprobs[after] != pytest.approx(by_old[after], abs=CLOSE)
        if kv == "recompute":  # with `keep` the old keys and values are part of it
            assert done.logprobs[after] == pytest.approx(by_new[after], abs=CLOSE)


async def score_sample(client, done, salt):
    """Return the logprobs of the sampled tokens under the current weights."""
    return (await client.score([*PROMPT, *done.token_ids.tolist()], cache_salt=salt))[len(PROMPT) :]


async def test_invalid_requests_and_bad_weights_raise_named_failures(client, target, tmp_path):
    with pytest.raises(ContextOverflow, match=str(target.max_model_len)):
        await client.generate([5] * (target.max_model_len + 5), ClientSampling())
    with pytest.raises(RequestInvalid, match=f"token id {target.vocab}"):
        await client.generate([target.vocab], ClientSampling())
    with pytest.raises(RequestInvalid, match="top_p"):
        await client.generate([5], ClientSampling(top_p=-1))
    with pytest.raises(WeightsRefused):
        await client.update_weights(tmp_path, SECOND)
    assert client.versions == {target.url: FIRST}
