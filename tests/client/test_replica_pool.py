"""The client over servers that come, go and misbehave: where requests go, and which are sent twice."""

import asyncio
import contextlib
import time

import numpy as np
import pytest

from ramify.client import ClientConfig, ClientSampling, InferenceClient
from ramify.client.stall_clock import StallClock
from ramify.errors import DeadlineExceeded, LogprobMismatch, ProviderError, QueueFull, TokensRequired
from ramify.model.version import PolicyVersion
from tests.client.fake import Fake, FakeVLLM, answer, broken, first, full, hang, reset

QUICK = ClientConfig(
    health_interval=0.05, health_timeout=1.0, eject_after=2, patience=2.0, backoff=0.01, connect_timeout=1.0
)
SAMPLING = ClientSampling(max_tokens=3)


def bounded(test):
    """An async test with an end."""

    def run():
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@contextlib.asynccontextmanager
async def connected(*fakes: Fake, config: ClientConfig = QUICK, version: PolicyVersion | None = None):
    """A client over the fakes, started in their order."""
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake)
        yield await stack.enter_async_context(InferenceClient([fake.url for fake in fakes], config, version=version))


async def until(true) -> None:
    """Poll; the test's own deadline ends it."""
    while not true():
        await asyncio.sleep(0.01)


# -- where requests go ------------------------------------------------------------------------------------------------


@bounded
async def test_a_completion_has_ids_logprobs_versions_usage_and_its_server():
    fake = Fake(PolicyVersion("fake", 2, 9))
    async with connected(fake) as client:
        done = await client.generate(np.array([1, 2], np.int32), SAMPLING, cache_salt="s", priority=4)
    assert done.token_ids.tolist() == [7, 7, 7] and done.token_ids.dtype == np.int32
    assert done.logprobs.tolist() == [-0.5] * 3 and done.logprobs.dtype == np.float32
    assert [(run.policy, run.incarnation, run.step, run.count) for run in done.version_runs] == [("fake", 2, 9, 3)]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.finish_reason, done.server) == (
        2,
        3,
        "length",
        fake.url,
    )
    assert fake.asked[0]["cache_salt"] == "s" and fake.asked[0]["priority"] == 4


@bounded
async def test_a_session_stays_with_its_server():
    one, two = Fake(), Fake()
    async with connected(one, two) as client:
        for turn in range(4):
            for session in ("a", "b", "c", "d"):
                await client.generate([turn], ClientSampling(max_tokens=1, seed=ord(session)), session=session)
    seeds = [{body["sampling_params"]["seed"] for body in fake.asked} for fake in (one, two)]
    assert len(seeds[0]) == len(seeds[1]) == 2 and not seeds[0] & seeds[1]


@bounded
async def test_without_a_session_the_least_loaded_server_is_chosen():
    one, two = Fake(), Fake()
    one.behaviour = two.behaviour = hang
    async with connected(one, two) as client:
        waiting = [asyncio.create_task(client.generate([1], SAMPLING)) for _ in range(8)]
        await until(lambda: len(one.asked) + len(two.asked) == 8)
        assert len(one.asked) == len(two.asked) == 4
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@bounded
async def test_a_server_that_dies_is_ejected_and_comes_back():
    one, two = Fake(), Fake()
    async with connected(one, two) as client:
        home = (await client.generate([1], SAMPLING, session="a")).server
        dying, other = (one, two) if home == one.url else (two, one)
        await dying.__aexit__()
        assert (await client.generate([1], SAMPLING, session="a")).server == other.url  # sent again: never sampled
        assert list(client.down_replicas) == [dying.url]
        await dying.__aenter__()
        await until(lambda: not client.down_replicas)
        assert (await client.generate([1], SAMPLING, session="a")).server == other.url  # its prefix is there now
        assert (await client.generate([1], SAMPLING)).server == dying.url


