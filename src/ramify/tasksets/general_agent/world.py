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

from ramify.tasksets.naming import first_and_last

T = TypeVar("T")


class Refused(Exception):
    """A tool cannot do what it was asked; the message is for the model."""


class Call(BaseModel):
    """A tool and what it is called with."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted, in words, and calls that bring it about."""

    words: str
    calls: tuple[Call, ...]


class World(BaseModel):
    """A database: each field a table of rows by their key."""

    goals: ClassVar[Sequence[Callable[[Any, random.Random], Goal | None]]] = ()
    """Makers of goals; one that finds nothing to ask for in a world returns None."""

    @classmethod
    def make(cls, rng: random.Random, size: int) -> "World":
        """A world whose tables have about `size` rows."""
        raise NotImplementedError

    def tools(self) -> list[Callable[..., Any]]:
        """The methods that an agent may call."""
        raise NotImplementedError

    def do(self, calls: Sequence[Call]) -> None:
        """Carry out some calls."""
        known = {tool.__name__: tool for tool in self.tools()}
        for call in calls:
            known[call.tool](**call.arguments)


def call(tool: str, **arguments: Any) -> Call:
    return Call(tool=tool, arguments=arguments)


def people(rng: random.Random, count: int) -> list[str]:
    """Different full names."""
    first, last = first_and_last()
    return [f"{one} {other}" for one, other in zip(rng.sample(first, count), rng.sample(last, count))]


def row(table: dict[str, T], key: str, what: str) -> T:
    """The row of a table, or the reason why there is none."""
    if key not in table:
        raise Refused(f"there is no {what} {key!r}")
    return table[key]


def named(table: dict[str, Any], name: str, what: str) -> str:
    """The key of the row with this name, in any letters of case."""
    for key, found in table.items():
        if found.name.casefold() == name.strip().casefold():
            return key
    raise Refused(f"there is no {what} called {name!r}")
