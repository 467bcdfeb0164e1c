"""Sessions in process: what is recorded, forks and their reasons, sampling parameters, and retries."""

import asyncio
import math

import numpy as np
import pytest
from msgspec.structs import replace

from ramify.core.errors import ConfigInvalid, DeadlineExceeded, EnvironmentFault, ProviderError, RequestInvalid
from ramify.infer.gateway import ModelRequest, RolloutLimits, RolloutSession, SamplingConfig, TokenPolicy
from ramify.trace import Media, MediaPart, Message, TextPart, ToolCall, Trace
from tests.support.engine import TINY, ScriptedClient, check_tokens
from tests.support.scenario import make_session, user_request

pytestmark = pytest.mark.promise  # exact tokens

SYSTEM, HELLO = Message("system", "Be brief."), Message("user", "hello")


def assistant(text: str, **fields) -> Message:
    return Message("assistant", text, **fields)


def reasons(trace: Trace) -> list[str]:
    return [fork["reason"] for fork in trace.info.get("forks", [])]


async def generate_from(session: RolloutSession, *messages: Message, **fields):
    return await session.generate(ModelRequest(messages, **fields))


# -- what is recorded --------------------------------------------------------------------------------------------------


async def test_an_in_process_conversation_is_one_branch_of_the_engine_tokens():
    session, token_client = make_session(["one", "two", "three"])
    reply = await generate_from(session, SYSTEM, HELLO, model="gpt-x")
    for text in ("more", "and more"):
        reply = await session.generate(user_request(text, parent_node=reply.node))
    assert (
        reply.message.text == "three" and reply.finish_reason == "stop" and reply.node == len(session.trace.nodes) - 1
    )
    assert session.num_turns == 3 and len(session.trace.leaves) == 1 and not reasons(session.trace)
    check_tokens(session.trace, token_client)
    node = session.trace.nodes[reply.node]
    assert node.call is not None and node.call.id == reply.call_id and node.call.usage == reply.usage
    assert [run.step for run in node.versions] == [1, 2]
    assert 0 < node.call.start_time <= node.call.end_time and session.model_seconds > 0


async def test_parent_nodes_and_whole_histories_give_the_same_branch():
    session, token_client = make_session(["one", "two", "three"])
    first = await generate_from(session, SYSTEM, HELLO)
    await session.generate(user_request("more", parent_node=first.node))
    await generate_from(
        session, SYSTEM, HELLO, assistant("one"), Message("user", "more"), assistant("two"), Message("user", "last")
    )
    assert len(session.trace.leaves) == 1 and not reasons(session.trace)
    check_tokens(session.trace, token_client)


