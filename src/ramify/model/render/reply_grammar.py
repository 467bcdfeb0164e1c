"""The grammar of a reply that must be JSON or tool calls, in the Lark syntax of llguidance, and the parser of replies.

A grammar describes what the parser of the same model reads: reasoning, if the model writes it, and then either a JSON
value or calls in the model's format. It is a text, so that it can be sent to an engine, which compiles it. Tokens that
are tags, such as `<tool_call>`, are written by their id, because no text matches them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ramify.core.config.schema import is_dict
from ramify.core.errors import RequestInvalid
from ramify.model.render.base import ParsedReply, RenderedPrompt, ReplyConstraint
from ramify.model.render.template_adapter import ReasoningTags
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.render.tool_parsers import CallSyntax, ToolParser, parse_as_text
from ramify.model.render.tool_parsers.base import ParseProblem, ParseProblemKind
from ramify.trace import Message, ToolCall
from ramify.trace.columns import Int32Array

MAX_CACHED_OPENINGS = 64


class ReplyParser:
    """Parses sampled ids into a message: removes the stop token, splits off the reasoning, parses the tool calls.

    Reasoning ends at its closing tag, whether the model or the generation prompt opened it. Only the text after it is
    searched for calls, so that a model may think about a call without making it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        reasoning_tags: ReasoningTags,
        tool_parser: ToolParser,
        surrounding_whitespace: tuple[str, str] = ("", ""),
    ) -> None:
        self._tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        self._reasoning_tags, self._tool_parser = reasoning_tags, tool_parser
        self._surrounding_whitespace = surrounding_whitespace
        self._opens_reasoning = lru_cache(MAX_CACHED_OPENINGS)(self._decode_opening)

    def parse(self, sampled_ids: Int32Array, prompt: RenderedPrompt) -> ParsedReply:
        """Parse the ids sampled after `prompt` into a message."""
        stop = len(sampled_ids) - (len(sampled_ids) > 0 and int(sampled_ids[-1]) in self._stop_ids)
        before, after = self._surrounding_whitespace
        text = self._tokenizer.decode(sampled_ids[:stop]).removeprefix(before).removesuffix(after)
        is_open = self._opens_reasoning(prompt.generation_prompt_ids.tobytes())
        reasoning, content, closed = split_reasoning(text, self._reasoning_tags, is_open)
        parse_calls = self._tool_parser if prompt.allows_calls else parse_as_text
        result = parse_calls(content, prompt.tools)
        problems = list(result.problems)
        if not closed:
            problems.append(
                ParseProblem(
                    ParseProblemKind.UNCLOSED_REASONING, reasoning or "", "the reply ends before its reasoning does"
                )
            )
        calls: tuple[ToolCall, ...] = ()
        if result.calls:
            call_ids = CallIdGenerator(sampled_ids, len(prompt.messages))
            calls = tuple(
                ToolCall(call.id or call_ids.make_id(index), call.name, call.arguments)
                for index, call in enumerate(result.calls)
            )
        message = Message("assistant", result.content, reasoning, calls)
        return ParsedReply(message, (0, stop), tuple(problems))

    def _decode_opening(self, generation_prompt_ids: bytes) -> bool:
        """Return whether a generation prompt has opened the reasoning. Nearly all prompts of a model have the same."""
        opening, tags = self._tokenizer.decode(np.frombuffer(generation_prompt_ids, np.int32)), self._reasoning_tags
        return opening.rfind(tags.start) > opening.rfind(tags.stop)


def split_reasoning(text: str, tags: ReasoningTags, is_open: bool) -> tuple[str | None, str, bool]:
    """Return the reasoning or None, the content after it, and whether the reasoning is closed.

    `is_open` says that the prompt has already opened the reasoning.
    """
    body = text if is_open else text.lstrip()
    if not is_open and not body.startswith(tags.start):
        return None, text, True
    reasoning, tag, content = body.removeprefix(tags.start).partition(tags.stop)
    return reasoning.strip("\n"), content.lstrip("\n"), bool(tag)


class CallIdGenerator:
    """Makes the ids of the calls of one reply: nine letters and digits, as the strictest template requires.

    An id is a digest of the reply's tokens, the length of the conversation and the index of the call. The tokens are
    digested once, so that the time for a reply with many calls is linear in its length.
    """

    def __init__(self, sampled_ids: Int32Array, num_prompt_messages: int) -> None:
        self._digest = hashlib.sha256(sampled_ids.tobytes())
        self._digest.update(b" %d " % num_prompt_messages)

    def make_id(self, index: int) -> str:
        """Return the id of call number `index`."""
        digest = self._digest.copy()
        digest.update(b"%d" % index)
        return digest.hexdigest()[:9]


MAX_REASONING_BREAKS = 4  # line breaks after reasoning
WHITESPACE = r"[ \n\t]{0,16}"  # between the parts of a JSON value; without a limit, a model may write it forever


def build_json_rule(schema: Mapping[str, Any], *, is_strict: bool = True) -> str:
    """Return the grammar of the JSON values of a schema. If not `is_strict`, unknown keywords are ignored.

    Raises RequestInvalid if the schema is nested too deeply to be written.
    """
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE, "lenient": not is_strict}
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"
    except RecursionError as error:
        raise RequestInvalid("a JSON schema is nested too deeply") from error


