"""Three words in three turns: the user sends one word after the other, and every reply has its own reward."""

from collections.abc import Iterator
from itertools import islice

import ramify as rf
from ramify.env.tasksets import reversal

TURNS = 3


class WordsTask(rf.Task):
    """The words to reverse, one per turn."""

    words: list[str]


class WordsUser(rf.User):
    """Sends the first word, and the next one after each reply."""

    def respond(self, task: WordsTask, turn: int) -> str | None:
        """Return the next word, or None after the last."""
        return task.words[turn] if turn < len(task.words) else None


class ReverseTurnsConfig(reversal.ReversalTextsConfig, rf.TasksetConfig):
    """The lengths and the alphabet of the words."""


class ReverseTurns(rf.Taskset):
    """Reverse three words, one per turn."""

    config: ReverseTurnsConfig
    task_type = WordsTask

    def load(self) -> Iterator[WordsTask]:
        """Yield a task for every three words of the split."""
        words = iter(reversal.generate_texts(self.config))
        while len(batch := list(islice(words, TURNS))) == TURNS:
            yield WordsTask(words=batch, system=reversal.SYSTEM)

    def user(self) -> rf.User:
        """Return the user, who sends one word per turn."""
        return WordsUser()

    @rf.turn_reward(weight=1 / TURNS)
    def similarity(self, task: WordsTask, trace: rf.Trace) -> list[float | None]:
        """The similarity of each reply to its reversed word, 0 to 1."""
        replies = [node.message.text for node in trace.nodes if node.call is not None]
        return [reversal.score_similarity(reply, reversal.reverse(word)) for reply, word in zip(replies, task.words)]
