"""System messages that come after the conversation has begun.

Agent programs say something in the role of the system now and then, behind the user's words or behind the result of a
tool. Some chat templates write such a message where it stands; others refuse it, or move it to the front, which
rewrites the history. For these, its text goes into the message before it, which every template takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from ramify.errors import TemplateRefused
from ramify.render.conversation import Parsed, Renderer
from ramify.render.outline import FILLER, SYSTEM_ROLES
from ramify.render.writer import WORD
from ramify.trace import Message, TextPart

OTHER = "zqotherqz"


def accepts_late_system(renderer: Renderer) -> bool:
    """Return whether the template writes a system message where it stands, with all that is before it unchanged."""
    note = Message("system", WORD)
    try:
        prompt = renderer.render([Message("user", OTHER), note])
        if not _in_order(renderer.tokenizer.decode(prompt.ids), OTHER, WORD):
            return False
        reply = Parsed(Message("assistant", FILLER), (0, 0))
        ids = np.array([*renderer.tokenizer.encode(FILLER, inside=True).ids, *renderer.stop_ids[:1]], np.int32)
        history, asked = prompt.answered(ids, reply), Message("user", FILLER)
        without, later = renderer.bridge(history, [asked]), renderer.bridge(history, [asked, note])
    except TemplateRefused:
        return False
    return later.broke == without.broke and WORD in renderer.tokenizer.decode(later.added)


def fold_late_system(messages: Sequence[Message], *, opening: bool) -> Sequence[Message]:
    """Return the messages with late system messages inside their neighbours; `opening` if no reply precedes them.

    A late one goes to the end of the user's message or tool result before it; behind a reply, to the beginning of the
    user's message after it, or it becomes a user's message.
    """
    first = next((at for at, message in enumerate(messages) if message.role not in SYSTEM_ROLES), len(messages))
    first = first if opening else 0
    if all(message.role not in SYSTEM_ROLES for message in messages[first:]):
        return messages
    folded = list(messages[:first])
    for message in messages[first:]:
        before = folded[-1] if folded else None
        late = message.role in SYSTEM_ROLES
        if late and before is not None and before.role in ("user", "tool"):
            folded[-1] = _join(before, _tagged(message))
        elif late:
            folded.append(Message("user", _tagged(message)))
        elif message.role == "user" and before is not None and before.role == "user" and _is_note(before):
            folded[-1] = _join(before, message)
        else:
            folded.append(message)
    return folded


def _join(message: Message, more: str | Message) -> Message:
    """Return `message` with more text, or with the content of another message, behind its own."""
    extra = more if isinstance(more, str) else more.content
    if isinstance(message.content, str) and isinstance(extra, str):
        return replace(message, content=f"{message.content}\n\n{extra}")
    parts = [(TextPart(part),) if isinstance(part, str) else tuple(part) for part in (message.content, "\n\n", extra)]
    return replace(message, content=tuple(part for row in parts for part in row))


def _tagged(message: Message) -> str:
    return f"<system>\n{message.text}\n</system>"


def _is_note(message: Message) -> bool:
    """Whether a user's message is nothing but a folded system message."""
    return message.text.startswith("<system>\n") and message.text.endswith("\n</system>")


def _in_order(text: str, first: str, second: str) -> bool:
    return 0 <= text.find(first) < text.find(second)
