"""The `Renderer` base class and its types: a prompt, the reply parsed from it, the history that the next turn extends.

The one idea: **tokens are the history, messages only describe it.** The engine samples from a `RenderedPrompt`;
`with_reply` appends the sampled ids unchanged, and `bridge` appends the tokens of new messages. No token that the
engine has seen or sampled is tokenized again, unless the template itself rewrites it; a `PrefixBreak` then says why.

    prompt = renderer.render(messages, tools)              RenderedPrompt
    parsed = renderer.parse(sampled_ids, prompt)           ParsedReply
    history = prompt.with_reply(sampled_ids, parsed)       TokenHistory
    prompt = renderer.bridge(history, tool_results)        RenderedPrompt; its first `num_reused` ids are the history's
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from ramify.core.bounded_cache import BoundedCache
from ramify.core.errors import RequestInvalid
from ramify.model.images import ImageCache
from ramify.model.render.outline import ConversationOutline
from ramify.model.render.prompt_images import PromptImage
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.render.tool_parsers.base import ParseProblem, ToolSchema
from ramify.trace import Media, Message, MessageSpan, PromptMedia
from ramify.trace.columns import Int32Array

MAX_CACHED_PROMPTS = 64
NO_MEDIA: Mapping[str, Media] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReplyConstraint:
    """What a client requires of a reply: JSON of a schema, calls of some tools, or, if it allows both, either."""

    json_schema: Mapping[str, Any] | None = None
    """The schema of a reply that is JSON; None if the reply must call a tool."""
    is_strict: bool = False
    """Whether a keyword of the schema that cannot be enforced is an error."""
    tool_names: tuple[str, ...] = ()
    """The tools that may be called."""
    allows_parallel_calls: bool = True


class BreakReason(StrEnum):
    """Why the tokens of the history could not be reused."""

    TOOLS_CHANGED = "tools_changed"  # the caller offers different tools
    REASONING_DROPPED = "reasoning_dropped"  # the template hides the reasoning of an earlier turn
    GENERATION_PROMPT_DROPPED = "generation_prompt_dropped"  # ... or the generation prompt of an earlier turn
    HISTORY_REWRITTEN = (
        "history_rewritten"  # ... or changes text before the last turn, such as tools or the system prompt
    )
    REPLY_REWRITTEN = "reply_rewritten"  # ... or the reply
    UNCLEAR = "unclear"  # the template depends on message texts, or the family gives no reason


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """The template rewrites the history, so the whole prompt was rendered again: a fork of the trace."""

    reason: BreakReason
    detail: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """The values to add to the metrics of a rollout."""
        return {"render/breaks": 1.0, f"render/breaks/{self.reason}": 1.0}


class ParsedReply(Struct, frozen=True):
    """The message parsed from sampled ids. `content_span` is the range of the ids before the stop token."""

    message: Message
    content_span: tuple[int, int]
    problems: tuple[ParseProblem, ...] = ()


class RenderedPrompt(Struct, frozen=True):
    """A prompt to sample from.

    `token_ids[:num_reused]` are the unchanged tokens of the history; `new_token_ids` are the tokens after them. `spans`
    are the messages rendered now, and `media` their images, as ranges of `new_token_ids`; the tokens after the last
    span are the generation prompt. A `Turn` whose `prefix_node` is the last node of the history takes exactly these.
    `reused_images` are the images of the history. `prefix_break` says why the history's tokens were not reused; None if
    they were, or if there was no history. The last `num_prefill` tokens are the beginning of the reply, which somebody
    else has written; they are part of the generation prompt. If `allows_calls` is False, the text of a call in the
    reply is content.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    token_ids: Int32Array
    spans: tuple[MessageSpan, ...]
    outline: ConversationOutline
    num_reused: int = 0
    prefix_break: PrefixBreak | None = None
    media: tuple[PromptMedia, ...] = ()
    reused_images: tuple[PromptImage, ...] = ()
    num_prefill: int = 0
    allows_calls: bool = True

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """All images of the prompt."""
        offset = self.num_reused
        new = (PromptImage(item.media, item.start + offset, item.stop + offset) for item in self.media)
        return (*self.reused_images, *new)

    @property
    def new_token_ids(self) -> Int32Array:
        """The tokens after the history."""
        return self.token_ids[self.num_reused :]

    @property
    def generation_prompt_ids(self) -> Int32Array:
        """The tokens of the generation prompt, which opens the reply."""
        return self.new_token_ids[self.spans[-1].stop if self.spans else 0 :]

    def add_prefill(self, prefill_ids: Int32Array) -> "RenderedPrompt":
        """Return the prompt for the rest of a reply that begins with these tokens."""
        return replace(self, token_ids=np.concatenate([self.token_ids, prefill_ids]), num_prefill=len(prefill_ids))

    def split_off_prefill(self) -> tuple["RenderedPrompt", Int32Array]:
        """Return the prompt for the whole reply, and the tokens with which the reply begins."""
        stop = len(self.token_ids) - self.num_prefill
        return replace(self, token_ids=self.token_ids[:stop], num_prefill=0), self.token_ids[stop:]

    def as_continuation(self, history: "TokenHistory", prefix_break: PrefixBreak | None) -> "RenderedPrompt":
        """Return this full prompt as the continuation of `history`.

        If its tokens do not start with the history, the result has a `prefix_break` and reuses none.
        """
        num_reused, num_messages = len(history.token_ids), len(history.messages)
        reused_images = tuple(image for image in self.images if image.stop <= num_reused)
        if prefix_break is None and not (
            np.array_equal(self.token_ids[:num_reused], history.token_ids) and reused_images == history.images
        ):
            prefix_break = PrefixBreak(BreakReason.HISTORY_REWRITTEN)
        if prefix_break is not None:
            return replace(self, prefix_break=prefix_break)
        spans = (_shift_span(span, num_reused) for span in self.spans[num_messages:])
        media = (
            replace(
                item,
                message_index=item.message_index - num_messages,
                start=item.start - num_reused,
                stop=item.stop - num_reused,
            )
            for item in self.media[len(reused_images) :]
        )
        return replace(self, num_reused=num_reused, spans=tuple(spans), media=tuple(media), reused_images=reused_images)

    def with_reply(self, sampled_ids: npt.ArrayLike, parsed: ParsedReply) -> "TokenHistory":
        """Return the history that ends in this reply, with the sampled ids unchanged."""
        reply_ids = np.asarray(sampled_ids, np.int32)
        return TokenHistory(
            messages=(*self.messages, parsed.message),
            tools=self.tools,
            token_ids=np.concatenate([self.token_ids, reply_ids]),
            num_sampled=len(reply_ids),
            outline=self.outline.add(parsed.message),
            images=self.images,
        )


