"""Images in a prompt: where the template wrote them, and the placeholder tokens that stand for them.

A chat template writes a short marker for an image, such as `<image>`. It is replaced by the placeholder text of the
image before the text is encoded, as the processors of transformers do. The same word may occur in a text, in a tool or
in the arguments of a call; there it is plain text, so another word, which no text contains, hides it in the meantime.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from ramify.core.errors import ImageInvalid, TemplateRefused
from ramify.model.images import ImageCache, ImageLayout
from ramify.trace import Media, MediaPart, Message, TextPart, ToolCall
from ramify.trace.message import Part

MAX_PROMPT_IMAGES = 32


class PromptImage(NamedTuple):
    """An image of a prompt, without its bytes, and its placeholder tokens [start, stop) in the whole prompt."""

    media: Media
    start: int
    stop: int


class ImagePart(NamedTuple):
    """Part `part` of message `message_index` is an image."""

    message_index: int
    part: int
    hash: str


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image at the characters [start, stop) of a text; `num_tokens` of its tokens get an embedding.

    `media` has no bytes, because prompts are cached.
    """

    part: ImagePart
    media: Media
    num_tokens: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ExpandedText:
    """A text in which images have their placeholders.

    `edits` are the replacements in order: where they begin in the old text, and how much longer the text became.
    """

    text: str
    images: tuple[PlacedImage, ...] = ()
    edits: tuple[tuple[int, int], ...] = ()

    def shift(self, position: int) -> int:
        """Return where a character of the old text is now."""
        return position + sum(growth for start, growth in self.edits if start < position)


@dataclass(frozen=True, slots=True)
class MarkerFreeTexts:
    """Messages and tools whose texts have `sentinel` instead of the marker of an image.

    No end of the sentinel is also its beginning. So it is found again exactly where it was put, whatever is around it.
    """

    messages: list[Message]
    tools: Sequence[Mapping[str, Any]]
    sentinel: str


def content_parts(message: Message) -> tuple[Part, ...]:
    """Return the content of a message as parts."""
    return (TextPart(message.content),) if isinstance(message.content, str) else message.content


def has_images(message: Message) -> bool:
    """Return whether a message has an image."""
    return not isinstance(message.content, str) and any(isinstance(part, MediaPart) for part in message.content)


def without_data(media: Media) -> Media:
    """Return the entry of an image without its bytes."""
    return replace(media, data=b"")


def find_image_parts(messages: Sequence[Message]) -> list[ImagePart]:
    """Return the images of messages, in order."""
    return [
        ImagePart(index, number, part.hash)
        for index, message in enumerate(messages)
        for number, part in enumerate(content_parts(message))
        if isinstance(part, MediaPart)
    ]


def check_image_count(count: int) -> None:
    """Raise ImageInvalid if a prompt has too many images."""
    if count > MAX_PROMPT_IMAGES:
        raise ImageInvalid(f"image: {count} images in one prompt; at most {MAX_PROMPT_IMAGES} are allowed")


class PromptImages:
    """Places images in prompts, for one model. `cache` belongs to the model's image family."""

    def __init__(self, cache: ImageCache) -> None:
        self.cache = cache
        self._family = cache.family

    def hide_markers(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> MarkerFreeTexts:
        """Return messages and tools whose texts do not contain the marker of an image."""
        tool_text = json.dumps([dict(tool) for tool in tools])
        texts = [text for message in messages for text in _list_texts(message)]
        sentinel = _choose_sentinel("\n".join([tool_text, *texts]))
        if self._family.marker in tool_text:
            tools = json.loads(tool_text.replace(self._family.marker, sentinel))
        hidden = [_replace_in_message(message, self._family.marker, sentinel) for message in messages]
        return MarkerFreeTexts(hidden, tools, sentinel)

    def expand(self, text: str, sentinel: str, messages: Sequence[Message], media: Mapping[str, Media]) -> ExpandedText:
        """Replace the markers in a text by placeholders, and the sentinel of `hide_markers` by the marker.

        Raises TemplateRefused if the template did not write every image once, and ImageInvalid for a bad image.
        """
        parts = find_image_parts(messages)
        words = map(re.escape, (self._family.marker, sentinel))
        matches = list(re.finditer("|".join(words), text))
        num_markers = sum(match[0] == self._family.marker for match in matches)
        if num_markers != len(parts):
            raise TemplateRefused(
                f"the chat template wrote {num_markers} of {len(parts)} images; use a template that writes "
                f"{self._family.marker!r} for every image part"
            )
        pieces: list[str] = []
        images: list[PlacedImage] = []
        edits: list[tuple[int, int]] = []
        remaining = iter(parts)
        position = length = 0
        for match in matches:
            before = text[position : match.start()]
            replacement = self._family.marker
            if match[0] == self._family.marker:
                part = next(remaining)
                layout = self._get_layout(part, media)
                replacement = self._family.placeholder_text(layout)
                start = length + len(before)
                stop = start + len(replacement)
                images.append(PlacedImage(part, without_data(media[part.hash]), layout.num_tokens, start, stop))
            pieces += [before, replacement]
            length += len(before) + len(replacement)
            position = match.end()
            edits.append((match.start(), len(replacement) - len(match[0])))
        return ExpandedText("".join([*pieces, text[position:]]), tuple(images), tuple(edits))

    def _get_layout(self, part: ImagePart, media: Mapping[str, Media]) -> ImageLayout:
        if part.hash not in media:
            raise ImageInvalid(f"image: message {part.message_index} refers to image {part.hash[:8]}, which is missing")
        return self.cache.get_layout(media[part.hash])


def _choose_sentinel(avoid: str) -> str:
    """Return a word that does not occur in the text `avoid`."""
    length = 0
    while (word := f"zqimage{'q' * length}x") in avoid:
        length += 1
    return word


def _list_texts(message: Message) -> list[str]:
    contents = [part.text for part in content_parts(message) if isinstance(part, TextPart)]
    calls = [text for call in message.tool_calls for text in (call.name, call.arguments)]
    return [*contents, message.reasoning or "", *calls]


def _replace_in_message(message: Message, old: str, new: str) -> Message:
    content = message.content
    return replace(
        message,
        content=content.replace(old, new)
        if isinstance(content, str)
        else tuple(TextPart(part.text.replace(old, new)) if isinstance(part, TextPart) else part for part in content),
        reasoning=None if message.reasoning is None else message.reasoning.replace(old, new),
        tool_calls=tuple(
            ToolCall(call.id, call.name.replace(old, new), call.arguments.replace(old, new))
            for call in message.tool_calls
        ),
    )
