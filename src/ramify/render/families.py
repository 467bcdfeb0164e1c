"""The hand-written renderers of the `renderers` library, behind our protocol.

A family knows its model by heart: it bridges where a template has to be asked, and reads formats that no general reader
knows. It is imported only when a config names one. The library wants a Hugging Face tokenizer; it gets ours, dressed
as much like one as it looks at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.errors import ConfigInvalid, TemplateRefused
from ramify.render.conversation import Break, History, Parsed, Problem, ProblemKind, Reason, Rendered, Tool
from ramify.render.outline import Outline
from ramify.render.reply import CallIds
from ramify.render.tokenizer import Ints, Tokenizer
from ramify.render.writer import text_of
from ramify.trace import Message, MessageSpan, ToolCall

PROBLEMS = {
    "invalid_json": ProblemKind.INVALID_JSON,
    "unclosed_block": ProblemKind.UNCLOSED,
    "missing_name": ProblemKind.NO_NAME,
}


class FamilyRenderer:
    """One family on one tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: str,
        template_args: Mapping[str, Any] | None = None,
        *,
        eos_id: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self._renderer = _create(_HuggingFaceDress(tokenizer, eos_id), family, dict(template_args or {}))
        self._keeps_reasoning = getattr(self._renderer, "effective_thinking_retention", "all") == "all"
        self.stop_ids = tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generate: bool = True) -> Rendered:
        try:
            tokens = self._renderer.render(_plain(messages), tools=_tools(tools), add_generation_prompt=generate)
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise TemplateRefused(f"the family {self.family!r} refuses the conversation: {error}") from error
        return Rendered(
            messages=tuple(messages),
            tools=tuple(tools),
            ids=np.array(tokens.token_ids, np.int32),
            spans=_spans(messages, tokens, 0),
            outline=Outline.of(messages),
        )

    def bridge(self, history: History, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Rendered:
        offered = history.tools if tools is None else tuple(tools)
        continued = self._continue(history, messages, offered)
        if isinstance(continued, Rendered):
            return continued
        return self.render([*history.messages, *messages], offered).continuing(history, continued)

    def parse(self, sampled: npt.ArrayLike, prompt: Rendered) -> Parsed:
        ids = np.asarray(sampled, np.int32)
        stop = len(ids) - (len(ids) > 0 and int(ids[-1]) in self.stop_ids)
        found = self._renderer.parse_response(ids.tolist(), tools=_tools(prompt.tools), prompt_ids=prompt.ids.tolist())
        calls: list[ToolCall] = []
        problems: list[Problem] = []
        call_ids = CallIds(ids, len(prompt.messages))
        content = found.content
        for number, call in enumerate(found.tool_calls):
            if call.status == "ok" and call.name:
                id = call.id or call_ids.make(number)
                calls.append(ToolCall(id, call.name, _arguments(call.arguments)))
            else:
                problems.append(Problem(PROBLEMS.get(call.status, ProblemKind.BAD_FORM), call.raw, str(call.status)))
                content = content if call.raw in content else f"{content}\n{call.raw}".lstrip("\n")
        if found.reasoning_complete is False:
            problems.append(Problem(ProblemKind.UNCLOSED_REASONING, found.reasoning_content or ""))
        message = Message("assistant", content, found.reasoning_content or None, tuple(calls))
        return Parsed(message, (0, stop), tuple(problems))

    def _continue(
        self, history: History, messages: Sequence[Message], tools: tuple[Tool, ...]
    ) -> Rendered | Break | None:
        if tools != history.tools:
            return Break(Reason.TOOLS_CHANGED)
        if not history.sampled:
            return None
        asked = len(history.ids) - history.sampled
        tokens = self._renderer.bridge_to_next_turn(
            history.ids[:asked].tolist(), history.ids[asked:].tolist(), _plain(messages), tools=_tools(tools)
        )
        if tokens is None:
            asks = any(message.role == "user" for message in messages)
            reason = Reason.REASONING_DROPPED if asks and not self._keeps_reasoning else Reason.UNCLEAR
            return Break(reason, f"the family {self.family!r} does not bridge these messages")
        ids = np.array(tokens.token_ids, np.int32)
        kept = len(history.ids)
        if not np.array_equal(ids[:kept], history.ids):
            return Break(Reason.REPLY_REWRITTEN, f"the family {self.family!r} does not keep the reply's tokens")
        outline = history.outline
        for message in messages:
            outline = outline.add(message)
        return Rendered(
            messages=(*history.messages, *messages),
            tools=tools,
            ids=ids,
            spans=_spans(messages, tokens, kept),
            outline=outline,
            kept=kept,
        )


class _HuggingFaceDress:
    """What the library looks at in a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int | None) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.name
        self.unk_token_id = None
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
        return self._tokenizer.id_of(tokens) if isinstance(tokens, str) else [self._tokenizer.id_of(t) for t in tokens]


def _create(tokenizer: _HuggingFaceDress, family: str, args: dict[str, Any]) -> Any:
    try:
        import renderers  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]
    except ImportError as error:
        raise ConfigInvalid(
            "renderer.name: the `renderers` library is not installed; install the extra 'renderers', "
            'or use renderer.type = "template"'
        ) from error
    try:
        return renderers.create_renderer(tokenizer, renderers.config_from_name(family), chat_template_kwargs=args)  # pyright: ignore
    except Exception as error:  # a family raises what it likes; all of it means that it does not fit
        raise ConfigInvalid(
            f"renderer.name: {family!r} cannot be used with {tokenizer.name_or_path}: {error}"
        ) from error


def _spans(messages: Sequence[Message], tokens: Any, kept: int) -> tuple[MessageSpan, ...]:
    """Which tokens are whose, behind the first `kept`."""
    owner = np.array(tokens.message_indices, np.int64)[kept:]
    body: Ints = np.array(tokens.is_content or [False] * len(tokens.token_ids), np.int32)[kept:]
    spans: list[MessageSpan] = []
    before = 0
    for number, message in enumerate(messages):
        mine = np.flatnonzero(owner == number)
        stop = max(before, int(mine[-1]) + 1) if len(mine) else before
        said = mine[body[mine] > 0] if len(mine) else mine
        low, high = (int(said[0]), int(said[-1]) + 1) if len(said) else (stop, stop)
        spans.append(MessageSpan(message, stop, (min(max(low, before), stop), min(max(high, before), stop))))
        before = stop
    return tuple(spans)


def _plain(messages: Sequence[Message]) -> list[Any]:
    plain: list[dict[str, Any]] = []
    for message in messages:
        told: dict[str, Any] = {"role": message.role, "content": text_of(message)}
        if message.reasoning:
            told["reasoning_content"] = message.reasoning
        if message.tool_calls:
            told["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            told["tool_call_id"] = message.tool_call_id
        plain.append(told)
    return plain


def _tools(tools: Sequence[Tool]) -> list[Any] | None:
    return [dict(tool) for tool in tools] or None


def _arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
