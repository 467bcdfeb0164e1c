"""A coding task of two steps: repair a function, run its check. A reviewer may ask for two things more."""

from collections.abc import Iterator

import ramify as rf

PROMPT = "The function add in calc.py is wrong. Repair it with one shell command, then run python3 check.py."
REQUESTS = ("Run the check once more.", "Now say in one sentence what was wrong.")


class CodingTask(rf.Taskset):
    """Repair `add` in calc.py."""

    def load(self) -> Iterator[rf.Task]:
        """Yield two tasks."""
        for number in range(2):
            yield rf.Task(prompt=PROMPT, key=f"add-{number}", requires=("isolation",))

    async def setup(self, runtime: rf.Runtime) -> None:
        """Write the wrong function and its check."""
        await runtime.write("calc.py", "def add(a, b):\n    return a - b\n")
        await runtime.write("check.py", "from calc import add\nassert add(2, 3) == 5\nprint('ok')\n")

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
