"""reverse-text's reward for an interpreter without Ramify, of the standard library alone.

`rl_cpu.py` compares it with the taskset's own before anything is timed.
"""

from __future__ import annotations

import difflib
import re

TAGGED = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


def similarity(reply: str, answer: str) -> float:
    """2·matches / (length of both) of what the first pair of tags holds."""
    found = TAGGED.search(reply)
    return difflib.SequenceMatcher(None, found[1].strip() if found else "", answer).ratio()
