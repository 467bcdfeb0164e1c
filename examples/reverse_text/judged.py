"""reverse-text without a score of its own: a judge ranks all attempts at a word in one call."""

from collections.abc import Iterator
from typing import Any

import ramify as rf
from ramify.env.tasksets import reversal


class JudgedConfig(reversal.ReversalTextsConfig, rf.TasksetConfig):
    """The texts, and the judge that ranks the attempts."""

    judge: dict[str, Any]


class Judged(rf.Taskset):
    """Reverse a string; the reward is the share of the other attempts that the judge ranks lower."""

    config: JudgedConfig

    def __init__(self, config: JudgedConfig) -> None:
        super().__init__(config)
        self.judge = rf.Judge.load(config.judge)

    def load(self) -> Iterator[rf.Task]:
        """Yield one task per text of the split."""
        for text in reversal.generate_texts(self.config):
            yield rf.Task(prompt=text, system=reversal.SYSTEM, answer=reversal.wrap_in_tags(reversal.reverse(text)))

    @rf.group_reward
    async def rank(self, task: rf.Task, traces: list[rf.Trace]) -> list[float]:
        """The win rate of each attempt."""
        return await self.judge.score_group(task, traces)
