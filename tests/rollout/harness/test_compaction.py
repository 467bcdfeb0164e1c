"""Compaction: the policy summarizes a long conversation, and the next branch starts from the task and the summary."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ramify as rf
from ramify.core.errors import ConfigInvalid
from ramify.infer.dialects.model_call import SUMMARY_REQUEST
from ramify.infer.gateway import TokenPolicy
from ramify.orchestrate.algorithms import get_trainable_nodes
from ramify.rollout import run_attempt
from ramify.rollout.harness.chat import CONTINUE_REQUEST, EMPTY_SUMMARY, OMITTED_RESULT
from ramify.rollout.validation import ScriptedPolicy
from ramify.trace import Message, ToolCall, Trace, decode_trace, encode_trace
from tests.support.attempts import TASK, OneTask, list_messages, load_env, tool_call
from tests.support.engine import ScriptedClient, check_tokens
from tests.support.renderers import renderer

EXAMPLES = max(6, settings.default.max_examples // 6) if settings.default else 6
TASK_NODE = 1  # the system prompt is node 0


class Printing(OneTask):
    @rf.tool
    def echo(self, length: int) -> str:
        """Return a text."""
        return "x" * length


class Agent(ScriptedClient):
    """A policy that calls `echo` once per length, then answers; its summaries are numbered."""

    def __init__(self, lengths: list[int]) -> None:
        self.calls = [tool_call("echo", length=length) for length in lengths]
        self.num_summaries = 0
        super().__init__(self.reply_to)

    def reply_to(self, prompt: str) -> str:
        if is_summary_prompt(prompt):
            self.num_summaries += 1
            return f"summary {self.num_summaries}"
        return self.calls.pop(0) if self.calls else "done"

    def decode_prompts(self) -> list[str]:
        return [self.renderer.tokenizer.decode(prompt) for prompt, _, _ in self.samples]


def is_summary_prompt(prompt: str) -> bool:
    return prompt.rpartition("<|im_start|>user")[2].strip().startswith(SUMMARY_REQUEST.text)


async def run_agent(client: ScriptedClient, taskset: type[rf.Taskset] = Printing, **source: Any) -> Trace:
    """Run one attempt and return its trace, as it is stored."""
    policy = TokenPolicy(client, client.renderer, "tiny", max_model_len=2048)
    (trace,) = (await run_attempt(load_env(taskset, **source), TASK, policy=policy, id="r1")).traces
    return decode_trace(encode_trace(trace))


def branch_messages(trace: Trace, leaf: int) -> list[tuple[str, str]]:
    return [(trace.nodes[node].message.role, trace.nodes[node].message.text) for node in trace.graph.path_nodes(leaf)]


@settings(max_examples=2 * EXAMPLES)
@given(
    lengths=st.lists(st.integers(0, 300), max_size=8),
    compact_at=st.integers(1, 1200),
    max_turns=st.none() | st.integers(1, 10),
    harness=st.sampled_from(["chat", "bash"]),
)
async def test_every_branch_starts_from_the_task_and_all_replies_are_trained(lengths, compact_at, max_turns, harness):
    client = Agent(lengths)
    trace = await run_agent(client, harness={"id": harness, "compact_at": compact_at}, max_turns=max_turns)

    # Every call is recorded exactly, and the number of calls is as without compaction plus the summaries.
    check_tokens(trace, client)
    num_calls = len(lengths) + 1 + client.num_summaries
    assert len(trace.sampled_nodes) == num_calls - (0 if trace.stop == "done" else len(client.calls) + 1)
    if max_turns is not None:
        assert len(trace.sampled_nodes) <= max_turns
        assert trace.stop == ("done" if num_calls <= max_turns and not client.calls else "max_turns")
    assert not trace.errors

    # One tree: each summary ends a branch, and the next branch forks after the task.
    assert trace.metrics.get("compactions", 0.0) == client.num_summaries
    assert len(trace.leaves) == client.num_summaries + 1
    summaries = [leaf for leaf in trace.leaves if trace.nodes[leaf].message.text.startswith("summary")]
    assert len(summaries) == client.num_summaries
    forks = trace.info.get("forks", [])
    assert [(fork["at"], fork["reason"]) for fork in forks] == [(TASK_NODE, "compacted")] * client.num_summaries
    for number, leaf in enumerate(sorted(trace.leaves)):
        messages = branch_messages(trace, leaf)
        assert [role for role, _ in messages[:2]] == ["system", "user"]
        if number:
            expected = [("assistant", f"summary {number}"), ("user", CONTINUE_REQUEST.text)]
            assert messages[2:4] == expected

    # The continuation is part of the main conversation, and the summaries are trained like the other replies.
    assert list(get_trainable_nodes(trace)) == list(trace.sampled_nodes)

    # A conversation is compacted exactly when it reaches `compact_at`, but not before its first or the last turn.
    starts_branch = True
    for index, (prompt, text) in enumerate(zip((prompt for prompt, _, _ in client.samples), client.decode_prompts())):
        is_summary, is_last_turn = is_summary_prompt(text), index + 1 == max_turns
        if not is_summary and not starts_branch and not is_last_turn:
            assert len(prompt) < compact_at
        if is_summary:
            assert not starts_branch and not is_last_turn
        starts_branch = is_summary


async def test_a_long_rollout_has_more_tokens_than_seq_len():
    client = Agent([150] * 12)
    trace = await run_agent(client, harness={"id": "chat", "compact_at": 400}, seq_len=1000)
    assert trace.stop == "done" and client.num_summaries >= 4
    assert trace.graph.tokens.size > 2 * 1000
    assert max(trace.graph.path_length(leaf) for leaf in trace.leaves) <= 1000
    without = await run_agent(Agent([150] * 12), harness={"id": "chat"}, seq_len=1000)
    assert without.stop in ("ContextOverflow", "length")


@pytest.mark.parametrize("name", ["max_input_tokens", "max_output_tokens", "max_total_tokens"])
@settings(max_examples=EXAMPLES)
@given(limit=st.integers(200, 3000))
async def test_token_budgets_are_exact(name, limit):
    client = Agent([100] * 10)
    trace = await run_agent(client, harness={"id": "chat", "compact_at": 300}, **{name: limit})
    sampled = trace.graph.logprobs.size
    context = trace.graph.tokens.size - sampled
    used = {"max_input_tokens": context, "max_output_tokens": sampled, "max_total_tokens": context + sampled}[name]
    assert used <= limit
    if trace.stop == "done":
        assert not client.calls
    else:
        assert trace.stop in (name, "length", "BudgetExceeded")
    check_tokens(trace, client)


async def test_tokens_that_are_too_few_for_a_summary_are_left_to_the_agent():
    first = await run_agent(Agent([300, 300]), harness={"id": "chat", "compact_at": 300}, max_turns=1)
    limit = first.graph.logprobs.size + 20
    client = Agent([300, 300])
    trace = await run_agent(client, harness={"id": "chat", "compact_at": 300}, max_output_tokens=limit)
    assert (client.num_summaries, trace.num_turns) == (0, 2)
    assert "compactions" not in trace.metrics


async def test_tool_results_without_room_are_left_out_of_the_summary():
    client = Agent([100, 900])
    trace = await run_agent(client, harness={"id": "chat", "compact_at": 500}, seq_len=1000)
    assert trace.stop == "done" and client.num_summaries == 1
    messages = branch_messages(trace, min(trace.leaves))
    assert messages[-3:] == [("tool", OMITTED_RESULT), ("user", SUMMARY_REQUEST.text), ("assistant", "summary 1")]


class Reasoning(ScriptedClient):
    """A policy that reasons before each of five calls of `echo`, in the format of its model."""

    def __init__(self, model: str) -> None:
        self.num_calls, self.model = 0, model
        super().__init__(self.reply_to, renderer(model))

    def reply_to(self, prompt: str) -> str:
        if SUMMARY_REQUEST.text in prompt:
            return "a summary"
        self.num_calls += 1
        if self.num_calls > 5:
            return "done"
        if self.model.startswith("mistral"):
            return f'[TOOL_CALLS][{{"name": "echo", "arguments": {{"length": 60}}, "id": "call{self.num_calls:05}"}}]'
        return f"<think>\nstep {self.num_calls}\n</think>\n\n{tool_call('echo', length=60)}"


@pytest.mark.parametrize("model", ["qwen3", "qwen2.5", "glm-4", "granite", "mistral-v11"])
async def test_a_summary_continues_the_tokens_of_its_conversation(model):
    """A template may drop reasoning at a message of the user, or refuse one after a tool result."""
    trace = await run_agent(Reasoning(model), harness={"id": "chat", "compact_at": 600})
    assert trace.stop == "done", trace.errors
    assert trace.metrics["compactions"] >= 1
    assert {fork["reason"] for fork in trace.info["forks"]} == {"compacted"}
    assert len(trace.leaves) == 1 + trace.metrics["compactions"]


async def test_summary_with_a_tool_call_only_runs_no_tool():
    class Stubborn(Agent):
        def reply_to(self, prompt: str) -> str:
            return tool_call("echo", length=7) if is_summary_prompt(prompt) else super().reply_to(prompt)

    trace = await run_agent(Stubborn([300, 1]), harness={"id": "chat", "compact_at": 400})
    assert trace.stop == "done"
    assert ("assistant", EMPTY_SUMMARY) in list_messages(trace)
    assert ("tool", "x" * 7) not in list_messages(trace)


async def test_truncated_summary_is_used_as_it_is():
    trace = await run_agent(Agent([300, 1]), harness={"id": "chat", "compact_at": 400}, sampling={"max_tokens": 70})
    assert trace.stop == "done"


async def test_stop_hooks_do_not_see_a_summary():
    class Stopping(Printing):
        @rf.stop
        def summarized(self, trace) -> bool:
            return "summary" in trace.last_reply

    client = Agent([300, 1])
    assert (await run_agent(client, Stopping, harness={"id": "chat", "compact_at": 400})).stop == "done"
    assert client.num_summaries == 1


class Talking(OneTask):
    def user(self):
        return Asking()


class Asking(rf.User):
    """Asks four questions of 100 characters."""

    def respond(self, turn):
        return f"question {turn} " + "?" * 100 if turn < 5 else None


async def test_a_message_of_the_user_follows_the_summary():
    client = Agent([])
    trace = await run_agent(client, Talking, harness={"id": "chat", "compact_at": 300})
    assert trace.stop == "user" and client.num_summaries == 1
    messages = branch_messages(trace, max(trace.leaves))
    assert messages[2] == ("assistant", "summary 1")
    assert messages[3][0] == "user" and messages[3][1].startswith("question ")
    old = branch_messages(trace, min(trace.leaves))
    assert messages[3] not in old and old[-2:] == [("user", SUMMARY_REQUEST.text), ("assistant", "summary 1")]
    assert TASK.prompt == messages[1][1]


async def test_a_policy_without_tokens_is_compacted_by_an_estimate():
    calls = [Message("assistant", tool_calls=(ToolCall(f"c{n}", "echo", '{"length": 2000}'),)) for n in range(2)]
    policy = ScriptedPolicy([calls[0], "summary 1", calls[1], "summary 2", "done"])
    env = load_env(Printing, harness={"id": "chat", "compact_at": 400})
    (trace,) = (await run_attempt(env, TASK, policy=policy, id="r1")).traces
    assert trace.stop == "done" and trace.metrics["compactions"] == 2
    assert [(fork["at"], fork["reason"]) for fork in trace.info["forks"]] == [(TASK_NODE, "compacted")] * 2


def test_compact_at_beyond_seq_len_is_refused():
    with pytest.raises(ConfigInvalid, match=r"compact_at: 1000 .*a path has at most 1000 \(seq_len"):
        load_env(OneTask, harness={"id": "bash", "compact_at": 1000}, seq_len=1000)
