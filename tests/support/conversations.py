"""Strategies for random conversations that the template of a given model accepts."""

import json
from dataclasses import dataclass

from hypothesis import strategies as st

from ramify.trace import Message, ToolCall
from tests.support.renderers import TOOLS, Model

# Letters of several scripts, and the characters of templates and tool formats, without control tokens.
LETTERS = "ab zA9éß日本🙂'\"{}[]():,;.\\/-_\n"
clean = st.text(LETTERS, max_size=24).map(str.strip)
wild = st.text(max_size=24).filter(lambda text: "\r" not in text)  # a line break that SentencePiece-like decoders lose
calls = st.one_of(
    st.builds(lambda query, limit: ("search", {"query": query, "limit": limit}), clean, st.integers(-3, 10**6)),
    st.builds(lambda code, fast: ("run", {"code": code, "fast": fast}), clean, st.booleans()),
)


@dataclass(frozen=True)
class Turn:
    """New messages and the reply to them."""

    messages: tuple[Message, ...]
    reply: Message


@dataclass(frozen=True)
class Conversation:
    tools: tuple[dict, ...]
    turns: tuple[Turn, ...]
    last: tuple[Message, ...]  # the messages after the last reply


@st.composite
def conversations(draw: st.DrawFn, model: Model, text: st.SearchStrategy[str] = clean) -> Conversation:
    tools = tuple(TOOLS) if model.tools and draw(st.booleans()) else ()
    new_messages = [Message("system", draw(text))] if draw(st.booleans()) else []
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 3))):
        # All questions differ, because some templates find the last question by comparison.
        new_messages.append(Message("user", f"{number}{draw(text)}"))
        for _ in range(draw(st.integers(0, 2)) if tools else 0):
            reply = draw(replies(model, text, with_calls=True))
            turns.append(Turn(tuple(new_messages), reply))
            new_messages = [Message("tool", draw(text), tool_call_id=call.id) for call in reply.tool_calls]
        turns.append(Turn(tuple(new_messages), draw(replies(model, text, with_calls=False))))
        new_messages = []
    return Conversation(tools, tuple(turns), (Message("user", f"last {draw(text)}"),))


@st.composite
def replies(draw: st.DrawFn, model: Model, text: st.SearchStrategy[str] = clean, *, with_calls: bool) -> Message:
    reasoning = draw(st.none() | text.filter(bool)) if model.reasoning else None
    if not with_calls:
        return Message("assistant", draw(text), reasoning)
    drawn_calls = draw(st.lists(calls, min_size=1, max_size=model.calls_at_once))
    numbered_replies = draw(st.integers(0, 10**6))
    tool_calls = tuple(
        ToolCall(f"c{numbered_replies:07d}{number}", name, json.dumps(arguments, ensure_ascii=False))
        for number, (name, arguments) in enumerate(drawn_calls)
    )
    content = draw(text) if model.content_beside_calls else ""
    return Message("assistant", content, reasoning, tool_calls)