async def test_a_call_is_recorded_with_its_model_and_sampling_parameters():
    session, _ = make_session(["one"], sampling=SamplingConfig(temperature=0.5, max_tokens=30), seed=3)
    reply = await session.generate(
        user_request("a", model="gpt-x", sampling_overrides={"temperature": 0.25, "max_tokens": 9, "stop": ["zz"]})
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


async def test_calls_of_other_models_are_recorded_but_not_trainable():
    session, token_client = make_session(["one"])
    other_session, other_client = make_session(["two", "three"])
    session.models["helper"] = other_session.policy
    first = await session.generate(user_request("a"))
    second = await session.generate(user_request("b", model="helper", parent_node=first.node))
    await session.generate(user_request("c", model="helper", parent_node=second.node))
    assert [node.is_trainable for node in session.trace.nodes if node.call] == [True, False, False]
    call = session.trace.nodes[second.node].call
    assert call is not None and call.requested_model == "helper"
    check_tokens(session.trace, _both(token_client, other_client))
    assert len(session.trace.leaves) == 1


def _both(*clients: ScriptedClient) -> ScriptedClient:
    both = ScriptedClient([])
    both.samples = [sample for token_client in clients for sample in token_client.samples]
    return both


async def test_a_conversation_can_be_continued_from_any_reply():
    session, token_client = make_session(lambda _: "<think>\nhm\n</think>\n\nsure")
    nodes, history = [], [HELLO]
    for turn in range(9):
        reply = await generate_from(session, *history)
        nodes.append(reply.node)
        history += [assistant("sure"), Message("user", f"turn {turn}")]
    for node in nodes:
        await session.generate(user_request("and now?", parent_node=node))
    assert len(session.trace.leaves) == 9 and session.trace.metrics == {"forks": 8.0}
    check_tokens(session.trace, token_client)


# -- forks -------------------------------------------------------------------------------------------------------------


async def test_an_equal_request_is_another_sample_of_the_same_prompt():
    session, token_client = make_session(["one", "two", "three"])
    for _ in range(3):
        await generate_from(session, SYSTEM, HELLO)
    assert reasons(session.trace) == ["sample", "sample"] and session.trace.metrics["forks"] == 2
    assert len(session.trace.nodes) == 5  # the shared prompt is stored once
    check_tokens(session.trace, token_client)


async def test_concurrent_samples_share_their_prompt():
    session, token_client = make_session(["same"] * 5)
    await asyncio.gather(*(generate_from(session, SYSTEM, HELLO) for _ in range(5)))
    assert session.num_turns == 5 and len(session.trace.nodes) == 7 and reasons(session.trace) == ["sample"] * 4
    check_tokens(session.trace, token_client)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([SYSTEM, HELLO, assistant("two"), Message("user", "d")], "dropped"),  # the first turn left out
        ([SYSTEM, HELLO, assistant("one, in short"), Message("user", "b")], "edited"),
        ([SYSTEM, Message("user", "something else")], "new_conversation"),
        ([Message("user", "no system")], "new_conversation"),
    ],
)
async def test_a_rewritten_history_forks_with_its_reason(messages, reason):
    session, token_client = make_session(["one", "two", "three", "four"])
    reply = await generate_from(session, SYSTEM, HELLO)
    reply = await session.generate(user_request("b", parent_node=reply.node))
    await generate_from(session, *messages)
    assert reasons(session.trace) == [reason]
    fork = session.trace.info["forks"][0]
    assert session.trace.nodes[fork["node"]].parent == fork["at"]
    check_tokens(session.trace, token_client)


async def test_changed_tools_fork_once_and_the_conversation_continues():
    def tools(name):
        return ({"type": "function", "function": {"name": name, "description": "", "parameters": {}}},)

    session, token_client = make_session([str(n) for n in range(4)])
    await generate_from(session, HELLO, tools=tools("a"))
    await generate_from(session, HELLO, assistant("0"), HELLO, tools=tools("b"))
    await generate_from(session, HELLO, assistant("0"), HELLO, assistant("1"), HELLO, tools=tools("b"))
    assert session.trace.metrics["render/breaks/tools_changed"] == 1 and reasons(session.trace) == ["tools_changed"]
    check_tokens(session.trace, token_client)


async def test_samples_with_equal_texts_are_distinguished_by_reasoning_or_later_messages():
    session, token_client = make_session(["<think>\nx\n</think>\n\nok", "<think>\ny\n</think>\n\nok", "p", "q", "r"])
    first, second = [await session.generate(user_request("a")) for _ in range(2)]
    await generate_from(session, Message("user", "a"), assistant("ok", reasoning="x"), Message("user", "b"))
    await generate_from(
        session, Message("user", "a"), assistant("ok"), Message("user", "b"), assistant("p"), Message("user", "c")
    )
    await generate_from(session, Message("user", "a"), assistant("ok"), Message("user", "d"))
    parents = {node.message.text: node.parent for node in session.trace.nodes if node.message.role == "user"}
    assert parents["b"] == first.node and parents["d"] == second.node
    check_tokens(session.trace, token_client)


# -- sampling ----------------------------------------------------------------------------------------------------------


async def test_in_training_a_client_can_only_lower_max_tokens():
    session, token_client = make_session(["one"] * 2, is_training=True, sampling=SamplingConfig(max_tokens=50))
    overrides = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "seed": 7}
    await session.generate(user_request("a", sampling_overrides=overrides | {"max_tokens": 5}))
    await session.generate(user_request("b", sampling_overrides=overrides | {"max_tokens": 500}))
    for sampling, max_tokens in zip(token_client.requests, (5, 50)):
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
        assert sampling.seed is None and sampling.max_tokens == max_tokens


