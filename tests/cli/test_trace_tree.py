"""The tree of a trace: messages, counts, fork reasons, rewards and errors."""

from rich.console import Console

from ramify.cli.trace_tree import render_trace_tree
from ramify.core.console import make_console
from ramify.core.errors import EnvironmentFault, Failure
from ramify.run.store.image_store import ImageStore
from ramify.trace import MediaPart, Message, ModelCall, TextPart, ToolCall, Trace, Usage
from tests.support.images import make_media


def printed(trace: Trace, **options) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        console.print(render_trace_tree(trace, **options))
    return captured.get()


def reply(trace: Trace, parent: int, text: str, number: int, **more) -> int:
    call = ModelCall(f"c{number}", finish_reason="stop", usage=Usage(5, 3))
    ids = [1, 2, number]
    return trace.graph.add_node(
        parent, Message("assistant", text, **more), ids, sampled_span=(0, 3), logprobs=[-1.0] * 3, call=call
    )


def forked() -> Trace:
    trace = Trace(id="t1", rewards={"score": (0.5, 2.0), "late": None}, metrics={"turns": 2.0}, stop="done")
    user = trace.graph.add_node(-1, Message("user", "go"), [7, 8])
    first = reply(trace, user, "left way", 3, tool_calls=(ToolCall("x", "look", '{"at": 1}'),))
    trace.graph.add_node(first, Message("tool", "seen", tool_call_id="x"), [9])
    reply(trace, user, "right way", 4)
    trace.info["forks"] = [{"node": 3, "at": 0, "reason": "sample", "detail": ""}]
    trace.errors = [Failure.from_exception(EnvironmentFault("reward late raised"))]
    return trace


def test_every_message_is_shown_once_with_its_counts():
    text = printed(forked())
    for message in ("go", "left way", "seen", "right way"):
        assert text.count(message) == 1
    assert "4 messages, 2 branches" in text
    assert "9 tokens, 6 sampled" in text
    assert '-> look({"at": 1})' in text
    assert "sample at [0]" in text  # the reason of the fork


def test_rewards_metrics_and_errors_are_shown():
    text = printed(forked())
    assert "reward missing" in text
    assert "score: 0.5 x 2" in text
    assert "late: missing" in text
    assert "EnvironmentFault: reward late raised" in text
    assert "stop done" in text


def test_tool_calls_over_mcp_are_shown():
    trace = forked()
    call = {"tool": "add", "arguments": '{"amount":2}', "result": "a\n\x1bb", "is_error": False, "node": 1}
    trace.info["tool_calls"] = [{**call, "start": 0.0, "end": 1.0}]
    assert 'tool after [1]: add({"amount":2}) -> a \\x1bb' in printed(trace)


def test_long_message_is_truncated_unless_full():
    trace = Trace(id="t")
    trace.graph.add_node(-1, Message("user", "x" * 5000 + "END"), [1])
    assert "END" not in printed(trace)
    assert "5003 characters" in printed(trace)
    assert "END" in printed(trace, full=True)


def test_long_conversation_does_not_recurse():
    trace = Trace(id="t")
    node = -1
    for number in range(1500):
        node = trace.graph.add_node(node, Message("user", f"turn {number}"), [number])
    assert "turn 1499" in printed(trace)


def test_square_brackets_are_not_markup():
    trace = Trace(id="t")
    trace.graph.add_node(-1, Message("user", "guess [crane] and [/red]"), [1])
    assert "[crane] and [/red]" in printed(trace)


def test_images_are_shown_by_format_and_size(tmp_path):
    image = make_media(100, 100)
    trace = Trace(id="t")
    trace.add_media(image)
    trace.graph.add_node(-1, Message("user", (TextPart("What is "), MediaPart(image.hash), TextPart("?"))), [1])
    label = f"[image 100×100 png {image.hash[:4]}]"
    assert f"What is {label}?" in printed(trace)
    store = ImageStore(tmp_path)
    store.write(trace.detach_images())
    assert f"What is {label}?" in printed(trace, images=store)
    assert f"What is [image {image.hash[:4]}]?" in printed(trace)


def test_long_lines_are_wrapped(capsys):
    trace = Trace(id="t")
    trace.graph.add_node(-1, Message("user", " ".join(f"word{number}" for number in range(40))), [1])
    make_console().print(render_trace_tree(trace))
    text = capsys.readouterr().out
    assert all(f"word{number}" in text for number in range(40))
