"""A client of servers that fail, come back and misbehave: routing, retries and weight updates."""

import asyncio
import contextlib

import numpy as np
import pytest

from ramify.core.errors import DeadlineExceeded, EngineIncompatible, ProviderError, QueueFull
from ramify.infer.client import ClientConfig, ClientSampling, InferenceClient
from ramify.infer.client.stall_clock import StallClock
from ramify.trace.version import PolicyVersion
from tests.support.engine import ScriptedEngine, ScriptedVLLM, disconnect, fail, first, hang, refuse_as_full, respond
from tests.support.processes import async_wait_until

QUICK = ClientConfig(
    health_interval=0.05, health_timeout=5.0, eject_after=2, server_wait_timeout=30.0, backoff=0.01, connect_timeout=5.0
)
SAMPLING = ClientSampling(max_tokens=3)


@contextlib.asynccontextmanager
async def connected(*fakes: ScriptedEngine, config: ClientConfig = QUICK, version: PolicyVersion | None = None):
    """Start the fakes and a client of them."""
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake)
        yield await stack.enter_async_context(InferenceClient([fake.url for fake in fakes], config, version=version))


# -- routing --------------------------------------------------------------------------------------------------------


async def test_a_completion_has_tokens_logprobs_versions_usage_and_server():
    fake = ScriptedEngine(version=PolicyVersion("fake", 2, 9))
    async with connected(fake) as client:
        done = await client.generate(np.array([1, 2], np.int32), SAMPLING, cache_salt="s", priority=4)
    assert done.token_ids.tolist() == [7, 7, 7] and done.token_ids.dtype == np.int32
    assert done.logprobs.tolist() == [-0.5] * 3 and done.logprobs.dtype == np.float32
    assert [(run.policy, run.incarnation, run.step, run.count) for run in done.version_spans] == [("fake", 2, 9, 3)]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.finish_reason, done.server) == (
        2,
        3,
        "length",
        fake.url,
    )
    assert fake.requests[0]["cache_salt"] == "s" and fake.requests[0]["priority"] == 4


async def test_a_session_stays_with_its_server():
    one, two = ScriptedEngine(), ScriptedEngine()
    async with connected(one, two) as client:
        for turn in range(4):
            for session in ("a", "b", "c", "d"):
                await client.generate([turn], ClientSampling(max_tokens=1, seed=ord(session)), session=session)
    seeds = [{body["sampling_params"]["seed"] for body in fake.requests} for fake in (one, two)]
    assert len(seeds[0]) == len(seeds[1]) == 2 and not seeds[0] & seeds[1]


async def test_without_a_session_the_least_loaded_server_is_chosen():
    one, two = ScriptedEngine(), ScriptedEngine()
    one.behaviour = two.behaviour = hang
    async with connected(one, two) as client:
        waiting = [asyncio.create_task(client.generate([1], SAMPLING)) for _ in range(8)]
        await async_wait_until(lambda: len(one.requests) + len(two.requests) == 8)
        assert len(one.requests) == len(two.requests) == 4
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_dead_server_is_ejected_until_it_comes_back():
    one, two = ScriptedEngine(), ScriptedEngine()
    async with connected(one, two) as client:
        home = (await client.generate([1], SAMPLING, session="a")).server
        dying, other = (one, two) if home == one.url else (two, one)
        await dying.__aexit__()
        assert (await client.generate([1], SAMPLING, session="a")).server == other.url  # sent again: never sampled
        assert list(client.down_replicas) == [dying.url]
        await dying.__aenter__()
        await async_wait_until(lambda: not client.down_replicas)
        assert (await client.generate([1], SAMPLING, session="a")).server == other.url  # the prefix is cached there now
        assert (await client.generate([1], SAMPLING)).server == dying.url


async def test_an_unhealthy_server_gets_no_requests_until_it_is_healthy():
    one, two = ScriptedEngine(), ScriptedEngine()
    async with connected(one, two) as client:
        one.healthy = False
        await async_wait_until(lambda: one.url in client.down_replicas)
        assert "health" in client.down_replicas[one.url]
        assert {(await client.generate([1], SAMPLING)).server for _ in range(4)} == {two.url}
        one.healthy = True
        await async_wait_until(lambda: not client.down_replicas)


async def test_a_request_waits_for_a_server_to_come_up():
    fake = ScriptedEngine()
    async with connected(fake) as client:
        await fake.__aexit__()
        waiting = asyncio.create_task(client.generate([1], SAMPLING))
        await async_wait_until(lambda: client.down_replicas)
        await fake.__aenter__()
        assert (await waiting).server == fake.url