@dataclass(frozen=True, slots=True)
class ReplyGrammar:
    """Builds the grammars of one model. `reasoning_tags` is None if its template writes no reasoning."""

    tokenizer: Tokenizer
    reasoning_tags: ReasoningTags | None
    call_syntax: CallSyntax | None

    def build(self, prompt: RenderedPrompt, constraint: ReplyConstraint) -> str:
        """Return the grammar of the replies to `prompt` that satisfy `constraint`. Raises RequestInvalid."""
        rules: dict[str, str] = {}
        alternatives: list[str] = []
        if constraint.json_schema is not None:
            alternatives.append(build_json_rule(constraint.json_schema, is_strict=constraint.is_strict))
        if constraint.tool_names:
            tools = [tool["function"] for tool in prompt.tools if tool["function"]["name"] in constraint.tool_names]
            alternatives.append(self._add_calls(rules, tools, is_parallel=constraint.allows_parallel_calls))
        reasoning = self._add_reasoning(rules, self.tokenizer.decode(prompt.generation_prompt_ids))
        rules["start"] = f"{reasoning} ({' | '.join(alternatives)})"
        return "".join(f"{name}: {body}\n" for name, body in rules.items())

    def _add_reasoning(self, rules: dict[str, str], opening: str) -> str:
        """Return the grammar of the reasoning after a generation prompt: required, optional or absent."""
        tags = self.reasoning_tags
        if tags is None:
            return ""
        is_open = opening.rfind(tags.start) > opening.rfind(tags.stop)
        if not is_open and tags.stop in opening:
            return ""
        rules["reasoning"] = self._add_text_before(rules, "reasoning_text", tags.stop)
        breaks = f"/\\n{{0,{MAX_REASONING_BREAKS}}}/"
        return f"reasoning {breaks}" if is_open else f"({self._literal(tags.start)} reasoning {breaks})?"

    def _add_text_before(self, rules: dict[str, str], name: str, end: str) -> str:
        """Return the grammar of any text up to and including `end`."""
        if self._find_tag_id(end) is not None:
            return f"/(?s:.*)/ {self._literal(end)}"
        rules[f"{name}[suffix={json.dumps(end)}]"] = "/(?s:.*)/"
        return name

    def _add_calls(self, rules: dict[str, str], tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> str:
        syntax = self.call_syntax
        if syntax is None:
            raise RequestInvalid("tool_choice: the model has no known format of tool calls; set renderer.tool_format")
        for index, tool in enumerate(tools):
            name, schema = str(tool["name"]), _get_parameters(tool)
            arguments = (
                build_json_rule(schema, is_strict=False)
                if syntax.parameter is None
                else self._add_parameters(rules, f"call_{index}", schema, syntax.parameter)
            )
            name_text = json.dumps(name, ensure_ascii=False) if syntax.has_quoted_name else name
            before, after = self._sequence(syntax.before_arguments), self._sequence(syntax.after_arguments)
            before_name = self._sequence([*syntax.before_name, name_text])
            rules[f"call_{index}"] = f"{before_name} {before} {arguments} {after}"
        rules["call"] = " | ".join(f"call_{index}" for index in range(len(tools)))
        further = f"({self._sequence(syntax.separator)} call)*" if is_parallel else ""
        return f"{self._sequence(syntax.start)} call {further} {self._sequence(syntax.stop)}"

    def _add_parameters(
        self, rules: dict[str, str], prefix: str, schema: Mapping[str, Any], texts: tuple[str, str, str]
    ) -> str:
        """Return the grammar of arguments that are written one by one, in the order of the schema."""
        before_name, before_value, after_value = texts
        required: Sequence[str] = schema.get("required") or ()
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts: list[str] = []
        for index, (name, property_schema) in enumerate(_get_properties(schema).items()):
            value_name, parameter = f"{prefix}_value_{index}", f"{prefix}_parameter_{index}"
            head = self._literal(f"{before_name}{name}{before_value}")
            if property_schema.get("type") in ("string", None):  # plain text, which the parser does not decode
                choices: list[Any] = property_schema.get("enum") or []
                texts_of_choices = [self._literal(f"{choice}{after_value}") for choice in choices]
                text = self._add_text_before(rules, value_name, after_value)
                rules[parameter] = f"{head} ({' | '.join(texts_of_choices) or text})"
            else:
                value = build_json_rule({**definitions, **property_schema}, is_strict=False)
                rules[parameter] = f"{head} {value} {self._literal(after_value)}"
            parts.append(parameter if name in required else f"{parameter}?")
        return " ".join(parts)

    def _sequence(self, texts: Iterable[str]) -> str:
        """Return the grammar of texts in a row, in which a lone line break is optional."""
        return " ".join(f"{self._literal(text)}?" if text == "\n" else self._literal(text) for text in texts)

    def _literal(self, text: str) -> str:
        """Return the grammar of a text, with its tags by id."""
        tags = [token for token in self.tokenizer.tag_ids if token in text]
        parts = re.split(f"({'|'.join(map(re.escape, tags))})", text) if tags else [text]
        ids = [self._find_tag_id(part) for part in parts]
        return " ".join(f"<[{id}]>" if id is not None else json.dumps(part) for part, id in zip(parts, ids) if part)

    def _find_tag_id(self, text: str) -> int | None:
        return self.tokenizer.tag_ids.get(text)


def _get_parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, which is an object. Raises RequestInvalid."""
    schema: Any = tool.get("parameters") or {}
    if not is_dict(schema) or schema.get("type", "object") != "object":
        raise RequestInvalid(f"tools: the parameters of {tool['name']!r} are not the schema of an object")
    return {"type": "object", **schema}


def _get_properties(schema: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the properties of a schema; a property whose schema is not an object may have any value."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    return {name: value if is_dict(value) else {} for name, value in properties.items()}
