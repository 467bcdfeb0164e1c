"""The parts of a task's prompt as plain data: images become data URLs, and other objects are refused by name."""

from typing import Any

from ramify.core.config.schema import is_dict, is_list, is_tuple
from ramify.core.errors import OperationInvalid
from ramify.infer.dialects.media import MEDIA_ADVICE, media_to_url
from ramify.trace import Media
from ramify.trace.plain_data import to_plain


def to_plain_prompt(prompt: Any) -> Any:
    """Return a prompt whose messages have parts of plain data. Raises OperationInvalid, which names the part."""
    if not is_list(prompt) and not is_tuple(prompt):
        return prompt
    return tuple(_to_plain_message(message, f"task.prompt[{index}]") for index, message in enumerate(prompt))


def _to_plain_message(message: Any, key: str) -> Any:
    if not is_dict(message):
        return message
    content = message.get("content")
    if isinstance(content, Media):
        content = [content]
    if not is_list(content) and not is_tuple(content):
        return message
    return {
        **message,
        "content": [_to_plain_part(part, f"{key}.content[{index}]") for index, part in enumerate(content)],
    }


def _to_plain_part(part: Any, key: str) -> Any:
    if isinstance(part, Media):
        return {"type": "image_url", "image_url": {"url": media_to_url(part)}}
    try:
        return to_plain(part, key)
    except OperationInvalid as error:
        raise OperationInvalid(f"{error.message}; {MEDIA_ADVICE} as the part") from error
