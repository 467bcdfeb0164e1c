"""What the replies of a trace say: all of them in order, and a final answer in a box."""

import re
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec

import ramify as rf
from ramify.trace import Branch

BOXED_PREFIX = "\\boxed{"
MAX_ANSWER_CHARS = 200  # characters of an answer that symbolic algebra may work on

_SPACING = re.compile(r"\\[,;:! ]|\\left|\\right|\\displaystyle|[\s$]|\\\$")
_UNIT = re.compile(r"\\(?:text|mbox|mathrm)\{[^{}]*\}|\\?%|\^\{?\\circ\}?|\.$")
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_NUMBER = re.compile(r"[+-]?(?:\d+/\d+|\d+\.?\d*|\.\d+)")  # no exponents: 1e999999999 would be computed


def get_replies(trace: "rf.Trace") -> list[str]:
    """The text of every reply, in the order in which they came.

    On the path to the newest node each stands once: where a template rewrites history, a trace holds a reply again.
    """
    messages = Branch(trace, len(trace.nodes) - 1).messages if len(trace.nodes) else []
    return [message.text for message in messages if message.role == "assistant"]


def extract_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` holds, braces inside it balanced; None if there is none, or it never closes."""
    start = text.rfind(BOXED_PREFIX)
    depth = 0
    for index in range(start + len(BOXED_PREFIX) - 1, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len(BOXED_PREFIX) : index].strip()
    return None


def is_same_value(answer: str, expected: str) -> bool:
    """Whether two answers mean the same: as numbers, else as text; by `math_verify` too where it is installed."""
    first, second = _strip_formatting(answer), _strip_formatting(expected)
    if first == second:
        return bool(first)
    left, right = parse_number(first), parse_number(second)
    if left is not None and right is not None:
        return left == right
    return _math_verify_agrees(answer, expected)


def parse_number(text: str) -> Fraction | None:
    """The rational number that is written here: 1,200 or 3/4 or 0.75 or \\frac{3}{4}."""
    plain = _FRACTION.sub(r"\1\2/\3", _GROUPED.sub("", _strip_formatting(text)))
    if len(plain) > MAX_ANSWER_CHARS or not _NUMBER.fullmatch(plain):
        return None
    try:
        return Fraction(plain)
    except ZeroDivisionError:
        return None


def _strip_formatting(text: str) -> str:
    """Without what does not change a value: spaces, dollar signs, a unit, a final dot."""
    return _UNIT.sub("", _SPACING.sub("", text))


def _math_verify_agrees(answer: str, expected: str) -> bool:
    if find_spec("math_verify") is None or max(len(answer), len(expected)) > MAX_ANSWER_CHARS:
        return False
    library = import_module("math_verify")
    # Its own time limits use signals, which only the main thread may; the scoring deadline of the rollout holds.
    sides = (library.parse(f"\\boxed{{{side}}}", parsing_timeout=None) for side in (expected, answer))
    return bool(library.verify(*sides, timeout_seconds=None))
