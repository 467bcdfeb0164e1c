"""Messages to token ids, sampled ids to messages, one turn after another without tokenizing anything twice.

`load_renderer` gives the `Renderer` of a model directory. It needs `tokenizers` and `jinja2`, never torch. A name is
loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.render.config import FamilyRendererConfig as FamilyRendererConfig
    from ramify.render.config import RendererConfig as RendererConfig
    from ramify.render.config import TemplateRendererConfig as TemplateRendererConfig
    from ramify.render.conversation import Break as Break
    from ramify.render.conversation import History as History
    from ramify.render.conversation import Parsed as Parsed
    from ramify.render.conversation import Problem as Problem
    from ramify.render.conversation import ProblemKind as ProblemKind
    from ramify.render.conversation import Reason as Reason
    from ramify.render.conversation import Rendered as Rendered
    from ramify.render.conversation import Renderer as Renderer
    from ramify.render.conversation import Tool as Tool
    from ramify.render.families import FamilyRenderer as FamilyRenderer
    from ramify.render.load import load_renderer as load_renderer
    from ramify.render.renderer import TemplateRenderer as TemplateRenderer
    from ramify.render.template import ChatTemplate as ChatTemplate
    from ramify.render.tokenizer import FileTokenizer as FileTokenizer
    from ramify.render.tokenizer import Tokenizer as Tokenizer

_FACE = {
    "Break": "conversation",
    "ChatTemplate": "template",
    "FamilyRenderer": "families",
    "FamilyRendererConfig": "config",
    "FileTokenizer": "tokenizer",
    "History": "conversation",
    "Parsed": "conversation",
    "Problem": "conversation",
    "ProblemKind": "conversation",
    "Reason": "conversation",
    "Rendered": "conversation",
    "Renderer": "conversation",
    "RendererConfig": "config",
    "TemplateRenderer": "renderer",
    "TemplateRendererConfig": "config",
    "Tokenizer": "tokenizer",
    "Tool": "conversation",
    "load_renderer": "load",
}

__all__ = [
    "Break",
    "ChatTemplate",
    "FamilyRenderer",
    "FamilyRendererConfig",
    "FileTokenizer",
    "History",
    "Parsed",
    "Problem",
    "ProblemKind",
    "Reason",
    "Rendered",
    "Renderer",
    "RendererConfig",
    "TemplateRenderer",
    "TemplateRendererConfig",
    "Tokenizer",
    "Tool",
    "load_renderer",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.render' has no attribute {name!r}")
    value = getattr(import_module(f"ramify.render.{_FACE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE})
