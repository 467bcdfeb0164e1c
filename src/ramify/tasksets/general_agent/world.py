"""A small world: a typed database, the tools that act on it, and the goals that can be set in it.

A tool checks what it is asked and raises `Refused` with the reason, before it changes anything; the model reads it as
text. Rows that tools create are keyed by what they join (room and night, member and book), never by a counter, so the
same deeds leave the same database in whatever order they were done.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from ramify.tasksets.person_names import load_names

T = TypeVar("T")


class ActionRefused(Exception):
    """A tool cannot do what it was asked; the message is for the model."""


class WorldCall(BaseModel):
    """A tool and what it is called with."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorldGoal:
    """What is wanted, in words, and calls that bring it about."""

    text: str
    calls: tuple[WorldCall, ...]


class World(BaseModel):
    """A database: each field a table of rows by their key."""

    goals: ClassVar[Sequence[Callable[[Any, random.Random], WorldGoal | None]]] = ()
    """Makers of goals; one that finds nothing to ask for in a world returns None."""

    @classmethod
    def generate(cls, rng: random.Random, size: int) -> "World":
        """A world whose tables have about `size` rows."""
        raise NotImplementedError

    def tools(self) -> list[Callable[..., Any]]:
        """The methods that an agent may call."""
        raise NotImplementedError

    def apply_calls(self, calls: Sequence[WorldCall]) -> None:
        """Carry out some calls."""
        tools_by_name = {tool.__name__: tool for tool in self.tools()}
        for call in calls:
            tools_by_name[call.tool](**call.arguments)


def make_call(tool: str, **arguments: Any) -> WorldCall:
    return WorldCall(tool=tool, arguments=arguments)


def draw_people(rng: random.Random, count: int) -> list[str]:
    """Different full names."""
    first, last = load_names()
    return [f"{one} {other}" for one, other in zip(rng.sample(first, count), rng.sample(last, count))]


def get_row(table: dict[str, T], key: str, row_kind: str) -> T:
    """The row of a table, or the reason why there is none."""
    if key not in table:
        raise ActionRefused(f"there is no {row_kind} {key!r}")
    return table[key]


def find_by_name(table: dict[str, Any], name: str, row_kind: str) -> str:
    """The key of the row with this name, in any letters of case."""
    for key, found in table.items():
        if found.name.casefold() == name.strip().casefold():
            return key
    raise ActionRefused(f"there is no {row_kind} called {name!r}")
