"""Tasks whose prompt says what the agent program does: one that answers, and some that attack what is around them."""

from collections.abc import Iterator

import ramify as rf

HONEST = "honest"
ATTACKS = ("disk", "connections", "tokens", "orphans", "signals")
HOSTILE_SHARE = 5  # one of so many rollouts is hostile
NUM_TASKS = 200


class Config(rf.TasksetConfig):
    attacks: list[str]
    """What the hostile agents do, in turn. Without any, honest agents are in their place."""


class Agents(rf.Taskset):
    config: Config

    def load(self) -> Iterator[rf.Task]:
        for number in range(NUM_TASKS):
            turn, place = divmod(number, HOSTILE_SHARE)
            attacks = self.config.attacks
            kind = attacks[turn % len(attacks)] if attacks and place == 0 else HONEST
            yield rf.Task(prompt=f"{kind} {number}", answer="the first, by ten minutes")

    @rf.reward
    def right(self, task: rf.Task, trace: rf.Trace) -> float:
        return float(task.answer in trace.last_reply)
