"""The chat harness: its messages and its stop reasons."""

import sys

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.rollout.harness.base import build_initial_messages, join_prompt_text
from ramify.trace import Media, MediaPart, TextPart
from tests.support import mcp_server
from tests.support.attempts import (
    TASK,
    OneTask,
    error_names,
    list_messages,
    load_env,
    run_one,
    tool_call,
)
from tests.support.images import make_media


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


async def test_reply_without_tool_calls_and_user_ends_the_rollout():
    trace = await run_one(load_env(OneTask), ["forty-two"])
    assert list_messages(trace) == [("system", "Be brief."), ("user", "go"), ("assistant", "forty-two")]
    assert trace.stop == "done"


async def test_truncated_reply_has_stop_reason_length():
    trace = await run_one(load_env(OneTask, sampling={"max_tokens": 3}), ["forty-two"])
    assert trace.stop == "length"
    assert trace.is_truncated


async def test_tool_calls_are_answered_in_order_on_one_branch():
    trace = await run_one(load_env(Adding), [tool_call("add", a=1, b=2) + tool_call("add", a=3, b=4), "done"])
    assert list_messages(trace)[3:] == [("tool", "3"), ("tool", "7"), ("assistant", "done")]
    assert len(trace.branches) == 1
    calls = trace.nodes[2].message.tool_calls
    assert [node.message.tool_call_id for node in trace.nodes][3:5] == [calls[0].id, calls[1].id]


async def test_tool_errors_and_invalid_calls_are_shown_to_the_model():
    script = [
        tool_call("fail"),
        tool_call("add", a="x", b=1),
        tool_call("ad", a=1, b=1),
        "I give up",
    ]
    trace = await run_one(load_env(Adding), script)
    answers = [text for role, text in list_messages(trace) if role == "tool"]
    assert answers[0] == "error: ValueError: as asked"
    assert "argument a" in answers[1]
    assert "did you mean add?" in answers[2]
    assert not trace.errors


async def test_tool_call_without_tools_is_plain_text():
    trace = await run_one(load_env(OneTask), [tool_call("add", a=1, b=2)])
    assert trace.stop == "done"
    assert len(trace.sampled_nodes) == 1


async def test_malformed_call_is_answered_and_a_valid_one_resets_the_count():
    broken = '<tool_call>{"name": </tool_call>'
    trace = await run_one(load_env(Adding), [broken, broken, tool_call("add", a=1, b=1), broken, broken, "sorry"])
    error_messages = [text for role, text in list_messages(trace) if role == "user" and text.startswith("error:")]
    assert len(error_messages) == 4
    assert "invalid_json" in error_messages[0]
    assert trace.stop == "done"


async def test_three_malformed_calls_in_a_row_end_the_rollout_and_it_is_scored():
    class Scored(Adding):
        @rf.reward
        def fixed(self) -> float:
            return 0.25

    trace = await run_one(load_env(Scored), ['<tool_call>{"name": </tool_call>'] * 3)
    assert error_names(trace) == ["MalformedCall"]
    assert trace.stop == "MalformedCall"
    assert trace.reward == 0.25


async def test_user_speaks_first_without_a_prompt():
    class Talking(OneTask):
        def user(self):
            return Guide(["hello"])

    trace = await run_one(load_env(Talking), ["hi"], rf.Task(answer=1))
    assert list_messages(trace) == [("user", "hello (None, 0)"), ("assistant", "hi")]


async def test_task_without_prompt_and_user_is_refused():
    with pytest.raises(ConfigInvalid, match=r"no prompt.*`user`"):
        await run_one(load_env(OneTask), [], rf.Task(answer=1))


async def test_stop_hook_runs_after_tools_and_before_the_next_model_call():
    class Counting(Adding):
        @rf.tool
        def finish(self, state) -> str:
            """End it."""
            state.finished = True
            return "finished"

        @rf.stop
        def finished(self, state):
            return getattr(state, "finished", False)

    trace = await run_one(load_env(Counting), [tool_call("add", a=1, b=1), tool_call("finish"), "never"])
    assert trace.stop == "finished"
    assert len(trace.sampled_nodes) == 2


