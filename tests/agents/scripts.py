"""What the model says to each program, so that it solves the task in two steps.

The first reply makes two calls at once: one looks at the file, the other repairs it, or one time in two breaks it in
another way, so that the rollouts of a group differ in their rewards. The second reply runs the check and calls two
tools of the taskset, the third one ends the turn. If a reviewer answers, the check is run once more, with another note,
and then the reason is said.
"""

import json
from typing import Any

from tests.agents.coding_task import REQUESTS

LOOK = "wc -l check.py"
RIGHT = r"printf 'def add(a, b):\n    return a + b\n' > calc.py"
WRONG = r"printf 'def add(a, b):\n    return a * b\n' > calc.py"
CHECK = "python3 check.py"
NO_TOOLS_REPLY = "A title"  # to a call without tools, such as one that asks for a title
TURN_REPLIES = ("I repaired `add` in calc.py, and ran the check.", "I ran the check again.", "It had a wrong operator.")
NOTES = ("I repaired it.", "I ran it again.")
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # what ends a turn of mini-swe-agent


def call_tool(name: str, **arguments: Any) -> str:
    """Return a tool call as models of the Qwen family write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reply_to(program: str, prompt: str, seed: int) -> str:
    """Return the reply to a prompt of a program: by the replies and requests in it and, for the first, by the seed."""
    call, num_replies = CALLS[program], prompt.count("<|im_start|>assistant") - 1
    if "</tools>" not in prompt:
        return NO_TOOLS_REPLY
    if num_replies == 0:
        return f"I repair the function.\n{call(LOOK)}\n{call((RIGHT, WRONG)[seed % 2])}"
    if num_replies in (1, 3):
        notes = call_taskset(program, "note", text=NOTES[num_replies // 2])
        diagram = call_taskset(program, "diagram") if num_replies == 1 else ""
        return f"Now the check.\n{call(CHECK)}\n{notes}\n{diagram}".strip()
    if program == "mini-swe-agent":
        return call(SUBMIT)
    return TURN_REPLIES[sum(request in prompt for request in REQUESTS)]


def call_taskset(program: str, tool: str, **arguments: Any) -> str:
    """Return the call of a tool of the taskset, which some programs make in the shell."""
    if program in TOOL_PREFIXES:
        return call_tool(TOOL_PREFIXES[program] + tool, **arguments)
    return CALLS[program](f"python3 ~/tools.py {tool} '{json.dumps(arguments)}'")


TOOL_PREFIXES = {"codex": "mcp__taskset__", "claude-code": "mcp__taskset__", "opencode": "taskset_"}
CALLS = {
    "codex": lambda command: call_tool("exec_command", cmd=command),
    "claude-code": lambda command: call_tool("Bash", command=command, description="Run a command"),
    "opencode": lambda command: call_tool("bash", command=command, description="Run a command"),
    "pi": lambda command: call_tool("bash", command=command),
    "mini-swe-agent": lambda command: call_tool("bash", command=command),
}
