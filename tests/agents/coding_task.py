"""A coding task of two steps: repair a function, run its check. A reviewer may ask for two things more.

The taskset has two tools, which the programs call over MCP: one with state, and one that returns an image.
"""

import base64
from collections.abc import Iterator
from types import SimpleNamespace

import ramify as rf
from ramify.trace import Media

PROMPT = "The function add in calc.py is wrong. Repair it with one shell command, then run python3 check.py."
REQUESTS = ("Run the check once more.", "Now say in one sentence what was wrong.")
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
DIAGRAM = Media.from_bytes(base64.b64decode(PIXEL), "image/png")


class CodingTask(rf.Taskset):
    """Repair `add` in calc.py."""

    def load(self) -> Iterator[rf.Task]:
        """Yield two tasks."""
        for number in range(2):
            yield rf.Task(prompt=PROMPT, key=f"add-{number}", requires=("isolation",))

    async def setup(self, runtime: rf.Runtime, state: SimpleNamespace) -> None:
        """Write the wrong function and its check."""
        state.num_notes = 0
        await runtime.write("calc.py", "def add(a, b):\n    return a - b\n")
        await runtime.write("check.py", "from calc import add\nassert add(2, 3) == 5\nprint('ok')\n")

    @rf.tool
    def note(self, text: str, state: SimpleNamespace) -> str:
        """Write a note for the reviewer.

        Args:
            text: The note.
        """
        state.num_notes += 1
        return f"note {state.num_notes}: {text}"

    @rf.tool
    def diagram(self) -> list[str | Media]:
        """Show the diagram of the module."""
        return ["the diagram of calc.py", DIAGRAM]

    @rf.reward
    async def passes(self, runtime: rf.Runtime) -> float:
        """Whether the check passes."""
        result = await runtime.run(["python3", "check.py"], timeout=30)
        return float(result.text == "ok\n")


class Reviewer(rf.User):
    """Makes two requests after the first reply, and notes the replies it gets."""

    def respond(self, reply: str, turn: int, trace: rf.Trace) -> str | None:
        """Return the next request."""
        trace.info["replies_to_user"] = [*trace.info.get("replies_to_user", []), reply]
        return REQUESTS[turn - 1] if turn <= len(REQUESTS) else None


class ReviewedTask(CodingTask):
    """Repair `add` in calc.py, and do what a reviewer asks for."""

    def user(self) -> rf.User:
        """Return a reviewer."""
        return Reviewer()
