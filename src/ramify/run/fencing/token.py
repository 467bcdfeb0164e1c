"""The fencing token: which copy of a process acts.

A token is the term of the head and the incarnation of the role under that head. Tokens of one role are totally
ordered, and every replacement has a higher one. Versions of weights, tables and messages have one integer for the
incarnation; `number` packs the token into it such that the order is kept and term 0 looks as if there were no terms.
"""

import re
from dataclasses import dataclass
from typing import Self

from ramify.core.errors import ProcessReplaced

INCARNATION_BITS = 16
MAX_INCARNATION = (1 << INCARNATION_BITS) - 1
MAX_TERM = (1 << 31 - INCARNATION_BITS) - 1  # traces store the number in 32 bits with a sign
GANG_TOKEN_VARIABLE = "RAMIFY_GANG_TOKEN"  # set by a cluster launcher: the token of this start of the process or gang
TOKEN_PATTERN = r"(?:\d+\.)?\d+"  # what `str` returns, for patterns of file names


@dataclass(frozen=True, slots=True, order=True)
class FencingToken:
    """The term of the head, and the incarnation of the role under that head. `str` gives "3", or "1.3" in term 1."""

    term: int = 0
    incarnation: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.term <= MAX_TERM and 0 <= self.incarnation <= MAX_INCARNATION):
            limits = f"expected at most term {MAX_TERM} and incarnation {MAX_INCARNATION}"
            raise ValueError(f"term {self.term}, incarnation {self.incarnation} is not a token: {limits}")

    @classmethod
    def from_number(cls, number: int) -> Self:
        """Return the token that has this `number`."""
        return cls(number >> INCARNATION_BITS, number & MAX_INCARNATION)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the token that `str` made the text of. Raises ValueError."""
        if not re.fullmatch(TOKEN_PATTERN, text):
            raise ValueError(f"{text!r} is not a token: expected INCARNATION or TERM.INCARNATION")
        term, _, incarnation = text.rpartition(".")
        return cls(int(term or 0), int(incarnation))

    @property
    def number(self) -> int:
        """The token as one integer, in the same order."""
        return self.term << INCARNATION_BITS | self.incarnation

    def next_incarnation(self) -> "FencingToken":
        """Return the token of the next copy under the same head."""
        return FencingToken(self.term, self.incarnation + 1)

    def __str__(self) -> str:
        return f"{self.term}.{self.incarnation}" if self.term else str(self.incarnation)


def check_token(role: str, token: FencingToken, newest: FencingToken) -> None:
    """Raise ProcessReplaced if `token` is not the newest one of the role. Call it in the transaction of the effect."""
    if token != newest:
        action = "this copy must exit" if token < newest else "the newest token must be recorded before it is used"
        raise ProcessReplaced(f"{role} {token} may not act, because the newest is {role} {newest}; {action}")


class TokenGate:
    """Lets a caller pass unless one with a higher token has passed before. Check and effect must be one atomic step.

    It is for a party that does not assign tokens, such as an engine: it learns the newest one from its callers.
    """

    def __init__(self, role: str, newest: FencingToken = FencingToken()) -> None:
        self.role, self.newest = role, newest

    def check(self, token: FencingToken) -> None:
        """Raise ProcessReplaced if a higher token has passed; otherwise remember this one."""
        if token < self.newest:
            check_token(self.role, token, self.newest)
        self.newest = token
