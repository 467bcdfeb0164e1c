"""The hand-written renderers of the `renderers` library, behind the `Renderer` interface.

A family is written for one model: it bridges without probing a template and parses formats that no generic parser
knows. This module is imported only if a config names a family. The library expects a Hugging Face tokenizer, so ours
is wrapped in an adapter with the methods that it uses.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.core.errors import ConfigInvalid, TemplateRefused
from ramify.model.render.base import (
    BreakReason,
    ParsedReply,
    PrefixBreak,
    RenderedPrompt,
    Renderer,
    TokenHistory,
)
from ramify.model.render.outline import ConversationOutline
from ramify.model.render.prompt_images import has_images
from ramify.model.render.reply_grammar import CallIdGenerator
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.render.tool_parsers.base import ParseProblem, ParseProblemKind, ToolSchema
from ramify.trace import Media, Message, MessageSpan, ToolCall
from ramify.trace.columns import Int32Array

PROBLEM_KINDS = {
    "invalid_json": ParseProblemKind.INVALID_JSON,
    "unclosed_block": ParseProblemKind.UNCLOSED,
    "missing_name": ParseProblemKind.NO_NAME,
}


class FamilyRenderer(Renderer):
    """The `Renderer` of one family of the `renderers` library, with one tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: str,
        template_args: Mapping[str, Any] | None = None,
        *,
        eos_id: int | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.family = family
        adapter = _HuggingFaceTokenizerAdapter(tokenizer, eos_id)
        self._renderer = _create_family(adapter, family, dict(template_args or {}))
        self._keeps_reasoning = getattr(self._renderer, "effective_thinking_retention", "all") == "all"
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())

    def _render_uncached(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        media: Mapping[str, Media],
        *,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        try:
            rendered = self._renderer.render(
                _message_dicts(messages), tools=_tool_dicts(tools), add_generation_prompt=add_generation_prompt
            )
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise TemplateRefused(f"the family {self.family!r} refuses the conversation: {error}") from error
        return RenderedPrompt(
            messages=tuple(messages),
            tools=tuple(tools),
            token_ids=np.array(rendered.token_ids, np.int32),
            spans=_message_spans(messages, rendered, 0),
            outline=ConversationOutline().extend(messages),
        )

    def parse(self, sampled_ids: npt.ArrayLike, prompt: RenderedPrompt) -> ParsedReply:
        """Parse sampled tokens to a reply with the family's own parser."""
        ids = np.asarray(sampled_ids, np.int32)
        stop = len(ids) - (len(ids) > 0 and int(ids[-1]) in self.stop_ids)
        response = self._renderer.parse_response(
            ids.tolist(), tools=_tool_dicts(prompt.tools), prompt_ids=prompt.token_ids.tolist()
        )
        calls: list[ToolCall] = []
        problems: list[ParseProblem] = []
        call_ids = CallIdGenerator(ids, len(prompt.messages))
        content = response.content
        for index, call in enumerate(response.tool_calls):
            is_valid = call.status == "ok" and call.name
            if is_valid and prompt.allows_calls:
                call_id = call.id or call_ids.make_id(index)
                arguments = (
                    call.arguments
                    if isinstance(call.arguments, str)
                    else json.dumps(call.arguments or {}, ensure_ascii=False)
                )
                calls.append(ToolCall(call_id, call.name, arguments))
            else:
                if prompt.allows_calls:
                    kind = PROBLEM_KINDS.get(call.status, ParseProblemKind.BAD_FORM)
                    problems.append(ParseProblem(kind, call.raw, str(call.status)))
                content = content if call.raw in content else f"{content}\n{call.raw}".lstrip("\n")
        if response.reasoning_complete is False:
            problems.append(ParseProblem(ParseProblemKind.UNCLOSED_REASONING, response.reasoning_content or ""))
        message = Message("assistant", content, response.reasoning_content or None, tuple(calls))
        return ParsedReply(message, (0, stop), tuple(problems))

    def _render_continuation(
        self, history: TokenHistory, messages: Sequence[Message], media: Mapping[str, Media]
    ) -> RenderedPrompt | PrefixBreak:
        prompt_len = len(history.token_ids) - history.num_sampled
        bridged = self._renderer.bridge_to_next_turn(
            history.token_ids[:prompt_len].tolist(),
            history.token_ids[prompt_len:].tolist(),
            _message_dicts(messages),
            tools=_tool_dicts(history.tools),
        )
        if bridged is None:
            drops_reasoning = not self._keeps_reasoning and any(message.role == "user" for message in messages)
            reason = BreakReason.REASONING_DROPPED if drops_reasoning else BreakReason.UNCLEAR
            return PrefixBreak(reason, f"the family {self.family!r} does not bridge these messages")
        ids = np.array(bridged.token_ids, np.int32)
        num_reused = len(history.token_ids)
        if not np.array_equal(ids[:num_reused], history.token_ids):
            return PrefixBreak(
                BreakReason.REPLY_REWRITTEN, f"the family {self.family!r} does not keep the reply's tokens"
            )
        return history.build_prompt(messages, ids, _message_spans(messages, bridged, num_reused))


class _HuggingFaceTokenizerAdapter:
    """The part of a Hugging Face tokenizer that the library uses."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int | None) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.name
        self.unk_token_id: int | None = None
        self.eos_token_id = eos_id

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        encoded = self._tokenizer.encode(text)
        offsets = zip(encoded.starts.tolist(), encoded.stops.tolist())
        return {"input_ids": encoded.ids.tolist(), "offset_mapping": list(offsets)}

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._tokenizer.encode(text).ids.tolist()

    def decode(self, token_ids: Any, **_: Any) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        return (
            self._tokenizer.token_to_id(tokens)
            if isinstance(tokens, str)
            else [self._tokenizer.token_to_id(t) for t in tokens]
        )


def _create_family(tokenizer: _HuggingFaceTokenizerAdapter, family: str, template_args: dict[str, Any]) -> Any:
    try:
        import renderers
    except ImportError as error:
        raise ConfigInvalid(
            "renderer.name: the `renderers` library is not installed; install the extra 'renderers', "
            'or use renderer.type = "template"'
        ) from error
    try:
        config = renderers.config_from_name(family)
        return renderers.create_renderer(tokenizer, config, chat_template_kwargs=template_args)  # pyrefly: ignore[bad-argument-type]
    except Exception as error:  # a family may raise anything; every error means that it cannot be used with this model
        raise ConfigInvalid(
            f"renderer.name: {family!r} cannot be used with {tokenizer.name_or_path}: {error}"
        ) from error


def _message_spans(messages: Sequence[Message], rendered: Any, num_reused: int) -> tuple[MessageSpan, ...]:
    """Return the span of each message in the tokens after the first `num_reused`."""
    owners = np.array(rendered.message_indices, np.int64)[num_reused:]
    is_content: Int32Array = np.array(rendered.is_content or [False] * len(rendered.token_ids), np.int32)[num_reused:]
    spans: list[MessageSpan] = []
    previous_stop = 0
    for index, message in enumerate(messages):
        indices = np.flatnonzero(owners == index)
        stop = max(previous_stop, int(indices[-1]) + 1) if len(indices) else previous_stop
        content_indices = indices[is_content[indices] > 0] if len(indices) else indices
        content_start, content_stop = (
            (int(content_indices[0]), int(content_indices[-1]) + 1) if len(content_indices) else (stop, stop)
        )
        spans.append(
            MessageSpan(
                message,
                stop,
                (min(max(content_start, previous_stop), stop), min(max(content_stop, previous_stop), stop)),
            )
        )
        previous_stop = stop
    return tuple(spans)


def _message_dicts(messages: Sequence[Message]) -> list[Any]:
    dicts: list[dict[str, Any]] = []
    for message in messages:
        message_dict: dict[str, Any] = {"role": message.role, "content": _require_text(message)}
        if message.reasoning:
            message_dict["reasoning_content"] = message.reasoning
        if message.tool_calls:
            message_dict["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            message_dict["tool_call_id"] = message.tool_call_id
        dicts.append(message_dict)
    return dicts


def _require_text(message: Message) -> str:
    if has_images(message):
        raise TemplateRefused('a family renders no images; use renderer.type = "template"')
    return message.text


def _tool_dicts(tools: Sequence[ToolSchema]) -> list[Any] | None:
    return [dict(tool) for tool in tools] or None
