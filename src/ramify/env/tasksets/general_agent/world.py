"""A small world: a typed database, the tools that act on it, and the goals that can be set in it.

A tool validates its arguments before it changes anything, and raises `ActionRefused` with the reason, which the model
reads as text. Rows that tools create are keyed by what they join (room and night, member and book), never by a counter,
so the same actions produce the same database in any order.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from ramify.env.tasksets.splits import load_names

T = TypeVar("T")


class ActionRefused(Exception):
    """A tool refuses a call; the message is for the model."""


class Person(BaseModel):
    """A row of a table of people about whom only the name is known."""

    name: str


class WorldCall(BaseModel):
    """A call of a tool."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorldGoal:
    """A goal as text, and the calls that reach it."""

    text: str
    calls: tuple[WorldCall, ...]


class World(BaseModel):
    """A database: each field is a table of rows by key."""

    tool_names: ClassVar[tuple[str, ...]] = ()
    """The methods that an agent may call, in the order in which they are offered."""
    goal_makers: ClassVar[Sequence[Callable[[Any, random.Random], WorldGoal | None]]] = ()
    """Methods that draw a goal, or return None if the world allows no such goal. Their order determines the tasks."""

    @classmethod
    def generate(cls, rng: random.Random, size: int) -> "World":
        """Generate a world whose tables have about `size` rows."""
        raise NotImplementedError

    def tools(self) -> list[Callable[..., Any]]:
        """Return the methods that an agent may call."""
        return [getattr(self, name) for name in self.tool_names]

    def apply_calls(self, calls: Sequence[WorldCall]) -> None:
        """Apply the calls in order."""
        tools_by_name = {tool.__name__: tool for tool in self.tools()}
        for call in calls:
            tools_by_name[call.tool](**call.arguments)


def make_goal(text: str, *calls: WorldCall) -> WorldGoal:
    """Return a goal with the calls that reach it."""
    return WorldGoal(text, calls)


def make_call(tool: str, **arguments: Any) -> WorldCall:
    """Return a call of `tool` with keyword arguments."""
    return WorldCall(tool=tool, arguments=arguments)


def draw_people(rng: random.Random, count: int) -> list[str]:
    """Draw distinct full names."""
    first_names, last_names = load_names()
    return [f"{first} {last}" for first, last in zip(rng.sample(first_names, count), rng.sample(last_names, count))]


def get_row(table: dict[str, T], key: str, row_kind: str) -> T:
    """Return the row of a table; raise ActionRefused if there is none."""
    if key not in table:
        raise ActionRefused(f"there is no {row_kind} {key!r}")
    return table[key]


def find_by_name(table: dict[str, Any], name: str, row_kind: str) -> str:
    """Return the key of the row with this name, ignoring case; raise ActionRefused if there is none."""
    for key, row in table.items():
        if row.name.casefold() == name.strip().casefold():
            return key
    raise ActionRefused(f"there is no {row_kind} called {name!r}")
