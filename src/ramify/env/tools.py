"""Tools: functions a model may call.

The model reads a JSON schema, made from the function's annotations and docstring, and writes arguments, checked against
the same annotations. It will get some of them wrong, and tools fail; all of that is part of the conversation. So a call
answers with text whatever happens, except when the box is gone (`SandboxError`): nothing the model writes mends that.
"""

import asyncio
import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import to_json

from ramify.env.context import CONTEXT_FIELDS, RolloutContext
from ramify.env.docstring import parse_docstring
from ramify.env.hook import is_coroutine_function, is_current_task_cancelled, list_parameters
from ramify.env.hook_threads import run_in_hook_thread
from ramify.errors import ConfigInvalid, SandboxError
from ramify.trace import Media, MediaPart, Message, TextPart, ToolCall

ToolContent = str | tuple[TextPart | MediaPart, ...]

MAX_ERROR_CHARS = 1000  # characters of an error that a model is shown


class ToolArgumentsInvalid(Exception):
    """The arguments of a call do not fit the tool; the message is for the model."""


class Tool(ABC):
    """Something a model may call by name. `schema` is what it is told, in OpenAI's function form."""

    injected_parameters: frozenset[str] = frozenset()
    """The fields of the context that it is given."""

    def __init__(self, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self.name = name
        self.description = description
        function = {"name": name, "description": description, "parameters": dict(parameters)}
        self.schema: dict[str, Any] = {"type": "function", "function": function}

    @staticmethod
    def wrap(tool: "Tool | Callable[..., Any]") -> "Tool":
        """A function or method as a tool; ConfigInvalid if its signature cannot be told to a model."""
        return tool if isinstance(tool, Tool) else FunctionTool(tool)

    async def call(self, context: RolloutContext, arguments: Mapping[str, Any] | str) -> ToolContent:
        """What the tool answers. Errors are answers too: they begin with `error:`."""
        try:
            return await self.execute(context, _parse_arguments(arguments))
        except SandboxError:
            raise
        except ToolArgumentsInvalid as error:
            return _truncate(f"error: {self.name}: {error}")
        except asyncio.CancelledError:
            if is_current_task_cancelled():
                raise
            return "error: CancelledError: what the tool waited for was cancelled"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a tool raises is told to the model
            return _truncate(f"error: {type(error).__name__}: {error}".removesuffix(": "))

    @abstractmethod
    async def execute(self, context: RolloutContext, arguments: dict[str, Any]) -> ToolContent:
        """What the tool answers; raises `Misused` for arguments that do not fit, and whatever its code raises."""


class FunctionTool(Tool):
    """A function or method. Parameters named like a field of `Context` are filled from it and hidden from the model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        unbound = getattr(function, "__func__", function)
        self._function = function
        self._signature = _inspect_tool(unbound, unbound is not function)
        signature = self._signature
        self.injected_parameters = signature.injected
        super().__init__(unbound.__name__, signature.description, signature.schema)

    async def execute(self, context: RolloutContext, arguments: dict[str, Any]) -> ToolContent:
        signature = self._signature
        kwargs = {name: getattr(context, name) for name in signature.injected} | signature.validate_arguments(arguments)
        if signature.is_async:
            result = await self._function(**kwargs)
        else:
            result = await run_in_hook_thread(self._function, kwargs)
        return to_content(result, context)


class ToolSet:
    """The tools of one rollout, by name."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self.tools: tuple[Tool, ...] = tuple(tools)
        self.schemas: tuple[dict[str, Any], ...] = tuple(tool.schema for tool in self.tools)
        self._by_name = {tool.name: tool for tool in self.tools}
        if len(self._by_name) < len(self.tools):
            names = [tool.name for tool in self.tools]
            duplicates = sorted({name for name in names if names.count(name) > 1})
            raise ConfigInvalid(
                f"tools: two have the name {', '.join(map(repr, duplicates))}; a model could not tell them apart"
            )

    @classmethod
    def wrap(cls, tools: Iterable[Tool | Callable[..., Any]]) -> "ToolSet":
        """The tools and functions together."""
        return cls(map(Tool.wrap, tools))

    async def call(self, call: ToolCall, context: RolloutContext) -> Message:
        """The answer to a call as the model wrote it, as the message that goes back."""
        content = await self._dispatch(call, context)
        if isinstance(content, str):  # a file's name may hold bytes that are no text
            content = content.encode("utf-8", "replace").decode()
        return Message(role="tool", content=content, tool_call_id=call.id)

    async def _dispatch(self, call: ToolCall, context: RolloutContext) -> ToolContent:
        tool = self._by_name.get(call.name)
        if tool is not None:
            return await tool.call(context, call.arguments)
        if not self.tools:
            return f"error: there is no tool {call.name!r}; there are no tools at all"
        close_matches = difflib.get_close_matches(call.name, self._by_name, n=1)
        hint = f" did you mean {close_matches[0]}?" if close_matches else ""
        return f"error: there is no tool {call.name!r};{hint} the tools are {', '.join(self._by_name)}"

    def __len__(self) -> int:
        return len(self.tools)


def to_content(result: Any, context: RolloutContext) -> ToolContent:
    """A tool's result as the content of a message: text as it is, images by their hash, anything else as JSON."""
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    if isinstance(result, TextPart | MediaPart | Media):
        result = (result,)
    if isinstance(result, list | tuple) and any(isinstance(item, TextPart | MediaPart | Media) for item in result):
        return tuple(_to_part(item, context) for item in result)
    return to_json(result, fallback=str).decode()


def _to_part(item: Any, context: RolloutContext) -> TextPart | MediaPart:
    if isinstance(item, TextPart | MediaPart):
        return item
    if isinstance(item, Media):
        context.trace.add_media(item)
        return MediaPart(item.hash)
    return TextPart(item if isinstance(item, str) else to_json(item, fallback=str).decode())


@dataclass(frozen=True, slots=True)
class _ToolSignature:
    """What is known about a tool's function once its signature has been read."""

    description: str
    schema: dict[str, Any]
    model: type[BaseModel]
    parameter_by_field: dict[str, str]  # field of the model to parameter of the function
    injected: frozenset[str]
    is_async: bool

    def validate_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the function wants them; what was left out is left to its defaults."""
        try:
            validated = self.model.model_validate(arguments)
        except ValidationError as error:
            raise ToolArgumentsInvalid(
                "; ".join(self._describe_error(dict(error_details)) for error_details in error.errors())
            ) from None
        return {self.parameter_by_field[field]: getattr(validated, field) for field in validated.model_fields_set}

    def _describe_error(self, error_details: dict[str, Any]) -> str:
        name = ".".join(map(str, error_details["loc"]))
        match error_details["type"]:
            case "missing":
                return f"argument {name} is required"
            case "extra_forbidden":
                return f"there is no argument {name}; there is {', '.join(self.parameter_by_field.values()) or 'none'}"
            case _:
                return f"argument {name}: {error_details['msg']}, got {error_details['input']!r:.80}"


@lru_cache(maxsize=1024)
def _inspect_tool(function: Callable[..., Any], bound: bool) -> _ToolSignature:
    """The schema of a function. Fields get names of our own: a parameter may be called `schema`, or `_x`."""
    docstring = parse_docstring(function.__doc__)
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigInvalid(f"tool {function.__name__}: an annotation cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    parameter_by_field: dict[str, str] = {}
    injected: set[str] = set()
    for parameter in list_parameters(function, bound=bound):
        name = parameter.name
        if name in CONTEXT_FIELDS:
            injected.add(name)
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigInvalid(
                f"tool {function.__name__}: a model gives arguments by name, so {parameter} cannot be one"
            )
        if name not in hints:
            raise ConfigInvalid(f"tool {function.__name__}: parameter {name!r} needs a type, for the model's schema")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        field = f"argument_{len(parameter_by_field)}"
        parameter_by_field[field] = name
        fields[field] = (hints[name], Field(default, alias=name, description=docstring.parameters.get(name)))
    try:
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        schema = _strip_titles(model.model_json_schema(by_alias=True))
    except PydanticUserError as error:
        raise ConfigInvalid(f"tool {function.__name__}: {error.message}") from error
    return _ToolSignature(
        docstring.description, schema, model, parameter_by_field, frozenset(injected), is_coroutine_function(function)
    )


def _strip_titles(schema: Any, *, keys_are_names: bool = False) -> Any:
    """The schema without the titles pydantic makes up from names; a property called `title` stays."""
    if isinstance(schema, list):
        return [_strip_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _strip_titles(value, keys_are_names=key in ("properties", "$defs") and not keys_are_names)
        for key, value in schema.items()
        if keys_are_names or key != "title"
    }


def _parse_arguments(arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    if not isinstance(arguments, str):
        return dict(arguments)
    try:
        decoded = msgspec.json.decode(arguments) if arguments.strip() else {}
    except msgspec.DecodeError as error:
        raise ToolArgumentsInvalid(f"the arguments are not JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise ToolArgumentsInvalid(f"the arguments must be a JSON object, found {arguments:.80}")
    return decoded


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."
