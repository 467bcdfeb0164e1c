"""The traces behind the golden files. `python -m tests.trace.make_golden` writes them, once for each schema version.

The files of a released schema never change: they stand for traces that people have on disk.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ramify.errors import Failure, WorkerDied
from ramify.trace import (
    TRACE_SCHEMA,
    Episode,
    Media,
    MediaPart,
    Message,
    MessageSpan,
    ModelCall,
    PromptMedia,
    TextPart,
    ToolCall,
    Trace,
    TraceBuilder,
    Turn,
    Usage,
    VersionRun,
    encode_episode,
    encode_trace,
    to_json,
)

GOLDEN = Path(__file__).parent / "golden"
IMAGE = Media.from_bytes(b"not really a png", "image/png")
SYSTEM = Message("system", "Be brief.")
USER = Message("user", (TextPart("What is this? Größe?"), MediaPart(IMAGE.hash)))
PROMPT = [1, 10, 3, 2, 11, 0, 0, 12, 3]
SPANS = [MessageSpan(SYSTEM, 3, (1, 2)), MessageSpan(USER, 9, (4, 8))]


def golden_trace() -> Trace:
    """A conversation with a retry, a tool call that is answered, a message without tokens, and a second root."""
    trace = Trace(
        id="golden",
        episode="e1",
        group="g1",
        attempt=2,
        agent="solver",
        env="reverse-text",
        task={"prompt": "What is this?", "answer": None, "tags": ["a", {"b": 1.5}], "n": -3},
        rewards={"exact": (1.0, 0.5), "judge": None},
        metrics={"chars": 12.0},
        info={"note": "größer", "big": 2**63, "nested": {"list": [True, None, 0.25]}},
        stop="done",
        harness={"id": "chat"},
        runtime={"id": "local"},
        sampler={"engine": "native"},
        errors=[Failure(WorkerDied.name, "exit code 9", WorkerDied.blame, WorkerDied.retryable)],
    )
    trace.timing.model, trace.timing.scoring = 1.5, 0.25
    builder = TraceBuilder(trace)
    shown = [PromptMedia(IMAGE, 1, 1, 5, 7)]
    turns = [_first(shown), _second(shown), _answered(shown), _other_root()]
    for turn in turns:
        builder.add_turn(turn)
    return trace


def golden_episode() -> Episode:
    critic = Trace(id="golden-critic", episode="e1", group="g1", attempt=2, agent="critic")
    critic.add_node(-1, Message("user", "judge"), [1, 2], content_span=(0, 1))
    return Episode((golden_trace(), critic))


def _first(shown: list[PromptMedia]) -> Turn:
    usage = Usage(11, 3, 0)
    return Turn(
        call=ModelCall(
            "call-1", "policy", "policy@4", {"temperature": 0.5, "stop": ["x"]}, "stop", usage, 100.5, 101.25
        ),
        prompt_ids=[*PROMPT, 2, 20],
        spans=SPANS,
        reply=Message("assistant", "An image.", "It looks like one."),
        reply_ids=[31, 32, 3],
        reply_content_span=(0, 2),
        logprobs=[-0.5, -1.25, -0.0078125],
        versions=[VersionRun("policy", 1, 4, 2), VersionRun("policy", 1, 5, 1)],
        media=shown,
    )


def _second(shown: list[PromptMedia]) -> Turn:
    tool = ToolCall("tc", "look", '{"at": 1}')
    return Turn(
        call=ModelCall("call-2", finish_reason="length"),
        prompt_ids=[*PROMPT, 2, 20],
        spans=SPANS,
        reply=Message("assistant", "", None, (tool,)),
        reply_ids=[33, 3],
        logprobs=[-2.0, -3.0],
        media=shown,
        arrays={"experts": np.array([[1, 2], [3, 4]], np.uint8)},
    )


def _answered(shown: list[PromptMedia]) -> Turn:
    reply = Message("assistant", "", None, (ToolCall("tc", "look", '{"at": 1}'),))
    spans = [
        *SPANS,
        MessageSpan(reply, 14, (11, 12)),
        MessageSpan(Message("tool", "seen", tool_call_id="tc"), 17, (15, 16)),
    ]
    return Turn(
        call=ModelCall("call-3"),
        prompt_ids=[*PROMPT, 2, 20, 33, 3, 4, 2, 13, 3, 2, 20],
        spans=spans,
        reply=Message("assistant", "Seen."),
        reply_ids=[34, 3],
        logprobs=[-0.25, 0.0],
        media=shown,
        trainable=False,
    )


def _other_root() -> Turn:
    return Turn(
        call=ModelCall("call-4"),
        prompt_ids=[7],
        spans=[MessageSpan(Message("system", "unseen"), 0, (0, 0))],
        reply=Message("assistant", ""),
        reply_ids=[],
        logprobs=[],
    )


def write() -> None:
    """Write the files of the present schema version."""
    GOLDEN.mkdir(exist_ok=True)
    trace = golden_trace()
    (GOLDEN / f"v{TRACE_SCHEMA}.trace").write_bytes(encode_trace(trace))
    (GOLDEN / f"v{TRACE_SCHEMA}.json").write_text(to_json(trace, indent=2) + "\n", encoding="utf-8")
    (GOLDEN / f"v{TRACE_SCHEMA}.episode").write_bytes(encode_episode(golden_episode()))


if __name__ == "__main__":
    write()
