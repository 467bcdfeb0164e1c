"""The chat harness: what it says when, and why it stops."""

import base64
import sys

import pytest

import ramify as rf
from ramify.errors import ConfigInvalid
from ramify.trace import Media, TextPart
from tests.rollout.stage import TASK, OneTask, attempt, call, environment, names, said

SERVER = """
import mcp.server.mcpserver as server
box = server.MCPServer("box")
@box.tool()
def shout(text: str) -> str:
    return text.upper()
box.run()
"""


class Adding(OneTask):
    @rf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @rf.tool
    def fail(self) -> None:
        """Fail."""
        raise ValueError("as asked")


class Guide(rf.User):
    def __init__(self, lines):
        self.lines = list(lines)

    def respond(self, reply, turn):
        return f"{self.lines.pop(0)} ({reply}, {turn})" if self.lines else None


def test_a_reply_without_calls_and_without_a_user_is_the_end():
    trace = attempt(environment(OneTask), ["forty-two"])
    assert said(trace) == [("system", "Be brief."), ("user", "go"), ("assistant", "forty-two")]
    assert trace.stop == "done"


def test_a_reply_that_was_cut_off_says_so():
    trace = attempt(environment(OneTask, sampling={"max_tokens": 3}), ["forty-two"])
    assert trace.stop == "length"
    assert trace.is_truncated


def test_tool_calls_are_answered_in_order_on_one_branch():
    trace = attempt(environment(Adding), [call("add", a=1, b=2) + call("add", a=3, b=4), "done"])
    assert said(trace)[3:] == [("tool", "3"), ("tool", "7"), ("assistant", "done")]
    assert len(trace.branches) == 1
    calls = trace.nodes[2].message.tool_calls
    assert [node.message.tool_call_id for node in trace.nodes][3:5] == [calls[0].id, calls[1].id]


def test_what_a_tool_or_its_caller_does_wrong_is_told_to_the_model():
    script = [call("fail"), call("add", a="x", b=1), call("ad", a=1, b=1), "I give up"]
    trace = attempt(environment(Adding), script)
    answers = [text for role, text in said(trace) if role == "tool"]
    assert answers[0] == "error: ValueError: as asked"
    assert "argument a" in answers[1]
    assert "did you mean add?" in answers[2]
    assert not trace.errors


def test_without_tools_a_call_is_only_text():
    trace = attempt(environment(OneTask), [call("add", a=1, b=2)])
    assert trace.stop == "done"
    assert len(trace.sampled_nodes) == 1


def test_a_call_that_cannot_be_read_is_answered_and_a_good_one_counts_anew():
    broken = '<tool_call>{"name": </tool_call>'
    trace = attempt(environment(Adding), [broken, broken, call("add", a=1, b=1), broken, broken, "sorry"])
    complaints = [text for role, text in said(trace) if role == "user" and text.startswith("error:")]
    assert len(complaints) == 4
    assert "invalid_json" in complaints[0]
    assert trace.stop == "done"


def test_three_such_calls_in_a_row_end_the_rollout_by_name_and_it_is_scored():
    class Scored(Adding):
        @rf.reward
        def fixed(self) -> float:
            return 0.25

    trace = attempt(environment(Scored), ['<tool_call>{"name": </tool_call>'] * 3)
    assert names(trace) == ["MalformedCall"]
    assert trace.stop == "MalformedCall"
    assert trace.reward == 0.25


def test_the_user_speaks_between_replies_until_it_has_nothing_to_say():
    class Talking(OneTask):
        def user(self):
            return Guide(["more", "and more"])

    trace = attempt(environment(Talking), ["a", "b", "c"])
    assert [text for role, text in said(trace) if role == "user"] == ["go", "more (a, 1)", "and more (b, 2)"]
    assert trace.stop == "user"


def test_without_a_prompt_the_user_speaks_first():
    class Talking(OneTask):
        def user(self):
            return Guide(["hello"])

    trace = attempt(environment(Talking), ["hi"], rf.Task(answer=1))
    assert said(trace) == [("user", "hello (None, 0)"), ("assistant", "hi")]


def test_without_a_prompt_and_a_user_nothing_starts():
    with pytest.raises(ConfigInvalid, match=r"no prompt.*`user`"):
        attempt(environment(OneTask), [], rf.Task(answer=1))


