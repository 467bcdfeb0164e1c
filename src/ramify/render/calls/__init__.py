"""How models write tool calls, one module per format.

A format reads a reply's text and gives back what is said beside the calls, the calls, and what could not be read. A
malformed call is never dropped: its text stays in the content, where the model will see it again, and a `Problem` says
what is wrong with it. Writing is the template's business.
"""

from __future__ import annotations

from ramify.render.calls import bare, mistral, tagged, xml
from ramify.render.calls.reading import Format, Reading, nothing
from ramify.render.template import ChatTemplate
from ramify.render.tokenizer import Tokenizer

__all__ = ["FORMATS", "Format", "Reading", "recognise"]

FORMATS: dict[str, Format] = {
    "hermes": tagged.read,
    "qwen-coder": xml.read,
    "llama-3": bare.read,
    "mistral": mistral.read,
    "none": nothing,
}


def recognise(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """The format a template teaches, told by the words it uses, or else by those of the vocabulary."""
    if "<function=" in template:
        return "qwen-coder"
    if "<tool_call>" in template:
        return "hermes"
    if mistral.START in template:
        return "mistral"
    if bare.PYTHON_TAG in template or ("<|start_header_id|>" in template and "parameters" in template):
        return "llama-3"
    known = tokenizer.added_ids
    if "<tool_call>" in known:
        return "hermes"
    if mistral.START in known:
        return "mistral"
    return "llama-3" if bare.PYTHON_TAG in known else "none"
