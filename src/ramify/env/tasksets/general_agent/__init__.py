"""general-agent: reach a goal in a small world with its tools.

A task has a database and a goal as text. It is solved if the final database equals the one that the gold calls produce,
by whatever calls the agent got there.
"""

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import Field

import ramify as rf
from ramify.env.tasksets.answers import build_tool_call_replies
from ramify.env.tasksets.general_agent.hotel import Hotel
from ramify.env.tasksets.general_agent.library import Library
from ramify.env.tasksets.general_agent.shop import Shop
from ramify.env.tasksets.general_agent.tickets import Tickets
from ramify.env.tasksets.general_agent.world import World, WorldCall, WorldGoal
from ramify.env.tasksets.splits import RangesConfig, draw_distinct

SYSTEM = "Do what is asked with the tools, in order and nothing more, then say that it is done."

Domain = Literal["shop", "hotel", "library", "tickets"]
WORLDS: dict[Domain, type[World]] = {"shop": Shop, "hotel": Hotel, "library": Library, "tickets": Tickets}


class GeneralAgentConfig(RangesConfig, rf.TasksetConfig):
    """The worlds, their size, and the number of goals."""

    num_tasks: int = Field(default=1000, ge=1)
    domains: tuple[Domain, ...] = Field(default=("shop", "hotel", "library", "tickets"), min_length=1)
    min_goals: int = Field(default=1, ge=1)
    max_goals: int = Field(default=2, ge=1, le=10)
    """Maximum number of goals of a task."""
    num_rows: int = Field(default=6, ge=4, le=14)
    """Approximate number of rows in each table of a world."""
    seed: int = 0


class WorldTask(rf.Task):
    """The initial database of a world, and the gold calls that reach the goal."""

    domain: Domain
    database: dict[str, Any]
    calls: tuple[WorldCall, ...]


class GeneralAgent(rf.Taskset):
    """Reach a goal in a small world of tables and tools."""

    config: GeneralAgentConfig
    task_type = WorldTask

    def load(self) -> Iterator[WorldTask]:
        """Draw `num_tasks` distinct tasks of the split."""
        config = self.config
        too_few_message = "general-agent: num_tasks is {count}, but only {found} were found; allow more goals or rows"
        return draw_distinct(
            _draw_tasks(config), config.split, config.num_tasks, lambda task: str(task.prompt), too_few_message
        )

    def tools(self, task: WorldTask, state: SimpleNamespace) -> list[Callable[..., Any]]:
        """Return the tools of a new world, which belongs to this rollout only."""
        state.world = build_initial_world(task)
        return state.world.tools()

    def finalize(self, trace: rf.Trace, state: SimpleNamespace) -> None:
        """Store the final database in the trace, where the rewards read it."""
        trace.info["database"] = state.world.model_dump(mode="json")

    @rf.reward
    def reached(self, task: WorldTask, trace: rf.Trace) -> float:
        """1 if the final database is the one that the gold calls produce, else 0."""
        return float(trace.info["database"] == build_goal_world(task).model_dump(mode="json"))

    def gold(self, task: WorldTask) -> list[rf.Message]:
        """Return the tool calls that reach the goals, and a last reply."""
        return [
            *build_tool_call_replies((call.tool, call.arguments) for call in task.calls),
            rf.Message("assistant", "Done."),
        ]


def build_initial_world(task: WorldTask) -> World:
    """Return the world in its initial state."""
    return WORLDS[task.domain].model_validate(task.database)


def build_goal_world(task: WorldTask) -> World:
    """Return the world after the gold calls."""
    world = build_initial_world(task)
    world.apply_calls(task.calls)
    return world


def _draw_tasks(config: GeneralAgentConfig) -> Iterator[WorldTask]:
    rng = random.Random(f"general-agent {config.split} {config.seed}")
    while True:
        domain = rng.choice(config.domains)
        world = WORLDS[domain].generate(rng, config.num_rows)
        database = world.model_dump(mode="json")
        goals = [_draw_goal(rng, world) for _ in range(rng.randint(config.min_goals, config.max_goals))]
        texts = [goal.text for goal in goals]
        prompt = texts[0] if len(texts) == 1 else "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))
        if world.model_dump(mode="json") == database:
            continue  # the goals cancel each other: an agent that does nothing would reach them
        calls = tuple(call for goal in goals for call in goal.calls)
        yield WorldTask(prompt=prompt, system=SYSTEM, domain=domain, database=database, calls=calls)


def _draw_goal(rng: random.Random, world: World) -> WorldGoal:
    """Draw a goal for the current state of the world, and apply its calls to the world."""
    while True:
        goal = rng.choice(world.goal_makers)(world, rng)
        if goal is not None:
            world.apply_calls(goal.calls)
            return goal
