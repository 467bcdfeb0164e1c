"""The first messages of a conversation, built from a task."""

from collections.abc import Mapping
from typing import Any

from ramify.core.errors import EnvironmentFault, RamifyError
from ramify.env import Task
from ramify.infer.dialects.chat_format import format_message, parse_tool_calls
from ramify.infer.dialects.media import read_environment_url
from ramify.infer.dialects.message_parser import MessageParser
from ramify.trace import Media, Message

ALLOWED_ROLES = ("system", "developer", "user", "assistant", "tool")


def build_initial_messages(task: Task) -> tuple[list[Message], dict[str, Media]]:
    """Return the initial messages of a task, and their images by hash. Raises EnvironmentFault for an invalid one."""
    messages = [] if task.system is None else [Message("system", task.system)]
    parser = MessageParser(read_url=read_environment_url)
    if isinstance(task.prompt, str):
        messages.append(Message("user", task.prompt))
    for index, message in enumerate(() if task.prompt is None or isinstance(task.prompt, str) else task.prompt):
        try:
            messages.append(_parse_message(message, parser))
        except (LookupError, TypeError, AttributeError, ValueError, RamifyError) as error:
            reason = error.message if isinstance(error, RamifyError) else repr(error)
            raise EnvironmentFault(f"task.prompt[{index}] is not a chat message: {reason}") from error
    return messages, parser.media


def format_initial_messages(task: Task) -> list[dict[str, Any]]:
    """Return the initial messages of a task in OpenAI's format, with its images as data URLs."""
    messages, media = build_initial_messages(task)
    return [format_message(message, media) for message in messages]


def join_prompt_text(task: Task) -> str:
    """Return the initial messages of a task as one text, for a program that takes one.

    Raises EnvironmentFault if they have images, which the program would not see.
    """
    messages, media = build_initial_messages(task)
    if media:
        raise EnvironmentFault(
            f"task {task.identity} has images in its prompt, and a program gets its prompt as text: write them to "
            "files in `setup`, or use the harness `chat`"
        )
    return "\n\n".join(message.text for message in messages)


def get_user_prompt_texts(task: Task) -> list[str]:
    """Return the texts by which a conversation about the task is recognized.

    They are the user messages in its prompt, without messages of several parts, and the whole prompt as one text.
    """
    if isinstance(task.prompt, str):
        return [task.prompt, join_prompt_text(task)]
    contents = [message.get("content") for message in task.prompt or () if message.get("role") == "user"]
    return [content for content in contents if isinstance(content, str)]


def _parse_message(data: Mapping[str, Any], parser: MessageParser) -> Message:
    if data["role"] not in ALLOWED_ROLES:
        raise ValueError(f"role {data['role']!r}, expected one of {', '.join(ALLOWED_ROLES)}")
    content = data.get("content") or ""
    return Message(
        role=data["role"],
        content=content if isinstance(content, str) else parser.parse_parts(content),
        reasoning=data.get("reasoning_content"),
        tool_calls=parse_tool_calls(data.get("tool_calls")),
        tool_call_id=data.get("tool_call_id"),
    )
