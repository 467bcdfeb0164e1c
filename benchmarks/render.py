"""Rendering: what the next turn of a long conversation costs, and what all of it costs.

The same conversation is rendered by Ramify, turn by turn as a rollout does it, and by the `renderers` library: by its
generic renderer, which like ours works from any chat template, and by a hand-written family. Targets are those of the
design: the last turn of 160 in under 20 ms, and turn 160 no dearer than turn 40.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from _chat import TURNS, conversation, save
from _check import REPETITIONS, Row, competitor, finish, median, parser

from ramify.render import RenderedPrompt, Renderer, ToolSchema, load_renderer
from ramify.trace import Message, ToolCall

SHOWN = (40, 80, 160)
AROUND = 20  # a turn is timed with its neighbours
TOOL: ToolSchema = {
    "type": "function",
    "function": {"name": "run", "description": "Run.", "parameters": {"type": "object"}},
}
Turn = tuple[Message, Message]  # a reply, and the message that answers it


def chat(messages: Sequence[Message]) -> list[Turn]:
    return list(zip(messages[2::2], messages[3::2]))


def tool_loop(messages: Sequence[Message]) -> list[Turn]:
    """The same texts as calls of a tool and their results."""
    loop: list[Turn] = []
    for number, (reply, following) in enumerate(chat(messages)):
        call = ToolCall(f"call{number:05d}", "run", f'{{"code": "{number}"}}')
        result = Message("tool", following.content, tool_call_id=call.id)
        loop.append((Message("assistant", reply.content, tool_calls=(call,)), result))
    return loop


def sampled_ids(
    renderer: Renderer, asked: Sequence[Message], reply: Message, tools: Sequence[ToolSchema]
) -> np.ndarray:
    """What a model that follows the template samples: the reply up to its stop token."""
    prompt = renderer.render(asked, tools).token_ids
    ids = renderer.render([*asked, reply], tools, add_generation_prompt=False).token_ids[len(prompt) :]
    stop = next(at for at, id in enumerate(ids) if int(id) in renderer.stop_ids)
    return ids[: stop + 1]


def roll_out(
    renderer: Renderer, asked: Sequence[Message], turns: Sequence[Turn], tools: Sequence[ToolSchema] = ()
) -> tuple[RenderedPrompt, list[float]]:
    """The last prompt, and the seconds that each turn took from its sampled ids to the next prompt."""
    prompt, seconds = renderer.render(asked, tools), []
    for reply, following in turns:
        sampled = sampled_ids(renderer, asked, reply, tools)
        started = time.perf_counter()
        parsed = renderer.parse(sampled, prompt)
        if parsed.message.tool_calls:
            following = Message("tool", following.content, tool_call_id=parsed.message.tool_calls[0].id)
        prompt = renderer.bridge(prompt.with_reply(sampled, parsed), [following])
        seconds.append(time.perf_counter() - started)
        if prompt.prefix_break is not None:
            raise AssertionError(f"the template is append-only, and yet: {prompt.prefix_break}")
    return prompt, seconds


def quietest(measure: Callable[[], list[float]]) -> list[float]:
    """Each turn's best of three rollouts: a turn is so short that a busy machine would show more than the renderer."""
    return np.min([measure() for _ in range(REPETITIONS)], axis=0).tolist()


def around(seconds: list[float], turn: int) -> float:
    """Milliseconds of a turn, as the median of it and those just before it. Turn 1 is the first prompt."""
    return 1e3 * statistics.median(seconds[turn - 1 - AROUND : turn - 1])


def full_render(renderer: Renderer, messages: Sequence[Message]) -> float:
    started = time.perf_counter()
    renderer.render(messages)
    return 1e3 * (time.perf_counter() - started)


def main() -> int:
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--renderers-python", metavar="PYTHON", help="an interpreter with renderers and tokenizers")
    args = flags.parse_args()
    python = args.renderers_python or (sys.executable if importlib.util.find_spec("renderers") else None)
    theirs = competitor(python, "_renderers.py", "renderers>=0.1.12", "--renderers-python", args.check)
    messages = [Message(message["role"], message["content"]) for message in conversation()]
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory))
        renderer = load_renderer(directory)
        prompt, _ = roll_out(renderer, messages[:2], chat(messages))
        seconds = quietest(lambda: roll_out(renderer, messages[:2], chat(messages))[1])
        loop_seconds = quietest(lambda: roll_out(renderer, messages[:2], tool_loop(messages), [TOOL])[1])
        full = median(lambda: full_render(renderer, messages))
        if not np.array_equal(prompt.token_ids, renderer.render(messages).token_ids):
            raise AssertionError("turn by turn did not give the tokens of the full render")
    if theirs is not None and theirs["tokens"] != len(prompt.token_ids):
        raise AssertionError("the two sides did not render the same conversation")
    generic, family = (None if theirs is None else 1e3 * theirs[key] for key in ("generic_s", "family_bridge_s"))
    rows = [
        *(Row(f"turn {turn}", around(seconds, turn), None, "ms") for turn in SHOWN[:-1]),
        Row(f"turn {TURNS}, beside the generic renderer", around(seconds, TURNS), generic, "ms", 20.0),
        Row(f"turn {TURNS}, beside a hand-written family", around(seconds, TURNS), family, "ms"),
        Row("turn 160 / turn 40", around(seconds, 160) / around(seconds, 40), None, "ratio", 1.5),
        *(Row(f"tool call {turn} of one question", around(loop_seconds, turn), None, "ms", 20.0) for turn in SHOWN),
        Row(f"all {TURNS} turns at once", full, generic, "ms"),
    ]
    return finish(f"benchmarks/render.py: {TURNS} turns, {len(prompt.token_ids)} tokens", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
