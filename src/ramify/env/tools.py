"""Tools: functions that a model may call.

The model sees a JSON schema, built from the function's annotations and docstring, and writes arguments, which are
validated against the same annotations. Wrong arguments and failing tools are part of the conversation: the model gets
an error text. Only `SandboxError`, `EnvironmentFault` and `AgentFailed` are raised, since no reply of the model can fix
a lost sandbox or a tool whose result nobody can read.
"""

import asyncio
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_json

from ramify.core.async_calls import fail_after
from ramify.core.config.schema import is_dict, is_list, is_tuple
from ramify.core.errors import (
    AgentFailed,
    ConfigInvalid,
    DeadlineExceeded,
    EnvironmentFault,
    RequestInvalid,
    SandboxError,
)
from ramify.core.names import find_duplicates, find_similar
from ramify.env.context import CONTEXT_FIELDS, RolloutContext
from ramify.env.hook import is_coroutine_function, is_current_task_cancelled, list_parameters, run_in_hook_thread
from ramify.infer.dialects.media import MEDIA_ADVICE, read_data_url
from ramify.infer.dialects.message_parser import MessageParser
from ramify.infer.gateway.served_tools import ERROR_PREFIX, ToolResult
from ramify.trace import Media, MediaPart, Message, TextPart, ToolCall
from ramify.trace.image_header import detect_format

# Parse a tool's docstring into the descriptions that the model sees, following Google's `Args:` sections.

