"""Parse sampled ids into a message: remove the stop token, split off the reasoning, parse the tool calls.

Reasoning ends at its closing tag, whether the model or the generation prompt opened it. Only the text after it is
searched for calls, so that a model may think about a call without making it.
"""

import hashlib
from collections.abc import Sequence

from ramify.model.render.base import ParsedReply, RenderedPrompt
from ramify.model.render.template_adapter import ReasoningTags
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.render.tool_parsers import ToolParser, parse_as_text
from ramify.model.render.tool_parsers.base import ParseProblem, ParseProblemKind
from ramify.trace import Message, ToolCall
from ramify.trace.columns import Int32Array


class ReplyParser:
    """Parses the replies of one model."""

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

    def parse(self, sampled_ids: Int32Array, prompt: RenderedPrompt) -> ParsedReply:
        """Parse the ids sampled after `prompt` into a message."""
        stop = len(sampled_ids) - (len(sampled_ids) > 0 and int(sampled_ids[-1]) in self._stop_ids)
        before, after = self._surrounding_whitespace
        text = self._tokenizer.decode(sampled_ids[:stop]).removeprefix(before).removesuffix(after)
        opening, tags = self._tokenizer.decode(prompt.generation_prompt_ids), self._reasoning_tags
        is_open = opening.rfind(tags.start) > opening.rfind(tags.stop)
        reasoning, content, closed = split_reasoning(text, tags, is_open)
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
