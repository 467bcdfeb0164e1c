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

from ramify.env.calling import given_up, is_async, parameters
from ramify.env.context import OFFERED, Context
from ramify.env.crew import in_thread
from ramify.env.docstring import read_docstring
from ramify.errors import ConfigInvalid, SandboxError
from ramify.trace import Media, MediaPart, Message, TextPart, ToolCall

Content = str | tuple[TextPart | MediaPart, ...]

LONGEST = 1000  # characters of an error that a model is shown


class Misused(Exception):
    """The arguments of a call do not fit the tool; the message is for the model."""


class Tool(ABC):
    """Something a model may call by name. `schema` is what it is told, in OpenAI's function form."""

    asks: frozenset[str] = frozenset()
    """The fields of the context that it is given."""

    def __init__(self, name: str, description: str, arguments: Mapping[str, Any]) -> None:
        self.name = name
        self.description = description
        function = {"name": name, "description": description, "parameters": dict(arguments)}
        self.schema: dict[str, Any] = {"type": "function", "function": function}

    @staticmethod
    def of(tool: "Tool | Callable[..., Any]") -> "Tool":
        """A function or method as a tool; ConfigInvalid if its signature cannot be told to a model."""
        return tool if isinstance(tool, Tool) else FunctionTool(tool)

    async def call(self, context: Context, arguments: Mapping[str, Any] | str) -> Content:
        """What the tool answers. Errors are answers too: they begin with `error:`."""
        try:
            return await self.answer(context, _table(arguments))
        except SandboxError:
            raise
        except Misused as error:
            return _cut(f"error: {self.name}: {error}")
        except asyncio.CancelledError:
            if given_up():
                raise
            return "error: CancelledError: what the tool waited for was cancelled"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a tool raises is told to the model
            return _cut(f"error: {type(error).__name__}: {error}".removesuffix(": "))

    @abstractmethod
    async def answer(self, context: Context, arguments: dict[str, Any]) -> Content:
        """What the tool answers; raises `Misused` for arguments that do not fit, and whatever its code raises."""


class FunctionTool(Tool):
    """A function or method. Parameters named like a field of `Context` are filled from it and hidden from the model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        plain = getattr(function, "__func__", function)
        self._function = function
        self._reading = _read(plain, plain is not function)
        reading = self._reading
        self.asks = reading.injected
        super().__init__(plain.__name__, reading.description, reading.schema)

    async def answer(self, context: Context, arguments: dict[str, Any]) -> Content:
        reading = self._reading
        given = {name: getattr(context, name) for name in reading.injected} | reading.arguments(arguments)
        if reading.is_async:
            result = await self._function(**given)
        else:
            result = await in_thread(self._function, given)
        return content_of(result, context)


class ToolSet:
    """The tools of one rollout, by name."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self.tools: tuple[Tool, ...] = tuple(tools)
        self.schemas: tuple[dict[str, Any], ...] = tuple(tool.schema for tool in self.tools)
        self._by_name = {tool.name: tool for tool in self.tools}
        if len(self._by_name) < len(self.tools):
            names = [tool.name for tool in self.tools]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigInvalid(
                f"tools: two have the name {', '.join(map(repr, twice))}; a model could not tell them apart"
            )

    @classmethod
    def of(cls, tools: Iterable[Tool | Callable[..., Any]]) -> "ToolSet":
        """The tools and functions together."""
        return cls(map(Tool.of, tools))

    async def call(self, call: ToolCall, context: Context) -> Message:
        """The answer to a call as the model wrote it, as the message that goes back."""
        content = await self._answer(call, context)
        if isinstance(content, str):  # a file's name may hold bytes that are no text
            content = content.encode("utf-8", "replace").decode()
        return Message(role="tool", content=content, tool_call_id=call.id)

    async def _answer(self, call: ToolCall, context: Context) -> Content:
        tool = self._by_name.get(call.name)
        if tool is not None:
            return await tool.call(context, call.arguments)
        if not self.tools:
            return f"error: there is no tool {call.name!r}; there are no tools at all"
        alike = difflib.get_close_matches(call.name, self._by_name, n=1)
        meant = f" did you mean {alike[0]}?" if alike else ""
        return f"error: there is no tool {call.name!r};{meant} the tools are {', '.join(self._by_name)}"

    def __len__(self) -> int:
        return len(self.tools)


def content_of(result: Any, context: Context) -> Content:
    """A tool's result as the content of a message: text as it is, images by their hash, anything else as JSON."""
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    if isinstance(result, TextPart | MediaPart | Media):
        result = (result,)
    if isinstance(result, list | tuple) and any(isinstance(item, TextPart | MediaPart | Media) for item in result):
        return tuple(_part(item, context) for item in result)
    return to_json(result, fallback=str).decode()


def _part(item: Any, context: Context) -> TextPart | MediaPart:
    if isinstance(item, TextPart | MediaPart):
        return item
    if isinstance(item, Media):
        context.trace.add_media(item)
        return MediaPart(item.hash)
    return TextPart(item if isinstance(item, str) else to_json(item, fallback=str).decode())


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is known about a tool's function once its signature has been read."""

    description: str
    schema: dict[str, Any]
    model: type[BaseModel]
    names: dict[str, str]  # field of the model to parameter of the function
    injected: frozenset[str]
    is_async: bool

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the function wants them; what was left out is left to its defaults."""
        try:
            found = self.model.model_validate(given)
        except ValidationError as error:
            raise Misused("; ".join(self._problem(dict(finding)) for finding in error.errors())) from None
        return {self.names[field]: getattr(found, field) for field in found.model_fields_set}

    def _problem(self, finding: dict[str, Any]) -> str:
        name = ".".join(map(str, finding["loc"]))
        match finding["type"]:
            case "missing":
                return f"argument {name} is required"
            case "extra_forbidden":
                return f"there is no argument {name}; there is {', '.join(self.names.values()) or 'none'}"
            case _:
                return f"argument {name}: {finding['msg']}, got {finding['input']!r:.80}"


@lru_cache(maxsize=1024)
def _read(function: Callable[..., Any], bound: bool) -> _Reading:
    """The schema of a function. Fields get names of our own: a parameter may be called `schema`, or `_x`."""
    docstring = read_docstring(function.__doc__)
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigInvalid(f"tool {function.__name__}: an annotation cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    injected: set[str] = set()
    for parameter in parameters(function, bound=bound):
        name = parameter.name
        if name in OFFERED:
            injected.add(name)
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigInvalid(
                f"tool {function.__name__}: a model gives arguments by name, so {parameter} cannot be one"
            )
        if name not in hints:
            raise ConfigInvalid(f"tool {function.__name__}: parameter {name!r} needs a type, for the model's schema")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        field = f"argument_{len(names)}"
        names[field] = name
        fields[field] = (hints[name], Field(default, alias=name, description=docstring.parameters.get(name)))
    try:
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        schema = _without_titles(model.model_json_schema(by_alias=True))
    except PydanticUserError as error:
        raise ConfigInvalid(f"tool {function.__name__}: {error.message}") from error
    return _Reading(docstring.description, schema, model, names, frozenset(injected), is_async(function))


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """The schema without the titles pydantic makes up from names; a property called `title` stays."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, names=key in ("properties", "$defs") and not names)
        for key, value in schema.items()
        if names or key != "title"
    }


def _table(arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    if not isinstance(arguments, str):
        return dict(arguments)
    try:
        found = msgspec.json.decode(arguments) if arguments.strip() else {}
    except msgspec.DecodeError as error:
        raise Misused(f"the arguments are not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Misused(f"the arguments must be a JSON object, found {arguments:.80}")
    return found


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
