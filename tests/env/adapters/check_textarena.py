"""TextArena: TicTacToe between two copies of `tiny`, one trace for each player."""

import json
import subprocess
from pathlib import Path

from tests.env.adapters.training import run_ramify, train, write_eval

NUM_STEPS = 10
ALGORITHM = "rae"
PLAY_DEADLINE = 300  # seconds
EVERY_GROUP = {"filters": []}  # also those whose attempts earn equal rewards
# Runs with the interpreter of TextArena: a game with scripted moves, in which the first player wins.
PLAY_SCRIPT = """
import asyncio, json
from ramify.infer.gateway import Gateway
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.rollout.validation import ScriptedPolicy

async def play():
    table = {"id": "textarena", "game": "TicTacToe-v0", "num_players": 2}
    env = Environment.load(SourceConfig(taskset=table))
    moves = ["[0]", "[4]", "[1]", "[5]", "[2]"]
    async with Gateway() as gateway:
        task = next(env.iter_tasks())
        return await run_attempt(env, task, policy=ScriptedPolicy(moves), gateway=gateway, id="game")

for trace in asyncio.run(play()).traces:
    replies = [node.message.text for node in trace.nodes if node.message.role == "assistant"]
    print(json.dumps([trace.agent, replies, trace.reward, [error.message for error in trace.errors]]))
"""


def check(python: Path, output: Path) -> None:
    command = [str(python), "-c", PLAY_SCRIPT]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=PLAY_DEADLINE).stdout
    players = [json.loads(line) for line in shown.splitlines() if line.startswith("[")]
    assert players == [["player-0", ["[0]", "[1]", "[2]"], 1.0, []], ["player-1", ["[4]", "[5]"], -1.0, []]], players
    table = {"id": "textarena", "game": "TicTacToe-v0", "num_players": 2}
    source = {"taskset": table, "python": str(python), "sampling": {"temperature": 1.0, "max_tokens": 8}}
    run_ramify("eval", "@", str(write_eval(output, "eval", {**source, "num_tasks": 2, "repetitions": 2})), "-m", "tiny")
    source = {**source, "algorithm": {"id": ALGORITHM}}
    traces = train(output, "tictactoe", source, steps=NUM_STEPS, orchestrator=EVERY_GROUP, run={"seq_len": 2048})
    episodes = {trace.episode: {other.agent for other in traces if other.episode == trace.episode} for trace in traces}
    assert set(map(frozenset, episodes.values())) == {frozenset({"player-0", "player-1"})}
    print(f"   tictactoe: {NUM_STEPS} steps by {ALGORITHM}, {len(episodes)} games, {len(traces)} traces", flush=True)
