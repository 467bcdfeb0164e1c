"""The client against either engine: it hides which one it is."""

import asyncio

import numpy as np
import pytest

from ramify.client import ClientConfig, ClientSampling, InferenceClient
from ramify.errors import ContextOverflow, WeightsRefused
from ramify.model.version import PolicyVersion

PROMPT = [5, 17, 33, 60, 8, 91, 12, 44, 70, 23, 9]
CLOSE = 1e-3  # the two sets of weights are nats apart
FIRST, SECOND = PolicyVersion("llama", 0, 1), PolicyVersion("llama", 0, 2)


@pytest.fixture
def run(target):
    """Run `test(client)`, and leave the server with the weights it started with."""

    def runner(test):
        async def main():
            async with InferenceClient(target.url, ClientConfig(health_interval=0.5)) as client:
                try:
                    await test(client)
                finally:
                    await client.resume()
                    await client.update_weights(target.first, FIRST)

        asyncio.run(asyncio.wait_for(main(), target.patience))

    return runner


def test_samples_are_scored_as_they_were_sampled(run):
    async def check(client):
        done = await client.generate(PROMPT, ClientSampling(max_tokens=12, seed=3, ignore_eos=True), session="a")
        scored = await client.score([*PROMPT, *done.ids.tolist()], session="a")
        assert done.ids.dtype == np.int32 and done.logprobs.dtype == np.float32 and done.finish == "length"
        assert done.logprobs == pytest.approx(scored[-12:], abs=2e-4)
        assert [(run_.policy, run_.incarnation, run_.step, run_.count) for run_ in done.versions] == [(*FIRST, 12)]
        assert (done.usage.prompt, done.usage.completion) == (len(PROMPT), 12)

    run(check)


def test_a_second_turn_finds_the_prefix_of_the_first(run):
    async def check(client):
        first = await client.generate(PROMPT * 20, ClientSampling(max_tokens=4, ignore_eos=True), session="b")
        second = await client.generate([*PROMPT * 20, *first.ids.tolist()], ClientSampling(max_tokens=1), session="b")
        assert second.usage.cached >= 128

    run(check)


async def swapped_in_flight(client, target, kv):
    """Four samples that the second weights went on with; a server that had finished one before is asked again."""
    sampling = ClientSampling(max_tokens=target.flight, ignore_eos=True)
    async with target.client() as http:
        for _ in range(5):
            calls = [asyncio.create_task(client.generate(PROMPT, sampling)) for _ in range(4)]
            while await target.held(http) < 4 and not any(call.done() for call in calls):
                await asyncio.sleep(0.01)
            before = await target.sampled(http)
            while await target.sampled(http) - before < 40 and not any(call.done() for call in calls):
                await asyncio.sleep(0.01)
            await client.pause()
            (ack,) = await client.update_weights(target.second, SECOND, kv)
            assert ack.version == SECOND and 0 < ack.seconds < 60
            await client.resume()
            samples = await asyncio.gather(*calls)
            if all(len(done.versions) > 1 for done in samples):
                return samples
            await client.update_weights(target.first, FIRST)
    pytest.fail("the server was always quicker than the pause")


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_every_token_knows_its_weights(run, target, kv):
    """Told by the logprobs on both sides of where the version changes: each is what those weights give it."""

    async def check(client):
        samples = await swapped_in_flight(client, target, kv)
        for done in samples:
            assert [run_.step for run_ in done.versions] == [1, 2]
            assert sum(run_.count for run_ in done.versions) == target.flight
        fresh = await client.generate(PROMPT, ClientSampling(max_tokens=12, ignore_eos=True))
        assert [run_.step for run_ in fresh.versions] == [2]
        scored = await client.score([*PROMPT, *fresh.ids.tolist()], cache_salt=f"unused {kv}")
        assert fresh.logprobs == pytest.approx(scored[-12:], abs=2e-4)
        new = [await scores(client, done, f"unused {kv}") for done in samples]
        await client.update_weights(target.first, FIRST)
        old = [await scores(client, done, f"unused {kv} again") for done in samples]
        for done, by_old, by_new in zip(samples, old, new):
            change = done.versions[0].count
            before, after = slice(max(0, change - 8), change), slice(change, change + 8)
            assert done.logprobs[before] == pytest.approx(by_old[before], abs=CLOSE)
            assert done.logprobs[before] != pytest.approx(by_new[before], abs=CLOSE)
            assert done.logprobs[after] != pytest.approx(by_old[after], abs=CLOSE)
            if kv == "recompute":  # with `keep` the old keys and values are part of it
                assert done.logprobs[after] == pytest.approx(by_new[after], abs=CLOSE)

    run(check)


async def scores(client, done, salt):
    """What the weights that are served now give the sampled tokens."""
    return (await client.score([*PROMPT, *done.ids.tolist()], cache_salt=salt))[len(PROMPT) :]


def test_a_paused_server_holds_requests_until_it_resumes(run):
    async def check(client):
        await client.pause()
        call = asyncio.create_task(client.generate(PROMPT, ClientSampling(max_tokens=2)))
        done, _ = await asyncio.wait([call], timeout=0.3)
        assert not done
        await client.resume()
        assert (await call).ids.size >= 1  # the first token may be the last

    run(check)


def test_an_overlong_prompt_and_bad_weights_have_their_names(run, target, tmp_path):
    async def check(client):
        with pytest.raises(ContextOverflow, match=str(target.max_model_len)):
            await client.generate([5] * (target.max_model_len + 5), ClientSampling())
        with pytest.raises(WeightsRefused):
            await client.update_weights(tmp_path, SECOND)
        assert client.versions == {target.url: FIRST}

    run(check)
