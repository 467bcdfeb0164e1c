"""A chat template: an untrusted Jinja program that turns messages into text.

It runs in a sandbox with the same environment as in Hugging Face's `apply_chat_template`: messages, tools, special
tokens, the caller's arguments, `raise_exception`, `strftime_now`, loop controls, and JSON without HTML escapes. The
date is read once, when the template is loaded, so that a conversation that crosses midnight does not change its start.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ramify.errors import ConfigInvalid, TemplateRefused
from ramify.render.model_files import DEFAULT_TEMPLATE, TOOL_USE_TEMPLATE


class ChatTemplate:
    """The chat templates of one model, compiled on first use."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        if DEFAULT_TEMPLATE not in sources:
            raise ConfigInvalid(
                f"renderer: the model has no chat template (found: {', '.join(sources) or 'none'}); "
                "add a chat_template.jinja to its directory, or name a family"
            )
        self.sources = dict(sources)
        self._environment = _build_environment(datetime.now())
        self._variables = {**(special_tokens or {}), **(template_args or {})}
        self._compiled: dict[str, jinja2.Template] = {}

    def __contains__(self, text: str) -> bool:
        """Return whether a template contains the text; used to detect formats."""
        return any(text in source for source in self.sources.values())

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        """Render a conversation. Raises TemplateRefused if the template fails."""
        name = TOOL_USE_TEMPLATE if tools and TOOL_USE_TEMPLATE in self.sources else DEFAULT_TEMPLATE
        try:
            if name not in self._compiled:
                self._compiled[name] = self._environment.from_string(self.sources[name])
            return self._compiled[name].render(
                messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except jinja2.TemplateSyntaxError as error:
            raise TemplateRefused(f"the chat template is not valid Jinja, line {error.lineno}: {error}") from error
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            roles = " ".join(str(message["role"]) for message in messages[:12])
            more = " ..." if len(messages) > 12 else ""
            raise TemplateRefused(f"the chat template refuses [{roles}{more}]: {error}") from error


class _GenerationTag(Extension):
    """Supports `{% generation %}`, which marks the text of an assistant, by rendering its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _build_environment(today: datetime) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # pyright: ignore[reportUnknownMemberType]
    template_globals = cast(dict[str, Any], environment.globals)  # pyright: ignore[reportUnknownMemberType]
    template_globals |= {"raise_exception": _raise_exception, "strftime_now": today.strftime}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes; Jinja's own filter would escape `<` and `'`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