_SECTION_PATTERN = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Example|Examples|Notes?):\s*$")
_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters")
_PARAMETER_PATTERN = re.compile(r"^(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class ParsedDocstring(NamedTuple):
    """The description in a docstring, and the descriptions of the parameters by name."""

    description: str
    parameters: dict[str, str]


def parse_docstring(text: str | None) -> ParsedDocstring:
    """Return the text before the first section and the items of the `Args:` section; ignore other sections."""
    description_lines: list[str] = []
    items: list[tuple[str, list[str]]] = []  # the lines of each parameter
    section, base_indent = "", 0
    for line in inspect.cleandoc(text or "").splitlines():
        if header := _SECTION_PATTERN.match(line):
            section, base_indent = header[1], 0
        elif not section:
            description_lines.append(line)
        elif section in _ARGUMENT_SECTIONS and line.strip():
            indent = len(line) - len(line.lstrip())
            base_indent = base_indent or indent
            if indent == base_indent and (match := _PARAMETER_PATTERN.match(line.strip())):
                items.append((match[1], [match[2]]))
            elif items:
                items[-1][1].append(line.strip())
    parameters = {name: " ".join(filter(None, lines)) for name, lines in items}
    return ParsedDocstring("\n".join(description_lines).strip(), parameters)


ToolContent = str | tuple[TextPart | MediaPart, ...]

MAX_ERROR_CHARS = 1000  # of an error message for the model


class ErrorText(str):
    """The result of a call that failed, with the prefix by which the model recognizes it."""

    __slots__ = ()

    def __new__(cls, message: str) -> "ErrorText":
        """Add the prefix to a message."""
        return super().__new__(cls, f"{ERROR_PREFIX}{message}")


class ToolArgumentsInvalid(Exception):
    """The arguments of a call do not match the tool's schema; the message is shown to the model."""


class Tool(ABC):
    """A function that a model may call by `name`. `schema` describes it to the model, in OpenAI's format."""

    injected_parameters: frozenset[str] = frozenset()  # the fields of the context that the tool receives

    def __init__(self, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self.name = name
        function = {"name": name, "description": description, "parameters": dict(parameters)}
        self.schema: dict[str, Any] = {"type": "function", "function": function}

    @staticmethod
    def wrap(tool: "Tool | Callable[..., Any]") -> "Tool":
        """Return a function or method as a tool. Raises ConfigInvalid if its signature has no JSON schema."""
        return tool if isinstance(tool, Tool) else FunctionTool(tool)

    async def call(self, context: RolloutContext, arguments: Mapping[str, Any] | str) -> ToolContent:
        """Run the tool and return its result. Errors are returned as an ErrorText."""
        try:
            return await self.execute(context, _parse_arguments(arguments))
        except (SandboxError, EnvironmentFault, AgentFailed):
            raise
        except ToolArgumentsInvalid as error:
            return ErrorText(_truncate(f"{self.name}: {error}"))
        except asyncio.CancelledError:
            if is_current_task_cancelled():
                raise
            return ErrorText("CancelledError: what the tool waited for was cancelled")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a tool is shown to the model
            return ErrorText(_truncate(f"{type(error).__name__}: {error}".removesuffix(": ")))

    @abstractmethod
    async def execute(self, context: RolloutContext, arguments: dict[str, Any]) -> ToolContent:
        """Run the tool and return its result. Raises ToolArgumentsInvalid, and whatever the tool's code raises."""


class FunctionTool(Tool):
    """A function or method as a tool. Parameters named like a field of `RolloutContext` are injected and hidden from
    the model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        unbound = getattr(function, "__func__", function)
        self._function = function
        self._signature = signature = _inspect_tool(unbound, unbound is not function)
        self.injected_parameters = signature.injected
        super().__init__(unbound.__name__, signature.description, signature.schema)

    async def execute(self, context: RolloutContext, arguments: dict[str, Any]) -> ToolContent:
        """Call the function with the validated arguments and the fields of the context that it names."""
        signature = self._signature
        kwargs = {name: getattr(context, name) for name in signature.injected} | signature.validate_arguments(arguments)
        if signature.is_async:
            result = await self._function(**kwargs)
        else:
            result = await run_in_hook_thread(self._function, kwargs)
        return to_content(result, context)


class ToolWithTimeout(Tool):
    """Another tool with a time limit. The result of a call that takes longer than `timeout` seconds is an error."""

    def __init__(self, tool: Tool, timeout: float) -> None:
        self.name, self.schema, self.injected_parameters = tool.name, tool.schema, tool.injected_parameters
        self._tool, self._timeout = tool, timeout

    async def call(self, context: RolloutContext, arguments: Mapping[str, Any] | str) -> ToolContent:
        """Run the tool and return its result, or an error if that takes too long."""
        try:
            async with fail_after(self._timeout, f"the tool {self.name!r}"):
                return await self._tool.call(context, arguments)
        except DeadlineExceeded as error:
            return ErrorText(f"{error.name}: {error.message}")

    async def execute(self, context: RolloutContext, arguments: dict[str, Any]) -> ToolContent:
        """Run the tool without a time limit."""
        return await self._tool.execute(context, arguments)


class ToolSet:
    """The tools of one rollout, some of them as functions; `schemas` are in the same order. Names must be unique."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = ()) -> None:
        self.tools: tuple[Tool, ...] = tuple(map(Tool.wrap, tools))
        self.schemas: tuple[dict[str, Any], ...] = tuple(tool.schema for tool in self.tools)
        self._by_name = {tool.name: tool for tool in self.tools}
        if len(self._by_name) < len(self.tools):
            duplicates = find_duplicates(tool.name for tool in self.tools)
            raise ConfigInvalid(
                f"tools: two have the name {', '.join(map(repr, duplicates))}; names of tools must be unique"
            )

    async def call(self, call: ToolCall, context: RolloutContext) -> Message:
        """Run a tool call of the model and return the tool message with the result."""
        return (await self.run(call, context)).message

    async def run(self, call: ToolCall, context: RolloutContext) -> ToolResult:
        """Run a tool call of the model and return the tool message, and whether the call failed."""
        content = await self._dispatch(call, context)
        is_error = isinstance(content, ErrorText)
        if isinstance(content, str):  # a file name may contain undecodable bytes
            content = content.encode("utf-8", "replace").decode()
        return ToolResult(Message(role="tool", content=content, tool_call_id=call.id), is_error)

    async def _dispatch(self, call: ToolCall, context: RolloutContext) -> ToolContent:
        tool = self._by_name.get(call.name)
        if tool is not None:
            return await tool.call(context, call.arguments)
        if not self.tools:
            return ErrorText(f"there is no tool {call.name!r}; there are no tools at all")
        similar = find_similar(call.name, self._by_name)
        hint = f" did you mean {similar}?" if similar else ""
        return ErrorText(f"there is no tool {call.name!r};{hint} the tools are {', '.join(self._by_name)}")

    def __len__(self) -> int:
        return len(self.tools)


def to_content(result: Any, context: RolloutContext) -> ToolContent:
    """Convert a tool's result to message content: text unchanged, images by hash, anything else as JSON text.

    Images are `Media` or parts `image_url` with a data URL. Raises EnvironmentFault for an image in another form, and
    ImageInvalid for a bad image.
    """
    if isinstance(result, str):
        return result
    if result is None:
        return ""
    items: Iterable[Any] = result if is_list(result) or is_tuple(result) else (result,)
    if not any(map(_is_part, items)):
        return _to_json(result)
    parser = MessageParser(read_url=read_data_url)  # no files: a tool may return what the model wrote
    try:
        content = parser.parse_parts([item if _is_part(item) or _is_text(item) else _to_json(item) for item in items])
    except RequestInvalid as error:
        raise EnvironmentFault(f"the result of a tool cannot be read: {error.message}") from error
    for image in parser.media.values():
        context.trace.add_media(image)
    return content


def _is_part(item: Any) -> bool:
    """Return whether an item of a result is a part of a content and not data."""
    if is_dict(item):
        return item.get("type") in ("image_url", "input_image") and "image_url" in item
    _refuse_image_object(item)
    return isinstance(item, TextPart | MediaPart | Media)


def _is_text(item: Any) -> bool:
    return isinstance(item, str) or (is_dict(item) and item.get("type") == "text" and "text" in item)


def _to_json(value: Any) -> str:
    objects: list[Any] = []  # values that pydantic cannot serialize

    def format_object(item: Any) -> str:
        objects.append(item)
        return str(item)

    try:
        text = to_json(value, fallback=format_object).decode()
    except PydanticSerializationError:  # bytes that are not UTF-8
        _refuse_nested_images(value)
        raise
    for item in objects:
        _refuse_image_object(item)  # pydantic would hide what its fallback raises
    return text


def _refuse_nested_images(value: Any) -> None:
    """Raise EnvironmentFault for an image anywhere in a value of dicts and lists."""
    if is_dict(value):
        for item in value.values():
            _refuse_nested_images(item)
    elif is_list(value) or is_tuple(value):
        for item in value:
            _refuse_nested_images(item)
    else:
        _refuse_image_object(value)


def _refuse_image_object(value: Any) -> None:
    """Raise EnvironmentFault for an image of Pillow and for the bytes of an image."""
    is_image = isinstance(value, bytes | bytearray) and detect_format(bytes(value)) != "unknown"
    if is_image or type(value).__module__.startswith("PIL."):
        raise EnvironmentFault(f"the result of a tool has a {type(value).__qualname__} with an image; {MEDIA_ADVICE}")


@dataclass(frozen=True, slots=True)
class _ToolSignature:
    """The inspected signature of a tool's function."""

    description: str
    schema: dict[str, Any]
    model: type[BaseModel]
    parameter_by_field: dict[str, str]  # parameter of the function by field of the model
    injected: frozenset[str]
    is_async: bool

    def validate_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the validated arguments by parameter name, without the omitted ones, which keep their defaults."""
        try:
            validated = self.model.model_validate(arguments)
        except ValidationError as error:
            problems = [self._describe_error(dict(error_details)) for error_details in error.errors()]
            raise ToolArgumentsInvalid("; ".join(problems)) from None
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
    """Build the schema of a function. Model fields get generated names, because pydantic does not allow fields called
    `schema` or `_x`."""
    docstring = parse_docstring(function.__doc__)
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ConfigInvalid(f"tool {function.__name__}: an annotation cannot be resolved: {error}") from error
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
                f"tool {function.__name__}: parameter {parameter} cannot be passed by name, as models pass arguments"
            )
        if name not in hints:
            raise ConfigInvalid(f"tool {function.__name__}: parameter {name!r} needs a type annotation for the schema")
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
    """Return the schema without the titles that pydantic generates; a property named `title` is kept."""
    if is_list(schema):
        return [_strip_titles(item) for item in schema]
    if not is_dict(schema):
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
        decoded: Any = msgspec.json.decode(arguments) if arguments.strip() else {}
    except msgspec.DecodeError as error:
        raise ToolArgumentsInvalid(f"the arguments are not JSON: {error}") from None
    if not is_dict(decoded):
        raise ToolArgumentsInvalid(f"the arguments must be a JSON object, found {arguments:.80}")
    return decoded


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."
