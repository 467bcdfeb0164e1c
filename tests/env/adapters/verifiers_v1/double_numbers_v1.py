"""A taskset of v1 with a tool: the task's own tool server doubles a number, and rewards read the trace."""

import verifiers.v1 as vf


class DoubleToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "numbers"

    @vf.tool
    def double(self, number: int) -> str:
        """Double a number."""
        return str(2 * number)


class DoubleTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class DoubleData(vf.TaskData):
    number: int


class DoubleTask(vf.Task[DoubleData, vf.State, DoubleTaskConfig]):
    @classmethod
    def toolsets(cls, config: DoubleTaskConfig) -> list[vf.Toolset]:
        return [DoubleToolset(config.tools)]

    @vf.stop
    async def three_turns(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(2 * self.data.number) in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / (1.0 + len(trace.last_reply or ""))

    @vf.metric
    async def used_tool(self, trace: vf.Trace) -> float:
        return float(bool(trace.tool_messages))


class DoubleConfig(vf.TasksetConfig):
    task: DoubleTaskConfig = DoubleTaskConfig()


class DoubleTaskset(vf.Taskset[DoubleTask, DoubleConfig]):
    def load(self):
        for number in range(20):
            prompt = f"Double {number + 3} with the tool, then reply with the result."
            yield DoubleTask(DoubleData(idx=number, prompt=prompt, number=number + 3), self.config.task)


__all__ = ["DoubleTaskset"]


if __name__ == "__main__":
    DoubleToolset.run()
