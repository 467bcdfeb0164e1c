"""The name of a set of weights: its policy, the incarnation of the trainer, and the step.

A trainer that restarts may publish other weights for a step that it published before, so the step alone does not
identify them; the incarnation does.
"""

from typing import NamedTuple

UNDEFINED_POLICY = "undefined"  # of a server whose weights are incomplete: an update was interrupted


class PolicyVersion(NamedTuple):
    """The name of one set of weights. Equal versions are equal weights."""

    policy: str
    incarnation: int = 0
    step: int = 0

    def __str__(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion | None":
        """Return the version that prints as `text`, or None if there is none."""
        policy, _, numbers = text.rpartition("@")
        incarnation, _, step = numbers.partition(".")
        is_valid = policy and incarnation.isdecimal() and step.isdecimal()
        return cls(policy, int(incarnation), int(step)) if is_valid else None