class TokenHistory(Struct, frozen=True):
    """A conversation up to the end of a message, with its exact tokens.

    The last `num_sampled` ids are a reply of the policy, including the stop token if it was sampled; 0 if the last
    message was part of a prompt. `images` are all images of the conversation.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    token_ids: Int32Array
    num_sampled: int
    outline: ConversationOutline
    images: tuple[PromptImage, ...] = ()

    @classmethod
    def build(
        cls,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        token_ids: npt.ArrayLike,
        *,
        num_sampled: int = 0,
        images: Sequence[PromptImage] = (),
    ) -> "TokenHistory":
        """Build the history of a path in a trace; `num_sampled` is the number of tokens that its last node sampled."""
        return cls(
            tuple(messages),
            tuple(tools),
            np.asarray(token_ids, np.int32),
            num_sampled,
            ConversationOutline().extend(messages),
            tuple(images),
        )

    def build_prompt(
        self,
        messages: Sequence[Message],
        token_ids: Int32Array,
        spans: tuple[MessageSpan, ...],
        media: tuple[PromptMedia, ...] = (),
    ) -> RenderedPrompt:
        """Build the prompt that continues this history with `messages`; `token_ids` start with the history."""
        return RenderedPrompt(
            messages=(*self.messages, *messages),
            tools=self.tools,
            token_ids=token_ids,
            spans=spans,
            outline=self.outline.extend(messages),
            num_reused=len(self.token_ids),
            media=media,
            reused_images=self.images,
        )


def _shift_span(span: MessageSpan, offset: int) -> MessageSpan:
    low, high = span.content_span
    return MessageSpan(span.message, max(0, span.stop - offset), (max(0, low - offset), max(0, high - offset)))


class Renderer(ABC):
    """Renders messages to token ids and parses replies, for one model.

    `stop_ids` are the token ids that end a reply. A subclass renders whole conversations and continuations. The images
    of messages are given as `media`, by hash.
    """

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]

    @cached_property
    def takes_tool_images(self) -> bool:
        """Whether the images of tool results can be rendered."""
        return False

    @cached_property
    def image_cache(self) -> ImageCache | None:
        """Processes the images of the model; None if it takes none. Raises ModelUnsupported for an unknown family."""
        return None

    def __init__(self) -> None:
        self._cached_prompts: BoundedCache[tuple[tuple[Message, ...], bool], RenderedPrompt]
        self._cached_prompts = BoundedCache(MAX_CACHED_PROMPTS)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        add_generation_prompt: bool = True,
        media: Mapping[str, Media] = NO_MEDIA,
    ) -> RenderedPrompt:
        """Render a whole conversation, by default with the generation prompt at its end.

        All attempts at a task start with the same prompt, so recent prompts are cached.
        """
        key = (tuple(messages), add_generation_prompt)
        prompt = self._cached_prompts.get(key)
        if prompt is None or prompt.tools != tuple(tools):
            prompt = self._render_uncached(messages, tools, media, add_generation_prompt=add_generation_prompt)
            self._cached_prompts.put(key, prompt)
        return prompt

    def bridge(
        self,
        history: TokenHistory,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        *,
        media: Mapping[str, Media] = NO_MEDIA,
    ) -> RenderedPrompt:
        """Render the prompt that continues `history` with new messages.

        After a sampled reply only the new messages are rendered. If the template rewrites the history, the whole
        conversation is rendered again and `prefix_break` says why. A history that ends in a prompt message is rendered
        again and compared, so it is cheaper to bridge from the last reply. `tools` default to the history's tools.
        """
        active_tools = history.tools if tools is None else tuple(tools)
        prefix_break = PrefixBreak(BreakReason.TOOLS_CHANGED) if active_tools != history.tools else None
        if prefix_break is None and history.num_sampled:
            continuation = self._render_continuation(history, messages, media)
            if isinstance(continuation, RenderedPrompt):
                return continuation
            prefix_break = continuation
        full_prompt = self._render_uncached([*history.messages, *messages], active_tools, media)
        return full_prompt.as_continuation(history, prefix_break)

    def prefill(self, prompt: RenderedPrompt, text: str) -> RenderedPrompt:
        """Return the prompt for the rest of a reply that begins with `text`."""
        return prompt.add_prefill(self.tokenizer.encode(text, continues_text=True).ids)

    def parse_after_prefill(self, sampled_ids: npt.ArrayLike, prompt: RenderedPrompt) -> ParsedReply:
        """Parse the whole reply: the prefill of the prompt and the ids sampled after it."""
        if not prompt.num_prefill:
            return self.parse(sampled_ids, prompt)
        full_prompt, prefill_ids = prompt.split_off_prefill()
        parsed = self.parse(np.concatenate([prefill_ids, np.asarray(sampled_ids, np.int32)]), full_prompt)
        return replace(parsed, content_span=(0, max(0, parsed.content_span[1] - len(prefill_ids))))

    @abstractmethod
    def parse(self, sampled_ids: npt.ArrayLike, prompt: RenderedPrompt) -> ParsedReply:
        """Parse the ids sampled after `prompt` into a message."""

    def build_grammar(self, prompt: RenderedPrompt, constraint: ReplyConstraint) -> str:
        """Return the grammar of the replies to `prompt` that satisfy `constraint`, as text. Raises RequestInvalid."""
        raise RequestInvalid("response_format and tool_choice need the renderer `template`; set renderer.type")

    @abstractmethod
    def _render_uncached(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        media: Mapping[str, Media],
        *,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        """Render a whole conversation."""

    @abstractmethod
    def _render_continuation(
        self, history: TokenHistory, messages: Sequence[Message], media: Mapping[str, Media]
    ) -> RenderedPrompt | PrefixBreak:
        """Render only the new messages after a sampled reply, or say why the history's tokens cannot be reused."""
