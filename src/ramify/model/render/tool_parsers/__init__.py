"""Parsers of tool calls, one module per format.

A parser splits the text of a reply into content, calls and problems. A malformed call is not dropped: its text stays in
the content, where the model will see it again, and a `ParseProblem` says what is wrong. Templates write the calls. The
`CallSyntax` of a format describes what its parser reads, for replies that must be calls (`render.reply_grammar`).
"""

from collections.abc import Container
from typing import Protocol

from ramify.model.render.tool_parsers import hermes, llama3, mistral, qwen_coder
from ramify.model.render.tool_parsers.base import CallSyntax, ToolParser, ToolParseResult, parse_as_text

__all__ = [
    "TOOL_PARSERS",
    "CallSyntax",
    "ToolParseResult",
    "ToolParser",
    "detect_tool_format",
    "get_call_syntax",
    "parse_as_text",
]

TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": hermes.parse,
    "qwen-coder": qwen_coder.parse,
    "llama-3": llama3.parse,
    "mistral": mistral.parse,
    "none": parse_as_text,
}
FORMATS_BY_TAG = {hermes.CALL_START: "hermes", mistral.CALLS_TAG: "mistral", llama3.PYTHON_TAG: "llama-3"}


class TemplateText(Protocol):
    """The text of a chat template."""

    def __contains__(self, text: str, /) -> bool: ...


def detect_tool_format(template: TemplateText, added_tokens: Container[str]) -> str:
    """Return the format that a template uses, detected from its text, or else from the added tokens."""
    if qwen_coder.FUNCTION_START in template:
        return "qwen-coder"
    for tag, tool_format in FORMATS_BY_TAG.items():
        if tag in template:
            return tool_format
    if "<|start_header_id|>" in template and "parameters" in template:
        return "llama-3"
    return next((tool_format for tag, tool_format in FORMATS_BY_TAG.items() if tag in added_tokens), "none")


def get_call_syntax(tool_format: str, template: TemplateText) -> CallSyntax | None:
    """Return how a format writes calls; None if the model does not call tools."""
    mistral_syntax = mistral.NAMED_SYNTAX if mistral.ARGUMENTS_TAG in template else mistral.LIST_SYNTAX
    syntaxes = {
        "hermes": hermes.SYNTAX,
        "qwen-coder": qwen_coder.SYNTAX,
        "llama-3": llama3.SYNTAX,
        "mistral": mistral_syntax,
    }
    return syntaxes.get(tool_format)
