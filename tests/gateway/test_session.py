"""A session in process: what is recorded, what forks and why, how a call is sampled, and when it is made again."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from ramify.errors import ConfigInvalid, DeadlineExceeded, ProviderError, RequestInvalid, TemplateRefused
from ramify.gateway import ModelRequest, RolloutLimits, RolloutSession, SamplingConfig, TokenPolicy
from ramify.trace import Media, MediaPart, Message, TextPart, ToolCall, Trace
from tests.gateway.engine import TINY, check_tokens
from tests.gateway.sampler import Sampler, session_of, user

SYSTEM, HELLO = Message("system", "Be brief."), Message("user", "hello")


def said(text: str, **more) -> Message:
    return Message("assistant", text, **more)


def reasons(trace: Trace) -> list[str]:
    return [fork["reason"] for fork in trace.info.get("forks", [])]


async def asked(session: RolloutSession, *messages: Message, **more):
    return await session.generate(ModelRequest(messages, **more))


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_a_conversation_in_process_is_one_branch_of_the_engines_tokens():
    async def act():
        session, sampler = session_of(["one", "two", "three"])
        reply = await asked(session, SYSTEM, HELLO, model="gpt-x")
        for text in ("more", "and more"):
            reply = await session.generate(user(text, parent_node=reply.node))
        assert (
            reply.message.text == "three"
            and reply.finish_reason == "stop"
            and reply.node == len(session.trace.nodes) - 1
        )
        assert session.num_turns == 3 and len(session.trace.leaves) == 1 and not reasons(session.trace)
        check_tokens(session.trace, sampler)
        node = session.trace.nodes[reply.node]
        assert node.call is not None and node.call.id == reply.call_id and node.call.usage == reply.usage
        assert [run.step for run in node.versions] == [1, 2]
        assert 0 < node.call.start_time <= node.call.end_time and session.model_seconds > 0

    asyncio.run(act())


def test_one_conversation_in_process_and_through_whole_histories_is_the_same_branch():
    async def act():
        session, sampler = session_of(["one", "two", "three"])
        first = await asked(session, SYSTEM, HELLO)
        await session.generate(user("more", parent_node=first.node))
        await asked(session, SYSTEM, HELLO, said("one"), Message("user", "more"), said("two"), Message("user", "last"))
        assert len(session.trace.leaves) == 1 and not reasons(session.trace)
        check_tokens(session.trace, sampler)

    asyncio.run(act())


def test_what_a_call_asked_for_and_got_is_in_its_record():
    async def act():
        session, _ = session_of(["one"], sampling=SamplingConfig(temperature=0.5, max_tokens=30), seed=3)
        reply = await session.generate(
            user("a", model="gpt-x", sampling_overrides={"temperature": 0.25, "max_tokens": 9, "stop": ["zz"]})
        )
        call = session.trace.nodes[reply.node].call
        assert call is not None and (call.requested_model, call.served_model, call.finish_reason) == (
            "gpt-x",
            "tiny",
            "stop",
        )
        seed = call.sampling_params.pop("seed")
        assert isinstance(seed, int)
        expected = {"temperature": 0.25, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 9, "stop": ["zz"]}
        assert call.sampling_params == expected

    asyncio.run(act())


def test_another_model_by_name_is_recorded_but_not_trained():
    async def act():
        session, sampler = session_of(["one"])
        other = session_of(["two", "three"])[0].policy
        session.models["helper"] = other
        first = await session.generate(user("a"))
        second = await session.generate(user("b", model="helper", parent_node=first.node))
        await session.generate(user("c", model="helper", parent_node=second.node))
        assert [node.is_trainable for node in session.trace.nodes if node.call] == [True, False, False]
        assert session.trace.nodes[second.node].call.requested_model == "helper"
        check_tokens(session.trace, _both(sampler, other.client))
        assert len(session.trace.leaves) == 1

    asyncio.run(act())


def _both(*samplers: Sampler) -> Sampler:
    both = Sampler([])
    both.seen = [entry for sampler in samplers for entry in sampler.seen]
    return both


def test_a_conversation_may_be_continued_from_any_reply_however_old():
    async def act():
        session, sampler = session_of(lambda _: "<think>\nhm\n</think>\n\nsure")
        nodes, history = [], [HELLO]
        for turn in range(9):
            reply = await asked(session, *history)
            nodes.append(reply.node)
            history += [said("sure"), Message("user", f"turn {turn}")]
        for node in nodes:
            await session.generate(user("and now?", parent_node=node))
        assert len(session.trace.leaves) == 9 and session.trace.metrics == {"forks": 8.0}
        check_tokens(session.trace, sampler)

    asyncio.run(act())


# -- forks -------------------------------------------------------------------------------------------------------------


def test_an_equal_request_is_another_sample_behind_the_same_prompt():
    async def act():
        session, sampler = session_of(["one", "two", "three"])
        for _ in range(3):
            await asked(session, SYSTEM, HELLO)
        assert reasons(session.trace) == ["sample", "sample"] and session.trace.metrics["forks"] == 2
        assert len(session.trace.nodes) == 5  # the prompt once
        check_tokens(session.trace, sampler)

    asyncio.run(act())


def test_five_parallel_samples_share_their_prompt():
    async def act():
        session, sampler = session_of(["same"] * 5)
        await asyncio.gather(*(asked(session, SYSTEM, HELLO) for _ in range(5)))
        assert session.num_turns == 5 and len(session.trace.nodes) == 7 and reasons(session.trace) == ["sample"] * 4
        check_tokens(session.trace, sampler)

    asyncio.run(act())


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([SYSTEM, HELLO, said("two"), Message("user", "d")], "dropped"),  # the first turn left out
        ([SYSTEM, HELLO, said("one, in short"), Message("user", "b")], "edited"),
        ([SYSTEM, Message("user", "something else")], "new_conversation"),
        ([Message("user", "no system")], "new_conversation"),
    ],
)
def test_a_rewritten_history_forks_with_its_reason(messages, reason):
    async def act():
        session, sampler = session_of(["one", "two", "three", "four"])
        reply = await asked(session, SYSTEM, HELLO)
        reply = await session.generate(user("b", parent_node=reply.node))
        await asked(session, *messages)
        assert reasons(session.trace) == [reason]
        fork = session.trace.info["forks"][0]
        assert session.trace.nodes[fork["node"]].parent == fork["at"]
        check_tokens(session.trace, sampler)

    asyncio.run(act())


def test_other_tools_are_a_break_and_conversations_with_each_set_go_on_unbroken():
    def tools(name):
        return ({"type": "function", "function": {"name": name, "description": "", "parameters": {}}},)

    async def act():
        session, sampler = session_of([str(n) for n in range(4)])
        await asked(session, HELLO, tools=tools("a"))
        await asked(session, HELLO, said("0"), HELLO, tools=tools("b"))
        await asked(session, HELLO, said("0"), HELLO, said("1"), HELLO, tools=tools("b"))
        assert session.trace.metrics["render/breaks/tools_changed"] == 1 and reasons(session.trace) == ["tools_changed"]
        check_tokens(session.trace, sampler)

    asyncio.run(act())


def test_samples_that_read_the_same_are_told_apart_by_reasoning_or_by_what_follows():
    async def act():
        session, sampler = session_of(["<think>\nx\n</think>\n\nok", "<think>\ny\n</think>\n\nok", "p", "q", "r"])
        first, second = [await session.generate(user("a")) for _ in range(2)]
        await asked(session, Message("user", "a"), said("ok", reasoning="x"), Message("user", "b"))
        await asked(session, Message("user", "a"), said("ok"), Message("user", "b"), said("p"), Message("user", "c"))
        await asked(session, Message("user", "a"), said("ok"), Message("user", "d"))
        parents = {node.message.text: node.parent for node in session.trace.nodes if node.message.role == "user"}
        assert parents["b"] == first.node and parents["d"] == second.node
        check_tokens(session.trace, sampler)

    asyncio.run(act())


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_in_training_the_source_decides_and_a_client_may_only_ask_for_less():
    async def act():
        session, sampler = session_of(["one"] * 2, is_training=True, sampling=SamplingConfig(max_tokens=50))
        wishes = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "seed": 7}
        await session.generate(user("a", sampling_overrides=wishes | {"max_tokens": 5}))
        await session.generate(user("b", sampling_overrides=wishes | {"max_tokens": 500}))
        for sampling, most in zip(sampler.asked, (5, 50)):
            assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
            assert sampling.seed is None and sampling.max_tokens == most

    asyncio.run(act())


@pytest.mark.parametrize("wrong", [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_sampling_that_cannot_be_trained_on_is_refused_by_key(wrong):
    with pytest.raises(ConfigInvalid, match=next(iter(wrong))):
        session_of([], is_training=True, sampling=SamplingConfig(**wrong))


def test_seeds_repeat_from_run_to_run_and_differ_from_call_to_call():
    async def act():
        session, sampler = session_of(["one"] * 4, seed=11)
        reply = await session.generate(user("a"))
        await session.generate(user("a"))
        await session.generate(user("b", parent_node=reply.node))
        await session.generate(user("c"))
        return [sampling.seed for sampling in sampler.asked]

    seeds = asyncio.run(act())
    assert len(set(seeds)) == 4 and seeds == asyncio.run(act())


def test_a_stop_string_ends_the_sample_with_the_token_that_completes_it():
    async def act():
        session, sampler = session_of(["red, green, blue", "more"])
        reply = await session.generate(user("a", sampling_overrides={"stop": ["een", "blue"]}))
        assert reply.message.text == "red, gr" and reply.finish_reason == "stop"
        node = session.trace.nodes[reply.node]
        sample = node.token_ids[slice(*node.sampled_span)]
        prompt, ids, logprobs = sampler.seen[0]
        assert len(sample) < len(ids) and sample.tolist() == ids[: len(sample)]
        assert node.logprobs.tolist() == logprobs[: len(sample)]
        assert sum(run.count for run in node.versions) == len(sample)
        tokenizer = TINY.tokenizer
        assert "een" in tokenizer.decode(sample) and "een" not in tokenizer.decode(sample[:-1])
        await session.generate(user("go on", parent_node=reply.node))
        assert sampler.seen[1][0][: len(prompt) + len(sample)] == prompt + ids[: len(sample)]
        assert session.output_tokens == len(sample) + len(sampler.seen[1][1])

    asyncio.run(act())


@pytest.mark.parametrize(
    "asked_for",
    [{"max_tokens": 0}, {"temperature": "hot"}, {"stop": 5}, {"seed": "x"}, {"seed": 10**30}, {"top_k": 1e300}],
)
def test_wishes_that_cannot_be_met_are_named(asked_for):
    session, _ = session_of(["one"])
    with pytest.raises(RequestInvalid, match=next(iter(asked_for))):
        asyncio.run(session.generate(user("a", sampling_overrides=asked_for)))


def test_malformed_calls_are_reported_with_the_reply():
    session, _ = session_of(['<tool_call>{"name": 5}</tool_call>'])
    reply = asyncio.run(session.generate(user("a")))
    assert reply.problems and reply.finish_reason == "stop" and "<tool_call>" in reply.message.text


def test_a_call_that_was_read_can_be_answered_in_process():
    async def act():
        session, sampler = session_of(['<tool_call>{"name": "f", "arguments": {}}</tool_call>', "done"])
        reply = await session.generate(user("a"))
        (call,) = reply.message.tool_calls
        assert isinstance(call, ToolCall) and reply.finish_reason == "tool_calls"
        await asked(session, Message("tool", "42", tool_call_id=call.id), parent_node=reply.node)
        assert len(session.trace.leaves) == 1
        check_tokens(session.trace, sampler)

    asyncio.run(act())


@pytest.mark.parametrize("written", ["1e300", "1" + 30 * "0", "-1e19", "NaN", '"\\ud800"', 600 * "[" + 600 * "]"])
def test_whatever_number_or_depth_a_call_has_it_is_recorded_and_found_again(written):
    async def act():
        call = f'<tool_call>{{"name": "f", "arguments": {{"x": {written}}}}}</tool_call>'
        session, sampler = session_of([call, "done"])
        reply = await session.generate(user("a"))
        (call,) = reply.message.tool_calls
        await asked(session, Message("user", "a"), reply.message, Message("tool", "42", tool_call_id=call.id))
        assert len(session.trace.leaves) == 1 and reasons(session.trace) == []
        check_tokens(session.trace, sampler)

    asyncio.run(act())


def test_images_are_refused_by_name_where_the_renderer_shows_none():
    media = Media.from_bytes(b"picture", "image/png")
    message = Message("user", (TextPart("see"), MediaPart(media.hash)))
    session, _ = session_of(["one"])
    with pytest.raises(TemplateRefused, match="media"):
        asyncio.run(session.generate(ModelRequest((message,), media={media.hash: media})))


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failure_that_may_pass_is_tried_again_and_recorded_once(monkeypatch):
    monkeypatch.setattr("ramify.gateway.session.RETRY_BACKOFF", 0.001)

    async def act():
        session, sampler = session_of([ProviderError("busy"), ProviderError("busy"), "one"])
        reply = await session.generate(user("a"))
        assert reply.message.text == "one" and session.num_turns == 1 and len(sampler.asked) == 3
        assert len({sampling.seed for sampling in sampler.asked}) == 1 and len(session.trace.nodes) == 2

    asyncio.run(act())


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_a_logprob_that_is_no_finite_number_is_the_engines_fault_and_asked_for_again(monkeypatch, logprob):
    monkeypatch.setattr("ramify.gateway.session.RETRY_BACKOFF", 0.001)

    async def story():
        session, sampler = session_of(["one", "one", "one"], max_retries=1)
        whole = sampler.generate

        async def broken(*args, **more):
            done = await whole(*args, **more)
            done.logprobs[-1] = logprob if len(sampler.asked) != 2 else -0.5
            return done

        sampler.generate = broken
        await session.generate(user("hi"))
        assert len(sampler.asked) == 2
        session.max_retries = 0
        with pytest.raises(ProviderError, match=r"tiny gave logprob .* for token \d+ of its sample: not finite"):
            await session.generate(user("hi"))
        assert np.isfinite(session.trace.graph.logprobs.view).all()

    asyncio.run(story())


def test_failures_that_cannot_pass_and_those_that_do_not_are_raised_by_name(monkeypatch):
    monkeypatch.setattr("ramify.gateway.session.RETRY_BACKOFF", 0.001)

    async def act():
        session, sampler = session_of([RequestInvalid("no")] + [ProviderError("busy")] * 3 + ["one"], max_retries=2)
        for kind, calls in ((RequestInvalid, 1), (ProviderError, 4)):
            with pytest.raises(kind):
                await session.generate(user("a"))
            assert len(sampler.asked) == calls
        assert session.num_turns == 0 and not len(session.trace.nodes)
        assert (await session.generate(user("a"))).message.text == "one" and not reasons(session.trace)

    asyncio.run(act())


def test_a_call_has_a_deadline_and_a_cancelled_one_leaves_nothing_behind():
    async def act():
        session, sampler = session_of(["one"] * 3, call_timeout=0.02, limits={"max_turns": 1, "max_output_tokens": 10})
        sampler.gate.clear()
        with pytest.raises(DeadlineExceeded, match=r"0\.02"):
            await session.generate(user("a"))
        task = asyncio.create_task(session.generate(user("a")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        sampler.gate.set()
        await session.generate(user("a"))
        assert session.num_turns == 1 and session.exhausted_limit == "max_turns"

    asyncio.run(act())


def test_an_unknown_place_and_an_empty_request_are_refused():
    session, _ = session_of([])
    with pytest.raises(RequestInvalid, match="node 4"):
        asyncio.run(session.generate(user("a", parent_node=4)))
    with pytest.raises(RequestInvalid, match="messages"):
        asyncio.run(session.generate(ModelRequest(())))


def test_a_token_that_the_vocabulary_does_not_hold_is_the_engines_failure():
    class Odd(Sampler):
        async def generate(self, prompt, sampling, **options):
            done = await super().generate(prompt, sampling, **options)
            return replace(done, token_ids=np.append(done.token_ids[:-1], np.int32(10**6)))

    session = RolloutSession(
        Trace(id="t"),
        TokenPolicy(Odd(["hm"]), TINY, "tiny", vocab_size=512),
        sampling=SamplingConfig(),
        limits=RolloutLimits(),
        max_retries=0,
    )
    with pytest.raises(ProviderError, match="1000000"):
        asyncio.run(session.generate(user("hi")))
    assert len(session.trace.nodes) == 0
