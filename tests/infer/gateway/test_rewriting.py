"""Agents that rewrite their history, and concurrent agents: forks, their reasons, and shared prefixes."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ramify.core.errors import BudgetExceeded, ContextOverflow
from ramify.infer.gateway import ModelRequest
from ramify.trace import Message, Trace
from tests.support.engine import check_tokens
from tests.support.renderers import renderer
from tests.support.scenario import make_session

pytestmark = pytest.mark.promise  # exact tokens


def check_no_repeated_siblings(trace: Trace) -> None:
    """Check that common prefixes are one path: no context node equals a sibling. Samples may be equal."""
    seen: set[tuple[int, bytes]] = set()
    for node in trace.nodes:
        if node.call is None:
            place = (node.parent, node.token_ids.tobytes())
            assert place not in seen, f"node {node.index} repeats a sibling"
            seen.add(place)


async def test_dropping_old_turns_forks_at_the_last_common_message(open_scenario):
    count = iter(range(100))
    async with open_scenario(lambda _: f"step {next(count)}") as scenario:
        history = [{"role": "system", "content": "You are careful."}, {"role": "user", "content": "the task"}]
        client = scenario.openai()
        for turn in range(5):
            answer = await client.chat.completions.create(model="x", messages=history)
            history += [{"role": "assistant", "content": answer.choices[0].message.content}]
            history += [{"role": "user", "content": f"result {turn}"}]
            if turn == 2:
                del history[2:6]  # keeps the task and the last turn
        assert scenario.reasons == ["dropped"] and len(scenario.trace.leaves) == 2
        fork = scenario.trace.info["forks"][0]
        assert scenario.trace.nodes[fork["at"]].message.text == "the task"
        assert scenario.trace.metrics["forks"] == 1
        check_no_repeated_siblings(scenario.trace)
        check_tokens(scenario.trace, scenario.engine)


async def test_summarizing_the_history_forks_as_edited(open_scenario):
    count = iter(range(100))
    async with open_scenario(lambda _: f"step {next(count)}") as scenario:
        await scenario.chat("the task")
        await scenario.chat("the task", "step 0", "go on")
        await scenario.chat("the task", "in short: two steps", "go on")
        assert scenario.reasons == ["edited"] and len(scenario.trace.leaves) == 2
        check_no_repeated_siblings(scenario.trace)
        check_tokens(scenario.trace, scenario.engine)


async def test_concurrent_sub_agents_are_branches_of_one_trace(open_scenario):
    count = iter(range(100))
    async with open_scenario(lambda _: f"step {next(count)}") as scenario:
        client = scenario.openai()
        system = {"role": "system", "content": "You are careful."}

        async def agent(name: str) -> None:
            history = [system, {"role": "user", "content": f"the part of {name}"}]
            for turn in range(3):
                answer = await client.chat.completions.create(model="x", messages=history)
                text = answer.choices[0].message.content
                history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"result {turn}"}]

        await asyncio.gather(agent("a"), agent("b"), agent("c"))
        assert scenario.reasons == ["new_conversation"] * 2
        assert len(scenario.trace.leaves) == 3 and scenario.session.num_turns == 9
        assert [node.message.role for node in scenario.trace.nodes].count("system") == 1
        check_no_repeated_siblings(scenario.trace)
        check_tokens(scenario.trace, scenario.engine)


def count_forks(trace: Trace) -> int:
    """Return the number of nodes that are not the first child of their parent, or not the first root."""
    parents = [node.parent for node in trace.nodes]
    return len(parents) - len(set(parents))


# -- any client, any rewriting ----------------------------------------------------------------------------------------

WORDS = st.sampled_from(["yes", "no", " maybe ", "look\nhere", "é", "<think>\nhm\n</think>\n\nso", "ok"])
CALLING = '<tool_call>{"name": "f", "arguments": {"x":1.0}}</tool_call>'
MOVES = st.lists(
    st.tuples(st.sampled_from(["on", "again", "drop", "edit", "cut", "fresh", "both"]), WORDS, st.integers(0, 2**16)),
    min_size=1,
    max_size=8,
)


def as_resent(message: Message, rng: random.Random) -> Message:
    """Return a reply as a client sends it back: with reformatted calls and perhaps without its reasoning."""
    if message.role != "assistant":
        return message
    calls = tuple(replace(call, arguments=call.arguments.replace(":1.0", " : 1")) for call in message.tool_calls)
    return replace(message, tool_calls=calls, reasoning=rng.choice([None, message.reasoning]))


async def conversation(session, moves) -> int:
    """Run a client that rewrites its history; return the number of calls that exceeded a limit."""
    history: list[Message] = [Message("system", "Be."), Message("user", "go")]
    refused = 0
    for move, word, seed in moves:
        rng = random.Random(seed)
        if move == "drop" and len(history) > 4:
            del history[2:4]
        elif move == "edit":
            history[-1] = Message("user", word) if history[-1].role == "user" else history[-1]
        elif move == "cut":
            del history[max(2, len(history) - 2) :]
        elif move == "fresh":
            history = [Message("user", word)]
        sent = tuple(as_resent(message, rng) for message in history)
        count = 3 if move == "both" else 1
        overrides = {"max_tokens": rng.choice([3, 20])}
        answers = await asyncio.gather(
            *(session.generate(ModelRequest(sent, sampling_overrides=overrides)) for _ in range(count)),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, BudgetExceeded | ContextOverflow):
                raise answer
        refused += sum(isinstance(answer, BaseException) for answer in answers)
        reply = next((answer for answer in answers if not isinstance(answer, BaseException)), None)
        if reply is None or move == "again":
            continue
        results = [Message("tool", word, tool_call_id=call.id) for call in reply.message.tool_calls]
        history += [reply.message, *(results or [Message("user", word)])]
    return refused


@given(MOVES, st.lists(st.one_of(WORDS, st.just(CALLING)), min_size=1, max_size=5), st.sampled_from(["tiny", "qwen3"]))
def test_paths_equal_the_tokens_of_the_engine_for_any_rewriting_client(moves, script, model):
    async def check() -> None:
        count = iter(range(1000))
        options = {} if model == "tiny" else {"renderer": renderer(model)}
        session, token_client = make_session(lambda _: script[next(count) % len(script)], **options)
        assert await conversation(session, moves) == 0
        trace = session.trace
        check_tokens(trace, token_client)
        check_no_repeated_siblings(trace)
        assert len(trace.info.get("forks", [])) == count_forks(trace)

    asyncio.run(check())


LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_turns": st.integers(1, 6),
        "max_input_tokens": st.integers(20, 120),
        "max_output_tokens": st.integers(1, 60),
        "max_total_tokens": st.integers(20, 150),
        "seq_len": st.integers(20, 100),
    },
)


@given(MOVES, LIMITS)
def test_budgets_are_exact_for_any_rewriting_client(moves, limits):
    async def check() -> None:
        session, token_client = make_session(lambda _: "a somewhat longer reply", limits=limits)
        refused = await conversation(session, moves)
        trace = session.trace
        sampled = trace.graph.logprobs.size
        context = trace.graph.tokens.size - sampled
        assert (session.budget.input_tokens, session.budget.output_tokens) == (context, sampled)
        turns = sum(node.call is not None for node in trace.nodes)
        used = {"max_turns": turns, "max_input_tokens": context, "max_output_tokens": sampled}
        used |= {"max_total_tokens": context + sampled, "seq_len": max(map(len, trace.branches), default=0)}
        assert all(used[name] <= limit for name, limit in limits.items())
        assert not refused or limits
        check_tokens(trace, token_client)

    asyncio.run(check())
