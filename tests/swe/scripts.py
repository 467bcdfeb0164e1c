"""What the model says to each agent: it looks around, changes the code, tries it, and ends.

One time in two the change is complete, otherwise one of the two nouns stays wrong.
"""

from tests.agents.scripts import call_tool

LOOK = "git log --oneline --all; grep -n tomat inflection.py"
POTATO = "s/buffal|tomat/buffal|potat|tomat/"
HUMAN = "s/^_irregular('man', 'men')$/&\\n_irregular('human', 'humans')/"
COMPLETE = f'sed -i "{POTATO}; {HUMAN}" inflection.py'
INCOMPLETE = f'sed -i "{POTATO}" inflection.py'
TRY = "python3 -c \"import inflection; print(inflection.pluralize('human'), inflection.pluralize('potato'))\""
LAST = "I changed the rules of pluralize."
NO_TOOLS_REPLY = "A title"  # to a call without tools
NUM_REPLIES = 4


def run_in_python(command: str) -> str:
    """Return a call of the tool `python` of rlm that runs a shell command."""
    code = f"import subprocess\nprint(subprocess.run({command!r}, shell=True, capture_output=True, text=True).stdout)"
    return call_tool("python", code=code)


CALLS = {
    "bash": lambda command: call_tool("bash", command=command),
    "rlm": run_in_python,
    "codex": lambda command: call_tool("exec_command", cmd=command),
}


def reply_to(harness: str, prompt: str, seed: int) -> str:
    """Return the reply to a prompt of a harness: by the number of replies in it, and by the seed."""
    if "</tools>" not in prompt:
        return NO_TOOLS_REPLY
    commands = [LOOK, (COMPLETE, INCOMPLETE)[seed % 2], TRY]
    num_replies = prompt.count("<|im_start|>assistant") - 1
    return CALLS[harness](commands[num_replies]) if num_replies < len(commands) else LAST
