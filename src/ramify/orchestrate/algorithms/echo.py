"""Echo: GRPO on what the policy sampled, and cross entropy on what the environment answered.

Predicting tool output teaches how the environment behaves, also in groups whose rewards are all equal.
"""

from collections.abc import Sequence

from ramify.orchestrate.algorithms.grpo import Grpo, GrpoConfig
from ramify.trace import Annotation, Trace


class EchoConfig(GrpoConfig):
    """Configuration of Echo."""

    role_weights: dict[str, float] = {"tool": 0.1}
    """Weight of the cross entropy on the content of messages, by their role."""


class Echo(Grpo):
    """The annotations of GRPO, and one with a `ce` weight for the content of each message with a weighted role."""

    compares_attempts = False  # a single attempt has tool output to learn from
    config: EchoConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it

    def annotate(self, group: Sequence[Trace]) -> list[Annotation]:
        """Return the annotations of sampled and of weighted messages."""
        weights = self.config.role_weights
        return super().annotate(group) + [
            Annotation(trace.id, node.index, node.content_span, rl=0.0, ce=weights[node.message.role])
            for trace in group
            for node in trace.nodes
            if node.sampled_span == (0, 0) and node.message.role in weights and node.content_span != (0, 0)
        ]