async def test_an_update_waits_for_a_server_to_come_up():
    fake = ScriptedEngine()
    async with connected(fake) as client:
        await fake.__aexit__()
        await async_wait_until(lambda: client.down_replicas)
        waiting = asyncio.create_task(client.update_weights("step-2", PolicyVersion("fake", 0, 2)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await fake.__aenter__()
        await waiting


async def test_a_request_without_a_server_fails_with_the_reason_of_each():
    fake = ScriptedEngine()
    async with connected(fake, config=QUICK.model_copy(update={"server_wait_timeout": 2.0})) as client:
        await fake.__aexit__()
        with pytest.raises(ProviderError, match=rf"no inference server is up.*{fake.url} cannot be reached"):
            await client.generate([1], SAMPLING)


async def test_start_waits_for_a_late_server_and_reports_one_that_never_comes():
    late = ScriptedEngine()
    async with late:
        pass  # its port is known, but nothing listens
    client = InferenceClient(late.url, QUICK)
    starting = asyncio.create_task(client.start())
    await async_wait_until(lambda: "cannot be reached" in client.down_replicas[late.url])
    async with late:
        await starting
        await client.generate([1], SAMPLING)
    await client.close()
    with pytest.raises(ProviderError, match="no inference server came up"):
        await InferenceClient(late.url, QUICK.model_copy(update={"server_wait_timeout": 0.2})).start()


async def test_servers_that_come_up_after_start_are_added():
    one, two = ScriptedEngine(), ScriptedEngine()
    async with two:
        pass
    async with one:
        client = await InferenceClient(
            [one.url, two.url], QUICK.model_copy(update={"server_wait_timeout": 2.0})
        ).start()
        assert list(client.down_replicas) == [two.url]
        async with two:
            await async_wait_until(lambda: not client.down_replicas)
        await client.close()


# -- retries ---------------------------------------------------------------------------------------------------------


async def test_a_timeout_ends_the_request_and_the_connection():
    fake = ScriptedEngine()
    fake.behaviour = hang
    async with connected(fake) as client:
        with pytest.raises(DeadlineExceeded, match=rf"a response of {fake.url} took longer than 0.2 s"):
            await client.generate([1], SAMPLING, timeout=0.2)
        await fake.disconnected.wait()
        assert len(fake.requests) == 1


async def test_a_request_to_a_full_server_is_sent_to_a_free_one():
    one, two = ScriptedEngine(), ScriptedEngine()
    async with connected(one, two) as client:
        one.behaviour = refuse_as_full
        assert {(await client.generate([1], SAMPLING)).server for _ in range(4)} == {two.url}
        two.behaviour = first(refuse_as_full, times=len(two.requests) + 1)
        assert (await client.generate([1], SAMPLING)).server == two.url


async def test_servers_that_stay_full_raise_queue_full():
    fake = ScriptedEngine()
    fake.behaviour = refuse_as_full
    async with connected(fake, config=QUICK.model_copy(update={"retries": 2})) as client:
        with pytest.raises(QueueFull, match="the limit is 8"):
            await client.generate([1], SAMPLING)
    assert len(fake.requests) == 3


async def test_a_lost_response_is_not_sampled_again():
    one, two = ScriptedEngine(), ScriptedEngine()
    one.behaviour = two.behaviour = disconnect
    async with connected(one, two) as client:
        with pytest.raises(ProviderError, match="the response was lost"):
            await client.generate([1], SAMPLING)
    assert len(one.requests) + len(two.requests) == 1


async def test_a_lost_response_is_sampled_again_if_the_caller_allows_it():
    fake = ScriptedEngine()
    fake.behaviour = first(disconnect, times=2)
    async with connected(fake) as client:
        assert (await client.generate([1], SAMPLING, resend_if_lost=True)).token_ids.size == 3
    assert len(fake.requests) == 3


async def test_a_request_that_fails_is_sent_again_and_its_error_has_status_and_body():
    fake = ScriptedEngine()
    fake.behaviour = first(fail, times=4)
    async with connected(fake, config=QUICK.model_copy(update={"retries": 2})) as client:
        with pytest.raises(ProviderError, match=r"status 500.*out of cheese"):
            await client.generate([1], SAMPLING)
        assert len(fake.requests) == 3
        assert (await client.generate([1], SAMPLING)).server == fake.url


async def test_malformed_responses_are_rejected():
    async def send_wrong_types(fake, exchange):
        await exchange.reply({"choices": [{"token_ids": ["seven"]}]})

    async def omit_logprobs(fake, exchange):
        await exchange.reply({"choices": [{"token_ids": [7], "finish_reason": "stop"}]})

    fake = ScriptedEngine()
    async with connected(fake) as client:
        fake.behaviour = send_wrong_types
        with pytest.raises(ProviderError, match="unexpected"):
            await client.generate([1], SAMPLING)
        fake.behaviour = omit_logprobs
        with pytest.raises(EngineIncompatible):
            await client.generate([1], SAMPLING)


# -- weights ----------------------------------------------------------------------------------------------------------


async def test_a_server_that_comes_back_with_old_weights_is_updated_first():
    one, two = ScriptedEngine(), ScriptedEngine()
    async with connected(one, two) as client:
        await one.__aexit__()
        await async_wait_until(lambda: one.url in client.down_replicas)
        assert list(await client.update_weights("step-2", PolicyVersion("fake", 0, 2))) == [two.url]
        await one.__aenter__()
        await async_wait_until(lambda: not client.down_replicas)
        assert one.version == PolicyVersion("fake", 0, 2)


async def test_a_directory_with_another_version_is_refused():
    fake = ScriptedEngine()
    async with connected(fake) as client:
        with pytest.raises(Exception, match=r"holds fake@0.3, not fake@0.2"):
            await client.update_weights("step-3", PolicyVersion("fake", 0, 2))
        assert client.versions[fake.url] == PolicyVersion("fake", 0, 3)


# -- vLLM -------------------------------------------------------------------------------------------------------------


async def test_logprobs_before_temperature_are_refused_with_the_flag_to_use():
    async with ScriptedVLLM(processed=False) as fake:
        with pytest.raises(EngineIncompatible, match="--logprobs-mode processed_logprobs"):
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
async def test_a_chat_only_endpoint_is_refused_without_retries(models, reason):
    """None of them reports its context length, and asking again would not change that."""

    class ChatOnly(ScriptedEngine):
        async def route(self, exchange):
            if exchange.path != "/v1/models":
                await super().route(exchange)
            elif models is None:
                await exchange.reply({"error": {"message": "not found"}}, 404)
            else:
                await exchange.reply(models)

    async with ChatOnly() as fake:
        with pytest.raises(EngineIncompatible, match=reason):
            await InferenceClient(fake.url, ClientConfig(server_wait_timeout=60)).start()


async def test_vllm_weights_are_labelled_and_tokens_have_the_version_of_their_label():
    fake = ScriptedVLLM()
    async with connected(fake, version=PolicyVersion("mine", 1, 5)) as client:
        done = await client.generate([1], SAMPLING)
        assert fake.label == "mine@1.5"
        assert [(run.policy, run.incarnation, run.step, run.count) for run in done.version_spans] == [("mine", 1, 5, 3)]


async def test_a_closed_client_refuses_requests():
    async with connected(ScriptedEngine()) as client:
        pass
    with pytest.raises(ProviderError, match="closed"):
        await client.generate([1, 2], ClientSampling(max_tokens=1))


async def test_closing_the_client_fails_requests_that_wait_for_a_server():
    async with connected(fake := ScriptedEngine(), config=ClientConfig(server_wait_timeout=600.0)) as client:
        client.set_urls([])
        waiting = asyncio.create_task(client.generate([1], ClientSampling(max_tokens=3)))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ProviderError, match="the client is closed"):
            await asyncio.wait_for(waiting, 30)
    assert not fake.requests


def choice(*ids: int) -> dict:
    entries = [{"logprob": -0.5} for _ in ids]
    versions = [["fake", 0, 1, len(ids)]] if ids else []
    head = {"token_ids": list(ids), "finish_reason": "length", "logprobs": {"content": entries}}
    return {**head, "policy_versions": versions, "weight_versions": []}


@pytest.mark.parametrize("kind", [ScriptedEngine, ScriptedVLLM])
@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ([], "0 choices"),
        ([choice(7), choice(8)], "2 choices"),
        ([choice(7, -1)], "token id -1"),
        ([choice(2**40)], f"token id {2**40}"),
    ],
)
async def test_impossible_samples_are_provider_errors(kind, choices, reason):
    fake = kind()
    async with connected(fake) as client:
        fake.behaviour = lambda fake, exchange: exchange.reply({"choices": choices})
        with pytest.raises(ProviderError, match=reason):
            await client.generate([1], SAMPLING)


