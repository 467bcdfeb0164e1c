"""Parsers of tool calls, one module per format.

A parser splits the text of a reply into content, calls and problems. A malformed call is not dropped: its text stays in
the content, where the model will see it again, and a `ParseProblem` says what is wrong. Templates write the calls.
"""

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
    """Return the format that a template uses, detected from its text, or else from the added tokens."""
    if "<function=" in template:
        return "qwen-coder"
    if "<tool_call>" in template:
        return "hermes"
    if mistral.CALLS_TAG in template:
        return "mistral"
    if llama3.PYTHON_TAG in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama-3"
    added_tokens = tokenizer.added_tokens
    if "<tool_call>" in added_tokens:
        return "hermes"
    if mistral.CALLS_TAG in added_tokens:
        return "mistral"
    return "llama-3" if llama3.PYTHON_TAG in added_tokens else "none"
