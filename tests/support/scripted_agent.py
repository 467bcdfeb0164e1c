"""A rollout without a model: given replies run through the real hooks, tools and user of a taskset."""

import json
from collections.abc import Sequence

from ramify.env import RolloutContext, Task, Taskset, collect_hooks
from ramify.trace import Message, ToolCall, Trace


def make_tool_call(tool: str, /, **arguments: object) -> Message:
    """Return a reply that calls a tool."""
    return Message("assistant", tool_calls=(ToolCall("call", tool, json.dumps(arguments)),))


def get_texts(trace: Trace, role: str) -> list[str]:
    """Return the texts of the messages with a role."""
    return [node.message.text for node in trace.nodes if node.message.role == role]


async def play(taskset: Taskset, task: Task, replies: str | Sequence[str | Message]) -> Trace:
    """Return the scored trace of an agent that gives these replies."""
    hooks, trace = collect_hooks(taskset), Trace(id="played")
    context = RolloutContext(task, trace)
    if hooks.setup:
        await hooks.setup(context)
    tools, user = await hooks.build_toolset(context), await hooks.build_user(context)

    def add(message: Message | None) -> bool:
        if message is not None:
            trace.graph.add_node(len(trace.nodes) - 1, message)
        return message is not None

    if isinstance(task.prompt, str):
        add(Message("user", task.prompt))
    elif user:
        add(await user.next_message(context, reply=None, turn=0))
    for turn, reply in enumerate([replies] if isinstance(replies, str) else replies, 1):
        message = Message("assistant", reply) if isinstance(reply, str) else reply
        add(message)
        for call in message.tool_calls:
            add(await tools.call(call, context))
        if any([await stop(context) for stop in hooks.stops]):
            break
        if not message.tool_calls and not (
            user and add(await user.next_message(context, reply=message.text, turn=turn))
        ):
            break
    if hooks.finalize:
        await hooks.finalize(context)
    for reward in hooks.rewards:
        trace.rewards[reward.name] = (await reward(context), reward.weight)
    for metric in hooks.metrics:
        trace.metrics[metric.name] = await metric(context)
    return trace
