"""Rendering: the time of the next turn of a long conversation, and of the whole conversation.

The same conversation is rendered by Ramify, turn by turn as in a rollout, and by the `renderers` library: by its
generic renderer, which works with any chat template, and by a hand-written family. Targets of the design: turn 160
takes less than 20 ms, and no longer than turn 40.
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

from ramify.model.render import RenderedPrompt, Renderer, ToolSchema, load_renderer
from ramify.trace import Message, ToolCall

SHOWN = (40, 80, 160)
MEDIAN_TURNS = 20  # turns whose median is the time of a turn
TOOL: ToolSchema = {
    "type": "function",
    "function": {"name": "run", "description": "Run.", "parameters": {"type": "object"}},
}
Turn = tuple[Message, Message]  # a reply and the message after it


def chat(messages: Sequence[Message]) -> list[Turn]:
    """Return the turns of a conversation."""
    return list(zip(messages[2::2], messages[3::2]))


def tool_loop(messages: Sequence[Message]) -> list[Turn]:
    """Return the same texts as tool calls and their results."""
    loop: list[Turn] = []
    for number, (reply, following) in enumerate(chat(messages)):
        call = ToolCall(f"call{number:05d}", "run", f'{{"code": "{number}"}}')
        result = Message("tool", following.content, tool_call_id=call.id)
        loop.append((Message("assistant", reply.content, tool_calls=(call,)), result))
    return loop


def sampled_ids(
    renderer: Renderer, first_messages: Sequence[Message], reply: Message, tools: Sequence[ToolSchema]
) -> np.ndarray:
    """Return what a model that follows the template samples: the reply up to its stop token."""
    prompt = renderer.render(first_messages, tools).token_ids
    ids = renderer.render([*first_messages, reply], tools, add_generation_prompt=False).token_ids[len(prompt) :]
    stop = next(index for index, id in enumerate(ids) if int(id) in renderer.stop_ids)
    return ids[: stop + 1]


def run_rollout(
    renderer: Renderer, first_messages: Sequence[Message], turns: Sequence[Turn], tools: Sequence[ToolSchema] = ()
) -> tuple[RenderedPrompt, list[float]]:
    """Return the last prompt, and the seconds of each turn from its sampled ids to the next prompt."""
    prompt, seconds = renderer.render(first_messages, tools), []
    for reply, following in turns:
        sampled = sampled_ids(renderer, first_messages, reply, tools)
        started = time.perf_counter()
        parsed = renderer.parse(sampled, prompt)
        if parsed.message.tool_calls:
            following = Message("tool", following.content, tool_call_id=parsed.message.tool_calls[0].id)
        prompt = renderer.bridge(prompt.with_reply(sampled, parsed), [following])
        seconds.append(time.perf_counter() - started)
        if prompt.prefix_break is not None:
            raise AssertionError(f"the template is append-only, but the prompt has a break: {prompt.prefix_break}")
    return prompt, seconds


def min_per_turn(measure: Callable[[], list[float]]) -> list[float]:
    """Return the shortest time of each turn in several rollouts, because turns are short and the machine is noisy."""
    return np.min([measure() for _ in range(REPETITIONS)], axis=0).tolist()


def median_ms(seconds: list[float], turn: int) -> float:
    """Return the milliseconds of a turn: the median of it and the turns before it. Turn 1 is the first prompt."""
    return 1e3 * statistics.median(seconds[turn - 1 - MEDIAN_TURNS : turn - 1])


def full_render(directory: str, messages: Sequence[Message]) -> float:
    """Return the milliseconds of rendering a whole conversation that is not in the renderer's cache."""
    renderer = load_renderer(directory)
    renderer.render(messages[:4])  # derive what the renderer caches about the template
    started = time.perf_counter()
    renderer.render(messages)
    return 1e3 * (time.perf_counter() - started)


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--renderers-python", metavar="PYTHON", help="an interpreter with renderers and tokenizers")
    args = flags.parse_args()
    python = args.renderers_python or (sys.executable if importlib.util.find_spec("renderers") else None)
    renderers_result = competitor(python, "_renderers.py", "renderers>=0.1.12", "--renderers-python", args.check)
    messages = [Message(message["role"], message["content"]) for message in conversation()]
    with tempfile.TemporaryDirectory() as directory:
        save(Path(directory))
        renderer = load_renderer(directory)
        prompt, _ = run_rollout(renderer, messages[:2], chat(messages))
        seconds = min_per_turn(lambda: run_rollout(renderer, messages[:2], chat(messages))[1])
        loop_seconds = min_per_turn(lambda: run_rollout(renderer, messages[:2], tool_loop(messages), [TOOL])[1])
        full = median(lambda: full_render(directory, messages))
        if not np.array_equal(prompt.token_ids, renderer.render(messages).token_ids):
            raise AssertionError("rendering turn by turn did not give the tokens of the full rendering")
    if renderers_result is not None and renderers_result["tokens"] != len(prompt.token_ids):
        raise AssertionError("the two libraries did not render the same conversation")
    generic, family = (
        None if renderers_result is None else 1e3 * renderers_result[key] for key in ("generic_s", "family_bridge_s")
    )
    rows = [
        *(Row(f"turn {turn}", median_ms(seconds, turn), None, "ms") for turn in SHOWN[:-1]),
        Row(f"turn {TURNS}, beside the generic renderer", median_ms(seconds, TURNS), generic, "ms", 20.0),
        Row(f"turn {TURNS}, beside a hand-written family", median_ms(seconds, TURNS), family, "ms"),
        Row("turn 160 / turn 40", median_ms(seconds, 160) / median_ms(seconds, 40), None, "ratio", 1.5),
        *(Row(f"tool call {turn} of one question", median_ms(loop_seconds, turn), None, "ms", 20.0) for turn in SHOWN),
        Row(f"all {TURNS} turns at once", full, generic, "ms"),
    ]
    return finish(f"benchmarks/render.py: {TURNS} turns, {len(prompt.token_ids)} tokens", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