@bounded
async def test_a_server_that_says_it_is_ill_gets_nothing_until_it_is_well():
    one, two = Fake(), Fake()
    async with connected(one, two) as client:
        one.healthy = False
        await until(lambda: one.url in client.down_replicas)
        assert "health" in client.down_replicas[one.url]
        assert {(await client.generate([1], SAMPLING)).server for _ in range(4)} == {two.url}
        one.healthy = True
        await until(lambda: not client.down_replicas)


@bounded
async def test_with_no_server_up_a_request_waits_for_one():
    fake = Fake()
    async with connected(fake) as client:
        await fake.__aexit__()
        waiting = asyncio.create_task(client.generate([1], SAMPLING))
        await until(lambda: client.down_replicas)
        await fake.__aenter__()
        assert (await waiting).server == fake.url


@bounded
async def test_with_no_server_up_pausing_waits_for_one():
    fake = Fake()
    async with connected(fake) as client:
        await fake.__aexit__()
        await until(lambda: client.down_replicas)
        waiting = asyncio.create_task(client.pause())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await fake.__aenter__()
        await waiting


@bounded
async def test_with_no_server_up_patience_ends_with_every_reason():
    fake = Fake()
    async with connected(fake, config=QUICK.model_copy(update={"patience": 0.3})) as client:
        await fake.__aexit__()
        with pytest.raises(ProviderError, match=rf"no inference server is up.*{fake.url} cannot be reached"):
            await client.generate([1], SAMPLING)


@bounded
async def test_a_server_that_comes_late_is_met_and_one_that_never_comes_is_named():
    late = Fake()
    async with late:
        pass  # now its port is known and nobody listens
    client = InferenceClient(late.url, QUICK)
    starting = asyncio.create_task(client.start())
    await until(lambda: "cannot be reached" in client.down_replicas[late.url])
    async with late:
        await starting
        await client.generate([1], SAMPLING)
    await client.close()
    with pytest.raises(ProviderError, match="no inference server came up"):
        await InferenceClient(late.url, QUICK.model_copy(update={"patience": 0.2})).start()


@bounded
async def test_a_client_starts_with_the_servers_there_are_and_takes_the_others_when_they_come():
    one, two = Fake(), Fake()
    async with two:
        pass
    async with one:
        client = await InferenceClient([one.url, two.url], QUICK.model_copy(update={"patience": 0.3})).start()
        assert list(client.down_replicas) == [two.url]
        async with two:
            await until(lambda: not client.down_replicas)
        await client.close()


# -- what is sent again -----------------------------------------------------------------------------------------------


@bounded
async def test_a_deadline_ends_the_wait_and_the_connection():
    fake = Fake()
    fake.behaviour = hang
    async with connected(fake) as client:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=rf"waited 0.2 s for an answer of {fake.url}"):
            await client.generate([1], SAMPLING, timeout=0.2)
        assert time.monotonic() - start < 2
        await asyncio.wait_for(fake.hung_up.wait(), 2)
        assert len(fake.asked) == 1


@bounded
async def test_a_full_server_is_asked_again_and_a_free_one_first():
    one, two = Fake(), Fake()
    async with connected(one, two) as client:
        one.behaviour = full
        assert {(await client.generate([1], SAMPLING)).server for _ in range(4)} == {two.url}
        two.behaviour = first(full, times=len(two.asked) + 1)
        assert (await client.generate([1], SAMPLING)).server == two.url


@bounded
async def test_servers_that_stay_full_end_with_queue_full():
    fake = Fake()
    fake.behaviour = full
    async with connected(fake, config=QUICK.model_copy(update={"retries": 2})) as client:
        with pytest.raises(QueueFull, match="the limit is 8"):
            await client.generate([1], SAMPLING)
    assert len(fake.asked) == 3


@bounded
async def test_an_answer_that_was_lost_is_not_sampled_again():
    one, two = Fake(), Fake()
    one.behaviour = two.behaviour = reset
    async with connected(one, two) as client:
        with pytest.raises(ProviderError, match="the answer was lost"):
            await client.generate([1], SAMPLING)
    assert len(one.asked) + len(two.asked) == 1


