"""The taskset of the env server's benchmark: two turns with a simulated user, and a prompt of configurable length."""

from collections.abc import Iterator

import ramify as rf

SYSTEM = "You are a careful assistant. Answer inside <answer> tags and think of the units."
QUESTION = "A train leaves at nine and another at ten; which one arrives first, and by how many minutes?"


class Config(rf.TasksetConfig):
    repeat: int = 1


class Doubt(rf.User):
    def respond(self, turn: int) -> str | None:
        return "Are you sure? Check it once more." if turn == 1 else None


class Trains(rf.Taskset):
    config: Config

    def load(self) -> Iterator[rf.Task]:
        number = 0
        while True:
            text = " ".join([QUESTION] * self.config.repeat)
            yield rf.Task(prompt=f"{number}. {text}", system=SYSTEM, answer="the first, by ten minutes")
            number += 1

    def user(self) -> rf.User:
        return Doubt()

    @rf.reward
    def right(self, task: rf.Task, trace: rf.Trace) -> float:
        return float(task.answer in trace.last_reply)