@pytest.mark.parametrize("wrong", [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_untrainable_sampling_is_refused(wrong):
    with pytest.raises(ConfigInvalid, match=next(iter(wrong))):
        make_session([], is_training=True, sampling=SamplingConfig(**wrong))


async def test_seeds_are_reproducible_and_differ_between_calls():
    async def main():
        session, token_client = make_session(["one"] * 4, seed=11)
        reply = await session.generate(user_request("a"))
        await session.generate(user_request("a"))
        await session.generate(user_request("b", parent_node=reply.node))
        await session.generate(user_request("c"))
        return [sampling.seed for sampling in token_client.requests]

    seeds = await main()
    assert len(set(seeds)) == 4 and seeds == await main()


async def test_a_stop_string_ends_the_sample_with_the_token_that_completes_it():
    session, token_client = make_session(["red, green, blue", "more"])
    reply = await session.generate(user_request("a", sampling_overrides={"stop": ["een", "blue"]}))
    assert reply.message.text == "red, gr" and reply.finish_reason == "stop"
    node = session.trace.nodes[reply.node]
    sample = node.token_ids[slice(*node.sampled_span)]
    prompt, ids, logprobs = token_client.samples[0]
    assert len(sample) < len(ids) and sample.tolist() == ids[: len(sample)]
    assert node.logprobs.tolist() == logprobs[: len(sample)]
    assert sum(run.count for run in node.versions) == len(sample)
    tokenizer = TINY.tokenizer
    assert "een" in tokenizer.decode(sample) and "een" not in tokenizer.decode(sample[:-1])
    await session.generate(user_request("go on", parent_node=reply.node))
    assert token_client.samples[1][0][: len(prompt) + len(sample)] == prompt + ids[: len(sample)]
    assert session.budget.output_tokens == len(sample) + len(token_client.samples[1][1])


@pytest.mark.parametrize(
    "overrides",
    [{"max_tokens": 0}, {"temperature": "hot"}, {"stop": 5}, {"seed": "x"}, {"seed": 10**30}, {"top_k": 1e300}],
)
async def test_invalid_sampling_overrides_are_refused(overrides):
    session, _ = make_session(["one"])
    with pytest.raises(RequestInvalid, match=next(iter(overrides))):
        await session.generate(user_request("a", sampling_overrides=overrides))


async def test_malformed_calls_are_reported_with_the_reply():
    session, _ = make_session(['<tool_call>{"name": 5}</tool_call>'])
    reply = await session.generate(user_request("a"))
    assert reply.problems and reply.finish_reason == "stop" and "<tool_call>" in reply.message.text


async def test_a_tool_call_can_be_answered_in_process():
    session, token_client = make_session(['<tool_call>{"name": "f", "arguments": {}}</tool_call>', "done"])
    reply = await session.generate(user_request("a"))
    (call,) = reply.message.tool_calls
    assert isinstance(call, ToolCall) and reply.finish_reason == "tool_calls"
    await generate_from(session, Message("tool", "42", tool_call_id=call.id), parent_node=reply.node)
    assert len(session.trace.leaves) == 1
    check_tokens(session.trace, token_client)


async def test_continuations_of_equal_samples_attach_each_to_its_own_sample():
    async def main() -> list[str]:
        call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        session, token_client = make_session([call, call, call + call, "first", "second", "third"])
        samples = [await session.generate(user_request("a")) for _ in range(3)]
        ids = [call.id for sample in samples for call in sample.message.tool_calls]
        assert len(set(ids)) == 4, "every call of the rollout has an id of its own"
        for sample, text in zip(samples, ("first", "second", "third")):
            calls = sample.message.tool_calls
            results = [Message("tool", "42", tool_call_id=call.id) for call in calls]
            reply = await generate_from(session, Message("user", "a"), sample.message, *results)
            assert reply.message.text == text
            result_node = session.trace.nodes[reply.node].parent - len(results) + 1
            assert session.trace.nodes[result_node].parent == sample.node
        assert reasons(session.trace) == ["sample", "sample"]
        check_tokens(session.trace, token_client)
        return ids

    assert await main() == await main()


@pytest.mark.parametrize("argument", ["1e300", "1" + 30 * "0", "-1e19", "NaN", '"\\ud800"', 600 * "[" + 600 * "]"])
async def test_tool_calls_with_extreme_arguments_are_found_again(argument):
    call = f'<tool_call>{{"name": "f", "arguments": {{"x": {argument}}}}}</tool_call>'
    session, token_client = make_session([call, "done"])
    reply = await session.generate(user_request("a"))
    (call,) = reply.message.tool_calls
    await generate_from(session, Message("user", "a"), reply.message, Message("tool", "42", tool_call_id=call.id))
    assert len(session.trace.leaves) == 1 and reasons(session.trace) == []
    check_tokens(session.trace, token_client)


async def test_images_are_refused_by_a_text_only_renderer():
    media = Media.from_bytes(b"picture", "image/png")
    message = Message("user", (TextPart("see"), MediaPart(media.hash)))
    session, _ = make_session(["one"])
    with pytest.raises(EnvironmentFault, match="tiny is a text model"):
        await session.generate(ModelRequest((message,), media={media.hash: media}))


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
async def test_a_sample_with_a_logprob_that_is_not_finite_is_refused(logprob):
    session, token_client = make_session(["one"])
    original_generate = token_client.generate

    async def generate_broken(*args, **fields):
        completion = await original_generate(*args, **fields)
        completion.logprobs[-1] = logprob
        return completion

    token_client.generate = generate_broken
    with pytest.raises(ProviderError, match=r"tiny gave logprob .* for token \d+ of its sample: not finite"):
        await session.generate(user_request("hi"))
    assert np.isfinite(session.trace.graph.logprobs.view).all()


async def test_a_failed_call_is_raised_and_leaves_no_trace():
    session, token_client = make_session([RequestInvalid("no"), ProviderError("busy"), "one"])
    for kind, calls in ((RequestInvalid, 1), (ProviderError, 2)):
        with pytest.raises(kind):
            await session.generate(user_request("a"))
        assert len(token_client.requests) == calls
    assert session.num_turns == 0 and not len(session.trace.nodes)
    assert (await session.generate(user_request("a"))).message.text == "one" and not reasons(session.trace)


async def test_calls_time_out_and_cancelled_calls_release_their_budget():
    session, token_client = make_session(
        ["one"] * 3, call_timeout=0.02, limits={"max_turns": 1, "max_output_tokens": 10}
    )
    token_client.gate.clear()
    with pytest.raises(DeadlineExceeded, match=r"0\.02"):
        await session.generate(user_request("a"))
    session.call_timeout = 60.0
    task = asyncio.create_task(session.generate(user_request("a")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    token_client.gate.set()
    await session.generate(user_request("a"))
    assert session.num_turns == 1 and session.exhausted_limit == "max_turns"


async def test_an_unknown_parent_node_and_an_empty_request_are_refused():
    session, _ = make_session([])
    with pytest.raises(RequestInvalid, match="node 4"):
        await session.generate(user_request("a", parent_node=4))
    with pytest.raises(RequestInvalid, match="messages"):
        await session.generate(ModelRequest(()))


async def test_a_token_id_beyond_the_vocabulary_is_a_provider_error():
    class Odd(ScriptedClient):
        async def generate(self, prompt, sampling, **options):
            completion = await super().generate(prompt, sampling, **options)
            return replace(completion, token_ids=np.append(completion.token_ids[:-1], np.int32(10**6)))

    session = RolloutSession(
        Trace(id="t"),
        TokenPolicy(Odd(["hm"]), TINY, "tiny", vocab_size=512),
        sampling=SamplingConfig(),
        limits=RolloutLimits(),
    )
    with pytest.raises(ProviderError, match="1000000"):
        await session.generate(user_request("hi"))
    assert len(session.trace.nodes) == 0
