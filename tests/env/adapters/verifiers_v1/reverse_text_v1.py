"""The taskset reverse-text as a taskset of v1: the same texts, prompts and rewards."""

import verifiers.v1 as vf

from ramify.env.tasksets import reversal
from ramify.env.tasksets.reverse_text import ReverseText


class ReverseTextData(vf.TaskData):
    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def similarity(self, trace: vf.Trace) -> float:
        return reversal.score_similarity(trace.last_reply or "", self.data.answer)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        return reversal.score_exact(trace.last_reply or "", self.data.answer)


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, vf.TasksetConfig]):
    def load(self):
        for index, task in enumerate(ReverseText().load()):
            data = ReverseTextData(idx=index, prompt=task.prompt, system_prompt=reversal.SYSTEM, answer=task.answer)
            yield ReverseTextTask(data, self.config.task)


__all__ = ["ReverseTextTaskset"]
