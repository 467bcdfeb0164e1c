"""The replies of a trace, gold replies with tool calls, and the comparison of final answers in \\boxed{}."""

import json
import re
from collections.abc import Iterable
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import ramify as rf
from ramify.env.tasksets.math_checker import get_math_checker

BOXED_PREFIX = "\\boxed{"
MAX_ANSWER_CHARS = 200  # longer answers are not parsed as numbers or by math_verify

_SPACING = re.compile(r"\\[,;:! ]|\\left|\\right|\\displaystyle|[\s$]|\\\$")
_UNIT = re.compile(r"\\(?:text|mbox|mathrm)\{[^{}]*\}|\\?%|\^\{?\\circ\}?|\.$")
_GROUPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_NUMBER = re.compile(r"[+-]?(?:\d+/\d+|\d+\.?\d*|\.\d+)")  # no exponents: 1e999999999 would be computed


def get_replies(trace: rf.Trace) -> list[str]:
    """Return the text of every reply, in order.

    Only the path to the newest node is read: a trace holds a reply twice if the chat template rewrites history.
    """
    messages = rf.Branch(trace, len(trace.nodes) - 1).messages if len(trace.nodes) else []
    return [message.text for message in messages if message.role == "assistant"]


def build_tool_call_replies(calls: Iterable[tuple[str, dict[str, Any]]]) -> list[rf.Message]:
    """Return one gold reply for each call, given as (tool, arguments)."""
    return [
        rf.Message("assistant", tool_calls=(rf.ToolCall(f"gold{number}", name, json.dumps(arguments)),))
        for number, (name, arguments) in enumerate(calls)
    ]


def extract_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, up to the matching brace; None without a closed one."""
    start = text.rfind(BOXED_PREFIX)
    depth = 0
    for index in range(start + len(BOXED_PREFIX) - 1, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len(BOXED_PREFIX) : index].strip()
    return None


def is_same_value(answer: str, expected: str) -> bool:
    """Return whether two answers are equal as text, as numbers, or by `math_verify` if it is installed."""
    first, second = _strip_formatting(answer), _strip_formatting(expected)
    if first == second:
        return bool(first)
    number, expected_number = parse_number(first), parse_number(second)
    if number is not None and expected_number is not None:
        return number == expected_number
    return _math_verify_agrees(answer, expected)


def parse_number(text: str) -> Fraction | None:
    """Parse a rational number such as 1,200 or 3/4 or 0.75 or \\frac{3}{4}; return None if the text is none."""
    plain = _FRACTION.sub(r"\1\2/\3", _GROUPED.sub("", _strip_formatting(text)))
    if len(plain) > MAX_ANSWER_CHARS or not _NUMBER.fullmatch(plain):
        return None
    try:
        return Fraction(plain)
    except ZeroDivisionError:
        return None


def _strip_formatting(text: str) -> str:
    """Remove what does not change a value: spaces, dollar signs, a unit, a final dot."""
    return _UNIT.sub("", _SPACING.sub("", text))


def _math_verify_agrees(answer: str, expected: str) -> bool:
    if find_spec("math_verify") is None or max(len(answer), len(expected)) > MAX_ANSWER_CHARS:
        return False
    return get_math_checker().compare(expected, f"\\boxed{{{answer}}}") or False
