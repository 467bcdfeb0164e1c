"""reverse-text: write a short text backwards, character by character, inside tags."""

from collections.abc import Iterator

import ramify as rf
from ramify.env.tasksets import reversal


class ReverseTextConfig(reversal.ReversalTextsConfig, rf.TasksetConfig):
    """The lengths and the alphabet of the texts. The defaults suit the quickstart."""


class ReverseText(rf.Taskset):
    """Reverse a string, character by character."""

    config: ReverseTextConfig

    def load(self) -> Iterator[rf.Task]:
        """Yield one task per text of the split."""
        for text in reversal.generate_texts(self.config):
            yield rf.Task(prompt=text, system=reversal.SYSTEM, answer=reversal.reverse(text))

    @rf.reward
    def similarity(self, task: rf.Task, trace: rf.Trace) -> float:
        """The similarity of the reply to the reversed text, 0 to 1."""
        return reversal.score_similarity(trace.last_reply, task.answer)

    @rf.metric
    def exact(self, task: rf.Task, trace: rf.Trace) -> float:
        """Whether the reply is the reversed text."""
        return reversal.score_exact(trace.last_reply, task.answer)

    @rf.metric
    def well_formed(self, trace: rf.Trace) -> float:
        """Whether the reply is one pair of tags and nothing else."""
        return float(reversal.is_well_formed(trace.last_reply))

    def gold(self, task: rf.Task) -> str:
        """Return the reversed text in its tags."""
        return reversal.wrap_in_tags(task.answer)
