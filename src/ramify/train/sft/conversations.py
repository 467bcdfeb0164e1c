"""Parse rows of a dataset into conversations.

A row has messages (and possibly tools), or a prompt and a completion. Datasets differ in details: arguments of tool
calls are JSON text or objects, tools are a list or its JSON, and absent values may be null.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ramify.core.config.schema import is_dict
from ramify.core.errors import ConfigInvalid, ImageInvalid, RequestInvalid
from ramify.env.data_selection import find_data_directory
from ramify.infer.dialects.media import IMAGE_PART_TYPES, ReadUrl, build_dataset_reader, find_image_value
from ramify.infer.dialects.message_parser import ContentPart, MessageParser
from ramify.trace import Media, MediaPart, Message, TextPart, ToolCall
from ramify.train.sft.config import SftDataConfig


@dataclass(slots=True)
class _RowParser(MessageParser):
    """Parses the contents of one row: text, or parts of text and images.

    An image is given inside its part (OpenAI's `image_url`, or `image`, `path` or `url` of a part of type `image`), or
    in a column of the row that has its images in order. It is a data URL, a file of the dataset, bytes, or a table with
    `bytes` or `path`, as Hugging Face datasets store images. Nothing is downloaded. Equal images are kept once.
    """

    row_images: Iterator[Any] = field(default_factory=lambda: iter(()))
    """The images in the column of the row that are not used yet."""
    known: dict[str, Media] = field(default_factory=dict[str, Media])
    """The images of the dataset so far, by hash."""

    def parse_part(self, entry: Any) -> ContentPart:
        if is_dict(entry) and entry.get("type") in IMAGE_PART_TYPES and find_image_value(entry) is None:
            image = next(self.row_images, None)
            if image is None:
                raise RequestInvalid(
                    "a message has more images than its row; set data.images_column, or put them into parts"
                )
            entry = {"type": "image", "image": image}
        return super(_RowParser, self).parse_part(entry)

    def add_media(self, media: Media) -> MediaPart:
        return super(_RowParser, self).add_media(self.known.setdefault(media.hash, media))


WEIGHT_KEY = "weight"  # of a message; 0 excludes it from training, as in OpenAI's format
TOKENIZER_KEY, TOKENS_KEY = "tokenizer", "tokens"  # of a row and of its messages that were exported from a rollout
REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")
DatasetRow = Mapping[str, Any]
_decode_message = msgspec.msgpack.Decoder(Message).decode


class MessageTokens(msgspec.Struct, frozen=True):
    """The tokens of a message in a rollout: its ids, which of them the policy sampled, and its images.

    An image is its part of the content, and the range of its placeholders. Ranges are relative to the first token.
    """

    token_ids: list[int]
    sampled: tuple[int, int] | None = None
    images: list[tuple[int, int, int]] = []


class RecordedTokens(msgspec.Struct, frozen=True):
    """The tokens of all messages of a conversation that was exported from a rollout, and the tokenizer's digest."""

    tokenizer: str
    tokens: tuple[MessageTokens, ...]


@dataclass(frozen=True, slots=True)
class SftConversation:
    """One example: a conversation and the tools that were offered in it."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    untrained: frozenset[int] = frozenset()
    """The messages that are never trained: their `weight` is 0."""
    recorded: RecordedTokens | None = None
    media: Mapping[str, Media] = field(default_factory=dict[str, Media], compare=False)
    """The images of the messages, by hash."""
    location: str = field(default="", compare=False)
    """The row of the dataset, for error messages."""

    def exclude_roles(self, roles: Collection[str]) -> "SftConversation":
        """Return the conversation with no message of these roles trained."""
        excluded = {index for index, message in enumerate(self.messages) if message.role in roles}
        return replace(self, untrained=self.untrained | excluded)

    def is_trained(self, index: int, roles: Sequence[str]) -> bool:
        """Return whether a message is trained if the messages of `roles` are."""
        return self.messages[index].role in roles and index not in self.untrained


def parse_conversations(rows: Iterable[DatasetRow], config: SftDataConfig) -> list[SftConversation]:
    """Parse every row as a conversation. Raises ConfigInvalid for the first row that is not one."""
    conversations: list[SftConversation] = []
    read_url, known_images = build_dataset_reader(find_data_directory(config)), dict[str, Media]()
    for number, row in enumerate(rows, 1):
        location = f"row {number} of {config.path}"
        try:
            conversations.append(replace(parse_conversation(row, config, read_url, known_images), location=location))
        except (ValueError, KeyError, TypeError, AttributeError, ImageInvalid, RequestInvalid) as error:
            raise ConfigInvalid(f"data: {location} is not a conversation: {error}") from error
    if not conversations:
        raise ConfigInvalid(f"data: {config.path} has no rows")
    return conversations


def parse_conversation(
    row: DatasetRow, config: SftDataConfig, read_url: ReadUrl, known_images: dict[str, Media]
) -> SftConversation:
    """Parse one row; `known_images` are the images of the dataset so far, by hash.

    Raises ValueError, KeyError, TypeError, AttributeError, ImageInvalid or RequestInvalid if it is not a conversation.
    """
    roles = config.train_on_roles
    if row.get(config.messages_column) not in (None, ""):  # a csv file has an empty string where a row has no value
        raw_messages = row[config.messages_column]
    elif config.prompt_column in row and config.completion_column in row:
        prompt, completion = row[config.prompt_column], row[config.completion_column]
        raw_messages = [*_to_messages(prompt, "user"), *_to_messages(completion, "assistant")]
    else:
        expected = f"{config.messages_column!r}, nor {config.prompt_column!r} and {config.completion_column!r}"
        advice = f"set the keys `..._column` of the dataset, as `ramify data {config.path}` shows them"
        raise ValueError(f"it has no column {expected}; it has {', '.join(row)}: {advice}")
    system_column = config.system_column
    if system_column is not None and row.get(TOKENIZER_KEY) and (system_column not in row or row[system_column]):
        problem = (
            f"data.system_column is {system_column!r}, but the row was exported from a rollout, with the tokens of "
        )
        raise ValueError(f"{problem}its own messages; remove system_column")
    if system_column is not None and row[system_column]:
        raw_messages = [{"role": "system", "content": row[system_column]}, *_parse_json(raw_messages)]
    row_images = iter(row.get(config.images_column) or ())
    parser = _RowParser(read_url=read_url, row_images=row_images, known=known_images)
    raw_messages = list(_parse_json(raw_messages))
    messages = tuple(parse_message(raw, parser.parse_content(raw.get("content"))) for raw in raw_messages)
    if next(row_images, None) is not None:
        raise ValueError(f"the column {config.images_column!r} has more images than the messages refer to")
    tools = _parse_json(row.get(config.tools_column) or [])
    conversation = SftConversation(
        messages,
        tuple(_parse_json(tool) for tool in tools),
        frozenset(index for index, raw in enumerate(raw_messages) if raw.get(WEIGHT_KEY) == 0),
        _parse_recorded_tokens(row, raw_messages),
        parser.media,
    )
    trained = [message for index, message in enumerate(messages) if conversation.is_trained(index, roles)]
    if any(not isinstance(message.content, str) for message in trained):
        raise ValueError("a trained message has an image; only text can be trained")
    if not trained:
        raise ValueError(f"no message has the role {' or '.join(roles)} (data.train_on_roles) and a weight above 0")
    return conversation


def _parse_recorded_tokens(row: DatasetRow, raw_messages: Sequence[Mapping[str, Any]]) -> RecordedTokens | None:
    """Return the tokens that `ramify export --to sft` wrote beside the messages; None for other rows."""
    if not row.get(TOKENIZER_KEY):
        return None
    fields = ({"images": [], **raw[TOKENS_KEY]} for raw in raw_messages)
    return msgspec.convert({"tokenizer": row[TOKENIZER_KEY], "tokens": list(fields)}, RecordedTokens)


def parse_message(raw: Mapping[str, Any], content: str | tuple[TextPart | MediaPart, ...]) -> Message:
    """Parse a message in OpenAI's format, whose content is parsed already."""
    if not isinstance(raw.get("role"), str):
        raise ValueError(f"a message has no role: {str(raw)[:80]}")
    calls = _parse_json(raw.get("tool_calls") or [])
    message = Message(
        role=raw["role"],
        content=content,
        reasoning=next((raw[key] for key in REASONING_KEYS if raw.get(key) is not None), None),
        tool_calls=tuple(_parse_tool_call(index, call) for index, call in enumerate(calls)),
        tool_call_id=raw.get("tool_call_id"),
    )
    return _decode_message(msgspec.msgpack.encode(message))  # checks the types while the row is known


def _parse_tool_call(index: int, raw: Mapping[str, Any]) -> ToolCall:
    function = raw.get("function") or raw
    arguments = function.get("arguments") or {}
    arguments_json = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(raw.get("id") or f"call{index}", function["name"], arguments_json)


def _to_messages(value: Any, role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _parse_json(value: Any) -> Any:
    """Decode JSON in a column of text; other values are returned unchanged."""
    return json.loads(value) if isinstance(value, str) else value