def test_a_stop_hook_ends_it_under_its_own_name():
    class Stopping(Adding):
        @rf.stop
        def enough(self, trace) -> bool:
            return "stop" in trace.last_reply

    trace = attempt(environment(Stopping), [call("add", a=1, b=1), "stop" + call("add", a=1, b=1), "never"])
    assert trace.stop == "enough"
    assert len(trace.sampled_nodes) == 2


def test_a_stop_hook_sees_what_the_tools_did_before_the_model_is_asked_again():
    class Counting(Adding):
        @rf.tool
        def finish(self, state) -> str:
            """End it."""
            state.finished = True
            return "finished"

        @rf.stop
        def finished(self, state):
            return getattr(state, "finished", False)

    trace = attempt(environment(Counting), [call("add", a=1, b=1), call("finish"), "never"])
    assert trace.stop == "finished"
    assert len(trace.sampled_nodes) == 2


def test_turns_are_used_up_exactly():
    trace = attempt(environment(Adding, max_turns=2), [call("add", a=1, b=1)] * 5)
    assert trace.stop == "max_turns"
    assert len(trace.sampled_nodes) == 2
    assert not trace.errors


def test_a_prompt_may_be_messages():
    prompt = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "go"},
    )
    trace = attempt(environment(OneTask), ["ok"], rf.Task(prompt=prompt))
    assert said(trace) == [("user", "hi"), ("assistant", "yes?"), ("user", "go"), ("assistant", "ok")]


def test_an_image_in_the_prompt_reaches_the_policy():
    url = "data:image/png;base64," + base64.b64encode(b"png").decode()
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
    trace = attempt(environment(OneTask), ["ok"], rf.Task(prompt=({"role": "user", "content": parts},)))
    assert names(trace) == ["TemplateRefused"]  # tiny is blind, and says so
    assert "media" in trace.errors[0].message


def test_a_prompt_that_is_no_message_is_named():
    trace = attempt(environment(OneTask), [], rf.Task(prompt=({"role": "wizard", "content": "hi"},)))
    assert names(trace) == ["EnvironmentFault"]
    assert "task.prompt[0]" in trace.errors[0].message


def test_tools_of_an_mcp_server_are_offered_beside_the_tasksets_own():
    harness = {"mcp": {"box": {"command": [sys.executable, "-c", SERVER]}}}
    trace = attempt(environment(Adding, harness=harness), [call("shout", text="hi") + call("add", a=1, b=1), "ok"])
    assert [text for role, text in said(trace) if role == "tool"] == ["HI", "2"]


def test_a_server_that_cannot_be_opened_is_the_systems_fault():
    harness = {"mcp": {"box": {"command": ["/nonexistent"]}}}
    trace = attempt(environment(Adding, harness=harness), ["ok"], TASK)
    assert names(trace) == ["SandboxError"]
    assert "'box'" in trace.errors[0].message


class Guided(Adding):
    def user(self):
        return Guide(["go on", "and now"])


def test_turn_counts_the_replies_that_the_user_has_heard_not_those_that_call_tools():
    trace = attempt(environment(Guided), [call("add", a=1, b=2), "three", call("add", a=3, b=4), "seven", "bye"])
    heard = [text for role, text in said(trace) if role == "user"]
    assert heard == ["go", "go on (three, 1)", "and now (seven, 2)"]


class Opening(OneTask):
    def user(self):
        return Guide(["hello", "and now"])


def test_turn_is_0_where_the_user_opens_the_conversation():
    trace = attempt(environment(Opening), ["three", "bye"], rf.Task(key="opened"))
    assert [text for role, text in said(trace) if role == "user"] == ["hello (None, 0)", "and now (three, 1)"]


def test_an_image_that_a_tool_returns_is_described_to_a_model_without_eyes():
    class Painter(OneTask):
        @rf.tool
        def paint(self) -> list[TextPart | Media]:
            """Paint something."""
            return [TextPart("here: "), Media.from_bytes(b"not really a picture", "image/jpeg")]

    trace = attempt(environment(Painter), [call("paint"), "nice"])
    assert names(trace) == []
    assert ("tool", "here: [an image: image/jpeg, 20 bytes; you cannot see images]") in said(trace)