@bounded
async def test_an_answer_that_was_lost_is_sampled_again_if_the_caller_allows():
    fake = Fake()
    fake.behaviour = first(reset, times=2)
    async with connected(fake) as client:
        assert (await client.generate([1], SAMPLING, resend_if_lost=True)).token_ids.size == 3
    assert len(fake.asked) == 3


@bounded
async def test_an_error_is_named_with_status_and_body_and_not_sent_again():
    fake = Fake()
    fake.behaviour = broken
    async with connected(fake) as client:
        with pytest.raises(ProviderError, match=r"answered 500.*out of cheese"):
            await client.generate([1], SAMPLING, resend_if_lost=True)
    assert len(fake.asked) == 1


@bounded
async def test_an_answer_that_is_no_answer_is_named():
    async def nonsense(fake, exchange):
        await exchange.reply({"choices": [{"token_ids": ["seven"]}]})

    async def silent(fake, exchange):
        await exchange.reply({"choices": [{"token_ids": [7], "finish_reason": "stop"}]})

    fake = Fake()
    async with connected(fake) as client:
        fake.behaviour = nonsense
        with pytest.raises(ProviderError, match="unexpected"):
            await client.generate([1], SAMPLING)
        fake.behaviour = silent
        with pytest.raises(TokensRequired):
            await client.generate([1], SAMPLING)


# -- weights ----------------------------------------------------------------------------------------------------------


@bounded
async def test_every_server_acknowledges_a_weight_update():
    one, two = Fake(), Fake()
    async with connected(one, two) as client:
        done = await client.update_weights("step-2", PolicyVersion("fake", 0, 2))
        assert {ack.server for ack in done} == {one.url, two.url}
        assert set(client.versions.values()) == {PolicyVersion("fake", 0, 2)}


@bounded
async def test_a_server_that_returns_with_old_weights_is_brought_up_to_date_first():
    one, two = Fake(), Fake()
    async with connected(one, two) as client:
        await one.__aexit__()
        await until(lambda: one.url in client.down_replicas)
        (ack,) = await client.update_weights("step-2", PolicyVersion("fake", 0, 2))
        assert ack.server == two.url
        await client.pause()
        await one.__aenter__()
        await until(lambda: not client.down_replicas)
        assert one.version == PolicyVersion("fake", 0, 2)
        assert any(path.startswith("/pause") for path in one.paths)  # and it waits like the others


@bounded
async def test_a_directory_with_another_version_is_noticed():
    fake = Fake()
    async with connected(fake) as client:
        with pytest.raises(Exception, match=r"holds fake@0.3, not fake@0.2"):
            await client.update_weights("step-3", PolicyVersion("fake", 0, 2))
        assert client.versions[fake.url] == PolicyVersion("fake", 0, 3)


# -- vLLM -------------------------------------------------------------------------------------------------------------


@bounded
async def test_logprobs_before_temperature_are_refused_with_the_flag_to_set():
    async with FakeVLLM(processed=False) as fake:
        with pytest.raises(LogprobMismatch, match="--logprobs-mode processed_logprobs"):
            await InferenceClient(fake.url, QUICK).start()


@bounded
async def test_a_server_that_is_neither_engine_is_refused():
    class Other(Fake):
        def card(self):
            return {"id": "gpt", "owned_by": "somebody", "max_model_len": 64}

    async with Other() as fake:
        with pytest.raises(TokensRequired, match="somebody"):
            await InferenceClient(fake.url, QUICK).start()


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ({"data": [{"id": "gpt", "owned_by": "openai"}]}, "owned by 'openai'"),
        ({"data": [{"id": "gpt"}]}, "owned by None"),
        ({"data": []}, "lists no model"),
        (None, "has no list of models"),
    ],
)
def test_an_endpoint_that_only_chats_is_refused_at_once(models, reason):
    """None of these says how long its context is, and none will by being asked again."""

    class ChatOnly(Fake):
        async def _route(self, target, exchange):
            if target != "/v1/models":
                await super()._route(target, exchange)
            elif models is None:
                await exchange.reply({"error": {"message": "not found"}}, 404)
            else:
                self.paths.append(target)
                await exchange.reply(models)

    @bounded
    async def main():
        async with ChatOnly() as fake:
            with pytest.raises(TokensRequired, match=reason):
                await InferenceClient(fake.url, ClientConfig(patience=60)).start()

    main()


