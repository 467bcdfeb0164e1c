"""System messages that come after the conversation has begun.

Some agent programs send a system message after the user's message or after the result of a tool. Some chat templates
write such a message in its place; others refuse it, or move it to the front, which rewrites the history. For those
templates its text is put into the message before it, which every template accepts.
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

OTHER_WORD = "zqotherqz"


def accepts_late_system(renderer: Renderer) -> bool:
    """Return whether the template writes a late system message in its place and leaves all before it unchanged."""
    note = Message("system", WORD)
    try:
        prompt = renderer.render([Message("user", OTHER_WORD), note])
        if not _in_order(renderer.tokenizer.decode(prompt.ids), OTHER_WORD, WORD):
            return False
        reply = Parsed(Message("assistant", FILLER), (0, 0))
        ids = np.array([*renderer.tokenizer.encode(FILLER, inside=True).ids, *renderer.stop_ids[:1]], np.int32)
        history, asked = prompt.answered(ids, reply), Message("user", FILLER)
        without, later = renderer.bridge(history, [asked]), renderer.bridge(history, [asked, note])
    except TemplateRefused:
        return False
    return later.broke == without.broke and WORD in renderer.tokenizer.decode(later.added)


def fold_late_system(messages: Sequence[Message], *, opening: bool) -> Sequence[Message]:
    """Return the messages with late system messages folded into others; `opening` is False if they follow a reply.

    A late system message goes to the end of the user message or tool result before it. After a reply, it goes to the
    beginning of the user message that follows, or becomes a user message if none does.
    """
    first = next((at for at, message in enumerate(messages) if message.role not in SYSTEM_ROLES), len(messages))
    first = first if opening else 0
    if all(message.role not in SYSTEM_ROLES for message in messages[first:]):
        return messages
    folded = list(messages[:first])
    for message in messages[first:]:
        before = folded[-1] if folded else None
        is_late = message.role in SYSTEM_ROLES
        if is_late and before is not None and before.role in ("user", "tool"):
            folded[-1] = _join(before, _tag(message))
        elif is_late:
            folded.append(Message("user", _tag(message)))
        elif message.role == "user" and before is not None and before.role == "user" and _is_tagged(before):
            folded[-1] = _join(before, message)
        else:
            folded.append(message)
    return folded


def _join(message: Message, more: str | Message) -> Message:
    """Return `message` with a text, or the content of another message, appended."""
    extra = more if isinstance(more, str) else more.content
    if isinstance(message.content, str) and isinstance(extra, str):
        return replace(message, content=f"{message.content}\n\n{extra}")
    parts = [(TextPart(part),) if isinstance(part, str) else tuple(part) for part in (message.content, "\n\n", extra)]
    return replace(message, content=tuple(part for group in parts for part in group))


def _tag(message: Message) -> str:
    return f"<system>\n{message.text}\n</system>"


def _is_tagged(message: Message) -> bool:
    """Whether a user message is nothing but a folded system message."""
    return message.text.startswith("<system>\n") and message.text.endswith("\n</system>")


def _in_order(text: str, first: str, second: str) -> bool:
    return 0 <= text.find(first) < text.find(second)
