"""A chat template: an untrusted Jinja program that turns messages into text.

It runs in a sandbox with the same environment as in Hugging Face's `apply_chat_template`: messages, tools, special
tokens, the caller's arguments, `raise_exception`, `strftime_now`, loop controls, and JSON without HTML escapes. The
date is read once, when the template is loaded, so that a conversation that crosses midnight does not change its start.

The sandbox also bounds the size of a template, its CPU time and its output. The time is checked at every iteration of a
loop and at every call, the only ways in which a template can run for long.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ramify.core.errors import ConfigInvalid, TemplateRefused
from ramify.model.render.model_files import DEFAULT_TEMPLATE, TOOL_USE_TEMPLATE

MAX_SOURCE_CHARS = 2**20  # of one template; large models have templates of 20,000
MAX_RENDER_SECONDS = 5.0  # of CPU time
MAX_OUTPUT_CHARS = 2**26
TOO_LONG = f"it writes more than {MAX_OUTPUT_CHARS} characters"
MAX_EXPONENT = 1000


class ChatTemplate:
    """The chat templates of one model, compiled on first use."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        template_args: Mapping[str, Any] | None = None,
        max_seconds: float = MAX_RENDER_SECONDS,
    ) -> None:
        if DEFAULT_TEMPLATE not in sources:
            raise ConfigInvalid(
                f"renderer: the model has no chat template (found: {', '.join(sources) or 'none'}); "
                "add a chat_template.jinja to its directory, or name a family"
            )
        for name, source in sources.items():
            if len(source) > MAX_SOURCE_CHARS:
                raise ConfigInvalid(
                    f"model: its chat template {name!r} has {len(source)} characters, expected at most "
                    f"{MAX_SOURCE_CHARS}; use another template, or name a family in renderer"
                )
        self.sources = dict(sources)
        self._environment = _build_environment(datetime.now(), max_seconds)
        self._variables = {**(special_tokens or {}), **(template_args or {})}
        self._compiled: dict[str, jinja2.Template] = {}

    def __contains__(self, text: str) -> bool:
        """Return whether a template contains the text; used to detect formats."""
        return any(text in source for source in self.sources.values())

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        """Render a conversation. Raises TemplateRefused if the template fails."""
        try:
            return self._render(messages, tools, add_generation_prompt)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateRefused(f"the chat template is not valid Jinja, line {error.lineno}: {error}") from error
        except RENDER_ERRORS as error:
            roles = " ".join(str(message["role"]) for message in messages[:12])
            more = " ..." if len(messages) > 12 else ""
            detail = "its calls are nested too deeply" if isinstance(error, RecursionError) else error
            raise TemplateRefused(
                f"the chat template refuses [{roles}{more}]: {detail or type(error).__name__}"
            ) from error

    def check_limits(self) -> None:
        """Raise ConfigInvalid if the template exceeds the limits even for a short conversation."""
        try:
            self._render([{"role": "user", "content": "word"}], [], True)
        except (RenderLimitError, MemoryError) as error:
            reason = str(error) or "it takes all memory"
            raise ConfigInvalid(
                f"model: its chat template cannot be rendered: {reason}; correct it, or name a family in renderer"
            ) from error
        except (*RENDER_ERRORS, jinja2.TemplateError):
            pass  # it may need another conversation

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        name = TOOL_USE_TEMPLATE if tools and TOOL_USE_TEMPLATE in self.sources else DEFAULT_TEMPLATE
        if name not in self._compiled:
            self._compiled[name] = self._environment.compile_bounded(self.sources[name])
        self._environment.start_render()
        parts: list[str] = []
        num_chars = 0
        for part in self._compiled[name].generate(
            messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **self._variables
        ):
            parts.append(part)
            num_chars += len(part)
            if num_chars > MAX_OUTPUT_CHARS:
                raise RenderLimitError(TOO_LONG)
        return "".join(parts)


class RenderLimitError(jinja2.TemplateRuntimeError):
    """A template took too long or wrote too much."""


RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that ends a template after `max_seconds` of CPU time."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, max_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._max_seconds = max_seconds
        self._thread_state = threading.local()  # prompts are rendered in several threads

    def start_render(self) -> None:
        """Begin to measure the time of this thread."""
        self._thread_state.deadline = time.thread_time() + self._max_seconds

    @property
    def time_check(self) -> None:
        """Raise RenderLimitError if the template has taken too long. The body of every loop reads this.

        It is a property because a method would be called through the sandbox, which takes ten times as long.
        """
        if time.thread_time() > self._thread_state.deadline:
            raise RenderLimitError(f"it takes longer than {self._max_seconds:g} s")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object for a template."""
        self.time_check  # noqa: B018 - reading it raises
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of `*` or `**`, if it is not too large."""
        if operator == "**" and isinstance(right, int) and right > MAX_EXPONENT:
            raise RenderLimitError(f"it has an exponent of {right}, expected at most {MAX_EXPONENT}")
        for value, factor in ((left, right), (right, left)):
            is_repetition = isinstance(value, (str, list, tuple)) and isinstance(factor, int)
            if is_repetition and len(cast("Sequence[Any]", value)) * factor > MAX_OUTPUT_CHARS:
                raise RenderLimitError(TOO_LONG)
        return super().call_binop(context, operator, left, right)

    def compile_bounded(self, source: str) -> jinja2.Template:
        """Compile a template that reads `time_check` in the body of every loop."""
        template = self.parse(source)
        for loop in template.find_all(nodes.For):
            check = nodes.EnvironmentAttribute("time_check")
            statement = nodes.ExprStmt(check).set_lineno(loop.lineno).set_environment(self)
            loop.body.insert(0, statement)
        return self.from_string(template)


class _GenerationTag(Extension):
    """Supports `{% generation %}`, which marks the text of an assistant, by rendering its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _build_environment(today: datetime, max_seconds: float) -> _BoundedEnvironment:
    environment = _BoundedEnvironment(
        max_seconds, trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    template_globals = cast(dict[str, Any], environment.globals)
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