@bounded
async def test_weights_of_vllm_are_labelled_and_each_token_knows_its_label():
    fake = FakeVLLM()
    async with connected(fake, version=PolicyVersion("mine", 1, 5)) as client:
        done = await client.generate([1], SAMPLING)
        assert fake.label == "mine@1.5"
        assert [(run.policy, run.incarnation, run.step, run.count) for run in done.version_runs] == [("mine", 1, 5, 3)]


@bounded
async def test_a_call_on_a_closed_client_fails_at_once():
    async with connected(Fake()) as client:
        pass
    with pytest.raises(ProviderError, match="closed"):
        await client.generate([1, 2], ClientSampling(max_tokens=1))


def choice(*ids: int) -> dict:
    entries = [{"logprob": -0.5} for _ in ids]
    versions = [["fake", 0, 1, len(ids)]] if ids else []
    head = {"token_ids": list(ids), "finish_reason": "length", "logprobs": {"content": entries}}
    return {**head, "policy_versions": versions, "weight_versions": []}


@pytest.mark.parametrize("kind", [Fake, FakeVLLM])
@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ([], "0 choices"),
        ([choice(7), choice(8)], "2 choices"),
        ([choice(7, -1)], "token id -1"),
        ([choice(2**40)], f"token id {2**40}"),
    ],
)
def test_an_answer_that_no_sampler_gives_is_the_engines_failure(kind, choices, reason):
    @bounded
    async def main():
        fake = kind()
        async with connected(fake) as client:
            fake.behaviour = lambda fake, exchange: exchange.reply({"choices": choices})
            with pytest.raises(ProviderError, match=reason):
                await client.generate([1], SAMPLING)

    main()


@bounded
async def test_a_rollouts_request_leaves_a_server_that_stands_still_for_one_that_does_not():
    one, two = Fake(), Fake()
    async with connected(one, two) as client:
        one.behaviour = two.behaviour = hang
        seeded = ClientSampling(max_tokens=3, seed=5)
        waiting = asyncio.create_task(client.generate([1], seeded, session="s", clock=StallClock()))
        await until(lambda: one.asked or two.asked)
        still, other = (one, two) if one.asked else (two, one)
        other.behaviour, still.healthy = answer, False
        done = await waiting
        assert done.server == other.url
        assert other.asked == still.asked
        assert still.hung_up.is_set()


@bounded
async def test_a_request_that_must_not_be_sampled_twice_stays_with_a_server_that_stands_still():
    one, two = Fake(), Fake()
    async with connected(one, two) as client:
        one.behaviour = two.behaviour = hang
        unseeded = ClientSampling(max_tokens=3)
        waiting = asyncio.create_task(client.generate([1], unseeded, timeout=60, clock=StallClock()))
        await until(lambda: one.asked or two.asked)
        still, other = (one, two) if one.asked else (two, one)
        still.healthy = False
        await until(lambda: still.url in client.down_replicas)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        assert not other.asked
        waiting.cancel()


@bounded
async def test_health_checks_go_on_when_the_metrics_are_no_numbers():
    class Odd(Fake):
        async def _route(self, target, exchange):
            if target == "/metrics":
                self.paths.append(target)
                exchange.writer.write(b"HTTP/1.1 200 -\r\nContent-Length: 24\r\n\r\nramify_steps_total many\n")
            else:
                await super()._route(target, exchange)

    fake = Odd()
    async with connected(fake) as client:
        fake.behaviour = hang
        waiting = asyncio.create_task(client.generate([1], ClientSampling(max_tokens=3), clock=StallClock()))
        await until(lambda: fake.paths.count("/metrics") >= 3)
        assert not client.down_replicas
        waiting.cancel()
