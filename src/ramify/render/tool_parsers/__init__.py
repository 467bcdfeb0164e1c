"""How models write tool calls, one module per format.

A format reads a reply's text and gives back what is said beside the calls, the calls, and what could not be read. A
malformed call is never dropped: its text stays in the content, where the model will see it again, and a `Problem` says
what is wrong with it. Writing is the template's business.
"""

from __future__ import annotations

from ramify.render.template import ChatTemplate
from ramify.render.tokenizer import Tokenizer
from ramify.render.tool_parsers import hermes, llama3, mistral, qwen_coder
from ramify.render.tool_parsers.base import ToolParser, ToolParseResult, parse_as_text

__all__ = ["TOOL_PARSERS", "ToolParseResult", "ToolParser", "detect_tool_format"]

TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": hermes.parse,
    "qwen-coder": qwen_coder.parse,
    "llama-3": llama3.parse,
    "mistral": mistral.parse,
    "none": parse_as_text,
}


def detect_tool_format(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """The format a template teaches, told by the words it uses, or else by those of the vocabulary."""
    if "<function=" in template:
        return "qwen-coder"
    if "<tool_call>" in template:
        return "hermes"
    if mistral.CALLS_TAG in template:
        return "mistral"
    if llama3.PYTHON_TAG in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama-3"
    known = tokenizer.added_tokens
    if "<tool_call>" in known:
        return "hermes"
    if mistral.CALLS_TAG in known:
        return "mistral"
    return "llama-3" if llama3.PYTHON_TAG in known else "none"
