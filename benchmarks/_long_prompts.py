"""The taskset of the GPU benchmarks: prompts of one length, and a reward that any reply can earn."""

from collections.abc import Iterator

import ramify as rf


class Config(rf.TasksetConfig):
    prompt_chars: int = 336  # with the marks of the template 368 tokens of `_random_qwen`


class LongPrompts(rf.Taskset):
    config: Config

    def load(self) -> Iterator[rf.Task]:
        number = 0
        while True:
            yield rf.Task(prompt=f"{number:08} ".ljust(self.config.prompt_chars, "abcdefg "[number % 8]))
            number += 1

    @rf.reward
    def parity(self, trace: rf.Trace) -> float:
        return float(len(trace.last_reply) % 2)
