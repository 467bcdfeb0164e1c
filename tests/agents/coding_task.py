"""A coding task of two steps: repair a function, run its check."""

from collections.abc import Iterator

import ramify as rf

PROMPT = "The function add in calc.py is wrong. Repair it with one shell command, then run python3 check.py."


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