async def test_a_seeded_request_moves_from_an_unhealthy_server_to_another():
    one, two = ScriptedEngine(), ScriptedEngine()
    async with connected(one, two) as client:
        one.behaviour = two.behaviour = hang
        seeded = ClientSampling(max_tokens=3, seed=5)
        waiting = asyncio.create_task(client.generate([1], seeded, session="s", clock=StallClock()))
        await async_wait_until(lambda: one.requests or two.requests)
        unhealthy, other = (one, two) if one.requests else (two, one)
        other.behaviour, unhealthy.healthy = respond, False
        done = await waiting
        assert done.server == other.url
        assert other.requests == unhealthy.requests
        await unhealthy.disconnected.wait()


async def test_an_unseeded_request_stays_with_an_unhealthy_server():
    one, two = ScriptedEngine(), ScriptedEngine()
    async with connected(one, two) as client:
        one.behaviour = two.behaviour = hang
        unseeded = ClientSampling(max_tokens=3)
        waiting = asyncio.create_task(client.generate([1], unseeded, timeout=60, clock=StallClock()))
        await async_wait_until(lambda: one.requests or two.requests)
        unhealthy, other = (one, two) if one.requests else (two, one)
        unhealthy.healthy = False
        await async_wait_until(lambda: unhealthy.url in client.down_replicas)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        assert not other.requests
        waiting.cancel()


