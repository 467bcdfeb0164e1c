"""A tool's schema comes from its annotations and docstring; errors of a call are returned as text."""

import asyncio
import json
import os
from typing import Literal

import pytest
from pydantic import BaseModel

from ramify.core.errors import ConfigInvalid, SandboxError
from ramify.env import Tool, ToolSet, tool
from ramify.trace import ToolCall
from tests.support.rollout_context import make_context, run


class Place(BaseModel):
    city: str
    zip: int | None = None


@tool
def book(
    room: str,
    nights: int = 1,
    view: Literal["sea", "yard"] = "yard",
    guests: list[str] | None = None,
    title: str | None = None,
    where: Place | None = None,
) -> str:
    """Book a room.

    It is held until noon.

    Args:
        room: the room's number,
            as on its door
        nights (int): how many nights
        guests: who will come

    Returns:
        a receipt
    """
    return f"{room} {nights} {view} {guests} {title} {where and where.city}"


def call(function, arguments, **fields):
    return run(Tool.wrap(function).call(make_context(**fields), arguments))


def test_schema_follows_annotations_and_docstring():
    schema = Tool.wrap(book).schema
    function = schema["function"]
    assert schema["type"] == "function"
    assert function["name"] == "book"
    assert function["description"] == "Book a room.\n\nIt is held until noon."
    parameters = function["parameters"]
    assert parameters["required"] == ["room"]
    assert parameters["additionalProperties"] is False
    properties = parameters["properties"]
    assert properties["room"] == {"type": "string", "description": "the room's number, as on its door"}
    assert properties["nights"] == {"type": "integer", "default": 1, "description": "how many nights"}
    assert properties["view"] == {"type": "string", "enum": ["sea", "yard"], "default": "yard"}
    assert properties["guests"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    assert list(properties) == ["room", "nights", "view", "guests", "title", "where"]
    assert parameters["$defs"]["Place"]["required"] == ["city"]
    assert "title" not in parameters["$defs"]["Place"]
    json.dumps(schema)


def test_arguments_are_converted_to_the_annotated_types():
    assert call(book, {"room": "12", "nights": "3", "where": {"city": "Rome"}}) == "12 3 yard None None Rome"
    assert call(book, '{"room": "12", "guests": ["a"]}') == "12 1 yard ['a'] None None"


@pytest.mark.parametrize(
    ("arguments", "message_part"),
    [
        ({}, "argument room is required"),
        ({"room": "1", "nights": "many"}, "argument nights:"),
        ({"room": "1", "view": "street"}, "'sea' or 'yard'"),
        ({"room": "1", "beds": 2}, "there is no argument beds; there is room, nights, view, guests, title, where"),
        ({"room": "1", "where": {}}, "argument where.city is required"),
        ('{"room": ', "not JSON"),
        ('["1"]', "must be a JSON object"),
    ],
)
def test_invalid_arguments_are_answered_with_the_name_of_the_argument(arguments, message_part):
    answer = call(book, arguments)
    assert answer.startswith("error: book: ")
    assert message_part in answer


def test_exception_becomes_text():
    def divide(a: int, b: int) -> float:
        return a / b

    assert call(divide, {"a": 1, "b": 0}) == "error: ZeroDivisionError: division by zero"


def test_cancellation_inside_a_tool_becomes_text():
    async def search() -> str:
        lookup = asyncio.ensure_future(asyncio.sleep(60))
        lookup.cancel()
        await lookup
        return "found"

    assert call(search, {}).startswith("error: CancelledError")


def test_sandbox_error_is_raised():
    async def compile(path: str) -> str:
        raise SandboxError("the sandbox is gone")

    with pytest.raises(SandboxError):
        call(compile, {"path": "x"})


async def test_cancelling_a_call_cancels_the_tool():
    async def forever() -> str:
        await asyncio.get_running_loop().create_future()
        return ""

    task = asyncio.create_task(Tool.wrap(forever).call(make_context(), {}))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_context_fields_are_injected_and_hidden_from_the_model():
    async def remember(word: str, state, task) -> str:
        state.word = word
        return task.prompt

    context = make_context()
    assert list(Tool.wrap(remember).schema["function"]["parameters"]["properties"]) == ["word"]
    assert await Tool.wrap(remember).call(context, {"word": "x"}) == "question"
    assert context.state.word == "x"


def test_results_become_text():
    def give(what: str):
        return {"none": None, "table": {"ä": [1, Place(city="Rome")]}, "number": 3}[what]

    assert call(give, {"what": "none"}) == ""
    assert call(give, {"what": "number"}) == "3"
    assert json.loads(call(give, {"what": "table"})) == {"ä": [1, {"city": "Rome", "zip": None}]}


def test_any_python_parameter_name_is_allowed():
    def odd(schema: int, model_config: int, _x: int = 0) -> int:
        return schema + model_config + _x

    assert call(odd, {"schema": 1, "model_config": 2, "_x": 3}) == "6"


def test_tool_without_a_schema_is_refused():
    def untyped(a):
        return a

    def open_ended(*names: str):
        return names

    def unknown(a: "Nowhere"):  # noqa: F821
        return a

    def unschemable(a: asyncio.Future):
        return a

    for function, message_part in [
        (untyped, "'a' needs a type annotation"),
        (open_ended, r"\*names"),
        (unknown, "Nowhere"),
    ]:
        with pytest.raises(ConfigInvalid, match=message_part):
            Tool.wrap(function)
    with pytest.raises(ConfigInvalid, match="tool unschemable"):
        Tool.wrap(unschemable)


async def test_toolset_dispatches_calls_by_name():
    def add(a: int, b: int) -> int:
        return a + b

    tools = ToolSet([add, book])
    assert [schema["function"]["name"] for schema in tools.schemas] == ["add", "book"]
    message = await tools.call(ToolCall("c1", "add", '{"a": 1, "b": 2}'), make_context())
    assert (message.role, message.content, message.tool_call_id) == ("tool", "3", "c1")
    message = await tools.call(ToolCall("c2", "bok", "{}"), make_context())
    assert message.content == "error: there is no tool 'bok'; did you mean book? the tools are add, book"


async def test_undecodable_bytes_are_replaced_by_question_marks():
    def names() -> str:
        return os.fsdecode(b"a\xff.txt")

    message = await ToolSet([names]).call(ToolCall("c1", "names", "{}"), make_context())
    assert message.content == "a?.txt"


def test_two_tools_with_the_same_name_are_refused():
    with pytest.raises(ConfigInvalid, match="'book'"):
        ToolSet([book, book])
