"""The name of a set of weights: which policy, which incarnation of its trainer, which step.

A trainer that restarts may publish other weights for a step it had published before, so the step alone does not name
them; the incarnation does.
"""

from typing import NamedTuple


class PolicyVersion(NamedTuple):
    """One set of weights. Equal versions are equal weights."""

    policy: str
    incarnation: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion | None":
        """The version that prints as `text`; None for any other text."""
        policy, _, numbers = text.rpartition("@")
        incarnation, _, step = numbers.partition(".")
        known = policy and incarnation.isdecimal() and step.isdecimal()
        return cls(policy, int(incarnation), int(step)) if known else None