async def test_health_checks_tolerate_metrics_that_are_not_numeric():
    class Odd(ScriptedEngine):
        async def route(self, exchange):
            if exchange.path == "/metrics":
                await exchange.reply("ramify_steps_total many\n")
            else:
                await super().route(exchange)

    fake = Odd()
    async with connected(fake) as client:
        fake.behaviour = hang
        waiting = asyncio.create_task(client.generate([1], ClientSampling(max_tokens=3), clock=StallClock()))
        await async_wait_until(lambda: fake.targets.count("/metrics") >= 3)
        assert not client.down_replicas
        waiting.cancel()


# -- addresses that change -------------------------------------------------------------------------------------------


async def test_a_new_address_is_used_once_it_has_the_weights_of_the_others():
    old, new = ScriptedEngine(), ScriptedEngine()
    async with connected(old) as client, new:
        await client.update_weights("step-2", PolicyVersion("fake", 0, 2))
        new.healthy = False
        client.set_urls([old.url, new.url])
        await async_wait_until(lambda: "/health" in new.targets)
        assert {(await client.generate([1], SAMPLING)).server for _ in range(4)} == {old.url}
        assert client.urls == [old.url, new.url] and client.joined_urls == [old.url]
        new.healthy = True
        await async_wait_until(lambda: new.url in client.versions)
        assert new.version == PolicyVersion("fake", 0, 2)
        assert {(await client.generate([1], SAMPLING)).server for _ in range(9)} == {old.url, new.url}


async def test_a_removed_address_gets_no_new_requests_and_finishes_those_in_flight():
    leaving, staying = ScriptedEngine(), ScriptedEngine()
    may_answer = asyncio.Event()

    async def answer_later(fake, exchange):
        await may_answer.wait()
        await respond(fake, exchange)

    async with connected(leaving) as client, staying:
        leaving.behaviour = answer_later
        in_flight = asyncio.create_task(client.generate([1], SAMPLING))
        await async_wait_until(lambda: leaving.requests)
        client.set_urls([f"{staying.url}/"])  # a slash at the end makes no other address
        assert {(await client.generate([1], SAMPLING)).server for _ in range(4)} == {staying.url}
        may_answer.set()
        assert (await in_flight).server == leaving.url
        num_checks = leaving.targets.count("/health")
        await async_wait_until(lambda: len(client._watch_tasks) == 1)
        await asyncio.sleep(0.1)
        assert leaving.targets.count("/health") <= num_checks + 2
        assert list(client.versions) == [staying.url] and not client.down_replicas


async def test_a_seeded_request_moves_away_from_a_vanished_address():
    vanished, other = ScriptedEngine(), ScriptedEngine()
    async with connected(vanished) as client, other:
        vanished.behaviour = hang
        seeded = ClientSampling(max_tokens=3, seed=5)
        waiting = asyncio.create_task(client.generate([1], seeded, timeout=60, clock=StallClock()))
        await async_wait_until(lambda: vanished.requests)
        client.set_urls([])
        vanished.healthy = False  # as if its machine were cut off
        await async_wait_until(lambda: vanished.disconnected.is_set())
        assert not waiting.done()
        client.set_urls([other.url])
        assert (await waiting).server == other.url


async def test_an_address_that_returns_is_joined_again():
    one, two = ScriptedEngine(), ScriptedEngine()
    async with connected(one, two) as client:
        client.set_urls([two.url])
        client.set_urls([one.url, two.url])
        await async_wait_until(lambda: one.url in client.versions)
        assert {(await client.generate([1], SAMPLING)).server for _ in range(4)} == {one.url, two.url}


async def test_start_follows_addresses_that_change():
    gone, new = ScriptedEngine(), ScriptedEngine()
    async with gone:
        pass
    async with new:
        client = InferenceClient(gone.url, QUICK)
        starting = asyncio.create_task(client.start())
        await async_wait_until(lambda: "cannot be reached" in client.down_replicas[gone.url])
        client.set_urls([])
        await async_wait_until(lambda: not client._watch_tasks)
        client.set_urls([new.url])
        await starting
        assert list(client.versions) == [new.url]
        await client.close()
