"""System messages that come after the conversation has begun.

Some agent programs send a system message after the user's message or after the result of a tool. Some chat templates
write such a message in its place; others refuse it, or move it to the front, which rewrites the history. For those
templates its text is put into the message before it, which every template accepts.
"""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from ramify.core.errors import TemplateRefused
from ramify.model.render.base import ParsedReply, Renderer
from ramify.model.render.outline import FILLER_TEXT, SYSTEM_ROLES
from ramify.model.render.template_adapter import PROBE_TEXT
from ramify.trace import Message, TextPart

OTHER_PROBE_TEXT = "zqotherqz"


def accepts_late_system(renderer: Renderer) -> bool:
    """Return whether the template writes a late system message in its place and changes nothing before it."""
    system_message = Message("system", PROBE_TEXT)
    try:
        prompt = renderer.render([Message("user", OTHER_PROBE_TEXT), system_message])
        text = renderer.tokenizer.decode(prompt.token_ids)
        if not 0 <= text.find(OTHER_PROBE_TEXT) < text.find(PROBE_TEXT):
            return False
        reply = ParsedReply(Message("assistant", FILLER_TEXT), (0, 0))
        ids = np.array(
            [*renderer.tokenizer.encode(FILLER_TEXT, continues_text=True).ids, *renderer.stop_ids[:1]], np.int32
        )
        history, question = prompt.with_reply(ids, reply), Message("user", FILLER_TEXT)
        without_system, with_system = (
            renderer.bridge(history, [question]),
            renderer.bridge(history, [question, system_message]),
        )
    except TemplateRefused:
        return False
    return with_system.prefix_break == without_system.prefix_break and PROBE_TEXT in renderer.tokenizer.decode(
        with_system.new_token_ids
    )


def fold_late_system(messages: Sequence[Message], *, starts_conversation: bool) -> Sequence[Message]:
    """Return the messages with late system messages folded into others.

    `starts_conversation` is False if the messages follow a reply.

    A late system message goes to the end of the user message or tool result before it. After a reply, it goes to the
    beginning of the user message that follows, or becomes a user message if none does.
    """
    first = next((index for index, message in enumerate(messages) if message.role not in SYSTEM_ROLES), len(messages))
    first = first if starts_conversation else 0
    if all(message.role not in SYSTEM_ROLES for message in messages[first:]):
        return messages
    folded = list(messages[:first])
    for message in messages[first:]:
        previous = folded[-1] if folded else None
        is_late = message.role in SYSTEM_ROLES
        if is_late and previous is not None and previous.role in ("user", "tool"):
            folded[-1] = _append_content(previous, _wrap_in_system_tag(message))
        elif is_late:
            folded.append(Message("user", _wrap_in_system_tag(message)))
        elif (
            message.role == "user" and previous is not None and previous.role == "user" and _is_folded_system(previous)
        ):
            folded[-1] = _append_content(previous, message)
        else:
            folded.append(message)
    return folded


def _append_content(message: Message, addition: str | Message) -> Message:
    """Return `message` with a text or the content of another message appended."""
    extra = addition if isinstance(addition, str) else addition.content
    if isinstance(message.content, str) and isinstance(extra, str):
        return replace(message, content=f"{message.content}\n\n{extra}")
    parts = [(TextPart(part),) if isinstance(part, str) else tuple(part) for part in (message.content, "\n\n", extra)]
    return replace(message, content=tuple(part for group in parts for part in group))


def _wrap_in_system_tag(message: Message) -> str:
    return f"<system>\n{message.text}\n</system>"


def _is_folded_system(message: Message) -> bool:
    """Return whether a user message consists only of a folded system message."""
    return message.text.startswith("<system>\n") and message.text.endswith("\n</system>")