async def test_max_turns_limits_model_calls_exactly():
    trace = await run_one(load_env(Adding, max_turns=2), [tool_call("add", a=1, b=1)] * 5)
    assert trace.stop == "max_turns"
    assert len(trace.sampled_nodes) == 2
    assert not trace.errors


async def test_prompt_may_be_messages():
    prompt = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "go"},
    )
    trace = await run_one(load_env(OneTask), ["ok"], rf.Task(prompt=prompt))
    assert list_messages(trace) == [("user", "hi"), ("assistant", "yes?"), ("user", "go"), ("assistant", "ok")]


async def test_image_in_the_prompt_reaches_the_policy():
    parts = [{"type": "text", "text": "look"}, make_media(8, 8)]
    trace = await run_one(load_env(OneTask), ["ok"], rf.Task(prompt=({"role": "user", "content": parts},)))
    assert error_names(trace) == ["EnvironmentFault"]  # tiny takes no images
    assert "is a text model" in trace.errors[0].message


@pytest.mark.parametrize(
    ("url", "reason"),
    [("data:image/png;base64,%%%", "not valid base64"), ("file:///nowhere/cat.png", "/nowhere/cat.png cannot be read")],
)
async def test_bad_image_of_a_task_is_a_fault_of_the_environment(url, reason):
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    trace = await run_one(load_env(OneTask), [], rf.Task(prompt=({"role": "user", "content": parts},)))
    assert error_names(trace) == ["EnvironmentFault"]
    assert "task.prompt[0]" in trace.errors[0].message and reason in trace.errors[0].message


def test_a_task_may_show_a_file(tmp_path):
    image = make_media(8, 8)
    (tmp_path / "a cat.png").write_bytes(image.data)
    url = f"file://{tmp_path}/a%20cat.png"
    task = rf.Task(prompt=({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},))
    messages, media = build_initial_messages(task)
    assert media == {image.hash: image} and messages[0].content == (MediaPart(image.hash),)
    with pytest.raises(EnvironmentFault, match="a program gets its prompt as text"):
        join_prompt_text(task)


async def test_invalid_prompt_message_is_reported_with_its_index():
    trace = await run_one(load_env(OneTask), [], rf.Task(prompt=({"role": "wizard", "content": "hi"},)))
    assert error_names(trace) == ["EnvironmentFault"]
    assert "task.prompt[0]" in trace.errors[0].message


@pytest.mark.process
async def test_mcp_tools_are_added_to_the_tasksets_tools():
    harness = {"mcp": {"sandbox": {"command": [sys.executable, "-S", mcp_server.__file__]}}}
    trace = await run_one(
        load_env(Adding, harness=harness),
        [tool_call("shout", text="hi") + tool_call("add", a=1, b=1), "ok"],
    )
    assert [text for role, text in list_messages(trace) if role == "tool"] == ["HI", "2"]


@pytest.mark.process
async def test_mcp_server_that_cannot_be_opened_is_a_system_failure():
    harness = {"mcp": {"sandbox": {"command": ["/nonexistent"]}}}
    trace = await run_one(load_env(Adding, harness=harness), ["ok"], TASK)
    assert error_names(trace) == ["SandboxError"]
    assert "'sandbox'" in trace.errors[0].message


class Guided(Adding):
    def user(self):
        return Guide(["go on", "and now"])


async def test_turn_counts_only_replies_to_the_user():
    trace = await run_one(
        load_env(Guided),
        [tool_call("add", a=1, b=2), "three", tool_call("add", a=3, b=4), "seven", "bye"],
    )
    user_messages = [text for role, text in list_messages(trace) if role == "user"]
    assert user_messages == ["go", "go on (three, 1)", "and now (seven, 2)"]
    assert trace.stop == "user"


async def test_image_of_a_tool_is_described_to_a_text_only_model():
    picture = make_media(40, 30, "JPEG")

    class Painter(OneTask):
        @rf.tool
        def paint(self) -> list[TextPart | Media]:
            """Paint something."""
            return [TextPart("here: "), picture]

    trace = await run_one(load_env(Painter), [tool_call("paint"), "nice"])
    assert error_names(trace) == []
    description = f"[an image: image/jpeg, 40 x 30 pixels, {len(picture.data)} bytes; you cannot see images]"
    assert ("tool", f"here: {description}") in list_messages(trace)
