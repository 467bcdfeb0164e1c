"""textarena: games of TextArena with one or more players.

In a game of several players the policy plays all of them. Each player is an agent of the rollout with a trace and a
reward of its own, and sees only what the game tells that player.
"""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from pydantic import Field

import ramify as rf
from ramify.core.errors import ConfigInvalid
from ramify.core.names import suggest
from ramify.env.adapters import import_package
from ramify.env.adapters.conversation import PolicyConversation

EVAL_SEED_OFFSET = 1_000_000  # the seeds of the split `eval` begin here
RAW_SUFFIX = "-raw"  # of the id of a game without wrappers: its observations are new messages only


class TextArenaConfig(rf.TasksetConfig):
    """The game and its players."""

    game: str
    """The id of a game, such as `TicTacToe-v0`."""
    num_players: int = Field(default=1, ge=1)
    """Number of players; the policy plays all of them."""
    parameters: dict[str, Any] = {}
    """Parameters with which the game is made, such as its difficulty."""
    num_tasks: int = Field(default=1000, ge=1)
    """Number of tasks. Each is a seed of the game."""
    instructions: str = ""
    """The system prompt of all players."""


class TextArenaTask(rf.Task):
    """A seed of the game."""

    seed: int


class TextArena(rf.Taskset):
    """Games between copies of the policy, or alone."""

    config: TextArenaConfig
    task_type = TextArenaTask

    def __init__(self, config: TextArenaConfig) -> None:
        super().__init__(config)
        self._textarena: Any = import_package("textarena", "textarena", "textarena")
        registry: Any = import_package("textarena.envs.registration", "textarena", "textarena")
        games = [id.removesuffix(RAW_SUFFIX) for id in registry.ENV_REGISTRY if id.endswith(RAW_SUFFIX)]
        if config.game not in games:
            hint = suggest(config.game, games, "docs/other-environments.md says how to list them")
            raise ConfigInvalid(f"unknown game {config.game!r}; {hint}", key="taskset.game")

    def load(self) -> Iterator[TextArenaTask]:
        """Yield one task per seed; the splits have different seeds."""
        offset = EVAL_SEED_OFFSET if self.config.split == "eval" else 0
        for seed in range(offset, offset + self.config.num_tasks):
            yield TextArenaTask(system=self.config.instructions or None, key=f"seed-{seed}", seed=seed)

    async def run_agent(
        self,
        task: TextArenaTask,
        trace: rf.Trace,
        endpoint: rf.Endpoint,
        add_agent: Callable[[str], rf.RolloutAgent],
        state: SimpleNamespace,
    ) -> str:
        """Play one game to its end, and keep the rewards of the players."""
        config = self.config
        game: Any = self._textarena.make(f"{config.game}{RAW_SUFFIX}", **config.parameters)
        game.reset(num_players=config.num_players, seed=task.seed)
        agents = [rf.RolloutAgent(trace, endpoint)]
        if config.num_players > 1:
            agents = [add_agent(f"player-{number}") for number in range(config.num_players)]
        conversations = [PolicyConversation(agent.endpoint, agent.trace, config.instructions) for agent in agents]
        state.player_rewards = {agent.trace.agent: 0.0 for agent in agents}  # of a game that is not finished
        is_over = False
        while not is_over:
            player, observation = cast(tuple[int, Sequence[Any]], game.get_observation())
            reply = await conversations[player].send(_format_observation(observation, player))
            if reply is None:
                return conversations[player].stop
            is_over, _ = game.step(action=reply)
        rewards, info = game.close()
        for player, agent in enumerate(agents):
            state.player_rewards[agent.trace.agent] = float(rewards[player])
            agent.trace.info["game"] = {key: str(value) for key, value in info.get(player, {}).items()}
        return "game_over"

    @rf.reward
    def outcome(self, trace: rf.Trace, state: SimpleNamespace) -> float:
        """The reward that the game gives to the player, usually 1, 0 or -1; 0 for a game that was not finished."""
        return state.player_rewards[trace.agent]

    @rf.metric
    def moves(self, trace: rf.Trace) -> float:
        """The number of moves of the player."""
        return float(trace.num_turns)


def _format_observation(observation: Sequence[Any], player: int) -> str:
    """Return the new messages for a player, without its own moves, which are in its conversation already."""
    return "\n\n".join(text for sender, text, _ in observation if sender != player)
