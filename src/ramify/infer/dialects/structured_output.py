"""What a request requires of the reply: JSON (`response_format`) or tool calls (`tool_choice`), in every dialect.

| dialect | JSON | calls |
|---|---|---|
| Chat Completions | `response_format` | `tool_choice`: required, or a function |
| Responses | `text.format` | the same; a function is named without nesting |
| Messages | `output_format`, or `output_config.format` | `tool_choice`: any, tool |
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.core.config.schema import is_dict
from ramify.core.errors import RequestInvalid
from ramify.model.render import ReplyConstraint, ToolSchema

ANY_OBJECT = {"type": "object"}
REQUIRED_CHOICES = ("required", "any")
NAMED_CHOICES = ("function", "tool", "custom")
TOOL_CHOICES = "auto, none, required, or a tool by its name"


def parse_constraint(
    body: Mapping[str, Any], tools: Sequence[ToolSchema], *, response_format: Any, format_field: str
) -> ReplyConstraint | None:
    """Return what a body requires of the reply; None if every reply is allowed.

    `tools` are the parsed tools of the body, and `format_field` is the dialect's name for `response_format`. Raises
    RequestInvalid.
    """
    choice = body.get("tool_choice")
    tool_names = [tool["function"]["name"] for tool in tools]
    requires_call, called_name = _parse_tool_choice(choice)
    if called_name is not None:
        if called_name not in tool_names:
            offered = ", ".join(tool_names) or "none"
            raise RequestInvalid(f"tool_choice: no tool is named {called_name!r}; the request offers: {offered}")
        return ReplyConstraint(tool_names=(called_name,), allows_parallel_calls=False)
    disables_parallel = is_dict(choice) and choice.get("disable_parallel_tool_use") is True
    is_parallel = not (disables_parallel or body.get("parallel_tool_calls") is False)
    if requires_call:
        if not tools:
            raise RequestInvalid("tool_choice: a call is required, but the request offers no tools")
        return ReplyConstraint(tool_names=tuple(tool_names), allows_parallel_calls=is_parallel)
    schema, is_strict = parse_response_format(response_format, format_field)
    if schema is None:
        return None
    return ReplyConstraint(schema, is_strict, tuple(tool_names), is_parallel)


def forbids_calls(tool_choice: Any) -> bool:
    """Return whether a `tool_choice` is `none`: no tool is offered, and the text of a call is content."""
    return (tool_choice.get("type") if is_dict(tool_choice) else tool_choice) == "none"


def parse_response_format(response_format: Any, field: str) -> tuple[Mapping[str, Any] | None, bool]:
    """Return the schema of a `response_format`, None for text, and whether it is strict. Raises RequestInvalid."""
    format_type = response_format.get("type") if is_dict(response_format) else response_format
    if format_type in (None, "text"):
        return None, False
    if format_type == "json_object":
        return ANY_OBJECT, False
    if format_type != "json_schema" or not is_dict(response_format):
        raise RequestInvalid(f"{field}.type: expected text, json_object or json_schema, got {format_type!r:.80}")
    nested = response_format.get("json_schema", response_format)  # only Chat Completions nests it
    schema: Any = nested.get("schema") if is_dict(nested) else None
    if not is_dict(nested) or not is_dict(schema):
        raise RequestInvalid(f"{field}: expected a JSON schema, an object in the field `schema`")
    return schema, nested.get("strict") is True


def format_constraint(constraint: ReplyConstraint) -> dict[str, Any]:
    """Return a constraint as fields of Chat Completions."""
    fields: dict[str, Any] = {}
    if not constraint.allows_parallel_calls:
        fields["parallel_tool_calls"] = False
    if constraint.json_schema is None:
        named = {"type": "function", "function": {"name": constraint.tool_names[0]}}
        return {**fields, "tool_choice": named if len(constraint.tool_names) == 1 else "required"}
    if constraint.json_schema == ANY_OBJECT:
        return {**fields, "response_format": {"type": "json_object"}}
    schema = {"name": "reply", "schema": constraint.json_schema, "strict": constraint.is_strict}
    return {**fields, "response_format": {"type": "json_schema", "json_schema": schema}}


def _parse_tool_choice(choice: Any) -> tuple[bool, str | None]:
    """Return whether a call is required, and the name of the tool if only one is allowed. Raises RequestInvalid."""
    choice_type = choice.get("type") if is_dict(choice) else choice
    if choice_type in (None, "auto", "none"):
        return False, None
    if choice_type in REQUIRED_CHOICES:
        return True, None
    name: Any = None
    if is_dict(choice) and choice_type in NAMED_CHOICES:
        nested = choice.get(choice_type)
        name = nested.get("name") if is_dict(nested) else choice.get("name")
    if not isinstance(name, str):
        raise RequestInvalid(f"tool_choice: expected {TOOL_CHOICES}, got {choice!r:.200}")
    return True, name
