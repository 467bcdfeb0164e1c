"""A game of two players: each reverses a word of its own, and the one who does it better wins.

The policy plays both. The first player has the shorter word and a head start, so it usually wins, whatever it does: the
rewards of a player say something only in comparison with earlier games of the same player.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import ramify as rf
from ramify.env.tasksets import reversal

PLAYERS = ("first", "second")


class DuelTask(rf.Task):
    """The words of the two players."""

    words: tuple[str, str]


class DuelConfig(rf.TasksetConfig):
    """The words and the head start."""

    num_tasks: int = 1000
    head_start: float = 1.0
    """Points that the first player has when the game begins. A reversed word gives up to one point."""


class Duel(rf.Taskset):
    """Play one round; the reward of a player is its lead over the other one at the end."""

    config: DuelConfig
    task_type = DuelTask

    def load(self) -> Iterator[DuelTask]:
        """Yield tasks, each with a short and a long word."""
        short, long = (
            reversal.generate_texts(
                reversal.ReversalTextsConfig(
                    split=self.config.split, num_tasks=self.config.num_tasks, min_chars=minimum, max_chars=maximum
                )
            )
            for minimum, maximum in ((4, 6), (6, 8))
        )
        for words in zip(short, long):
            yield DuelTask(words=words, key=" ".join(words))

    async def run_agent(
        self, task: DuelTask, add_agent: Callable[[str], rf.RolloutAgent], state: SimpleNamespace
    ) -> str:
        """Let each player reverse its word, and keep the points."""
        points: dict[str, float] = {PLAYERS[0]: self.config.head_start, PLAYERS[1]: 0.0}
        state.points = points
        for agent, word in zip([add_agent(name) for name in PLAYERS], task.words):
            endpoint = agent.endpoint
            client = rf.ChatClient(
                rf.ChatClientConfig(base_url=endpoint.base_url, model=endpoint.model), api_key=endpoint.api_key
            )
            reply = await client.complete(
                [{"role": "system", "content": reversal.SYSTEM}, {"role": "user", "content": word}]
            )
            agent.trace.info["similarity"] = reversal.score_similarity(reply.text, reversal.reverse(word))
            state.points[agent.trace.agent] += agent.trace.info["similarity"]
        return "game_over"

    @rf.reward
    def lead(self, trace: rf.Trace, state: SimpleNamespace) -> float:
        """The points of the player minus the other player's."""
        return 2 * state.points[trace.agent] - sum(state.points.values())

    @rf.metric
    def similarity(self, trace: rf.Trace) -> float:
        """The similarity of the player's reply to its reversed word, 0 to 1."""
        return trace.info["similarity"]
