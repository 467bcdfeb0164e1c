"""Run with the interpreter of verifiers: compare rewards, rollout by rollout, with verifiers' own runner.

Both get the same replies, one list per rollout. It prints one line of JSON per environment.
"""

import asyncio
import contextlib
import json
import sys

from ramify.core.errors import BudgetExceeded
from ramify.infer.gateway import Gateway
from ramify.infer.gateway.config import RolloutLimits, SamplingConfig
from ramify.infer.gateway.session import RolloutSession
from ramify.rollout import Environment, SourceConfig, run_attempt, score_group
from ramify.rollout.validation import ScriptedPolicy
from ramify.trace import Message, ToolCall, Trace

CALL = Message("assistant", tool_calls=(ToolCall("call0", "multiply", '{"a": 2, "b": 3}'),))
WRONG_CALL = Message("assistant", tool_calls=(ToolCall("call0", "divide", '{"a": 2}'),))
SCRIPTS = {
    "calculator_tools": [["6"], [CALL, "It is 6."], [CALL, CALL, "no idea"], [WRONG_CALL, "6"], ["nothing at all"]],
    "guess_number": [["1"], ["5", "3", "1"], ["what?", "9", "2"], ["-4", "no", "number"]],
    "rank_answers": [["0"], ["zero"], ["I say 0 and more"], ["a much longer answer about 0"]],
}


def make_policy(replies):
    policy = ScriptedPolicy()
    policy.replies, policy.exhausted_error = list(replies), BudgetExceeded
    return policy


async def run_ours(env, task, scripts, gateway):
    traces = []
    for number, replies in enumerate(scripts):
        episode = await run_attempt(
            env, task, policy=make_policy(replies), gateway=gateway, id=f"r{number}", group="g", attempt=number
        )
        traces += episode.traces
    if env.hooks.group_rewards:
        await score_group(env, task, traces)
    errors = [error.message for trace in traces for error in trace.errors]
    return [trace.reward for trace in traces], errors


async def run_theirs(vf_env, row, scripts, gateway):
    from openai import AsyncOpenAI
    from verifiers import OpenAIChatCompletionsClient

    states = []
    async with contextlib.AsyncExitStack() as stack:
        for number, replies in enumerate(scripts):
            session = RolloutSession(
                Trace(id=f"t{number}"), make_policy(replies), sampling=SamplingConfig(), limits=RolloutLimits()
            )
            endpoint = gateway.register(session)
            stack.callback(gateway.unregister, session)
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
            )
            states.append((OpenAIChatCompletionsClient(client), endpoint.model))
        if not vf_env.requires_group_rollouts:
            outputs = [await vf_env.run_rollout(dict(row), client, model, {}) for client, model in states]
            return [output["reward"] for output in outputs]
        # one client per attempt, so the group is run as `run_group` does, step by step
        rolled_out = [await vf_env.rollout(dict(row), client, model, {}) for client, model in states]
        await vf_env.rubric.score_group(rolled_out)
        return [state["reward"] for state in rolled_out]


async def compare(name):
    import verifiers as vf

    env = Environment.load(SourceConfig(taskset={"id": "verifiers", "env": name}))
    task = next(env.iter_tasks())
    vf_env = vf.load_environment(name)
    dataset = vf_env.get_eval_dataset()
    async with Gateway() as gateway:
        ours, errors = await run_ours(env, task, SCRIPTS[name], gateway)
        theirs = await run_theirs(vf_env, dataset[0], SCRIPTS[name], gateway)
    print(json.dumps({"env": name, "ours": ours, "theirs": theirs, "errors": errors}), flush=True)


async def check_broken():
    env = Environment.load(SourceConfig(taskset={"id": "verifiers", "env": "broken_rubric"}))
    async with Gateway() as gateway:
        rewards, errors = await run_ours(env, next(env.iter_tasks()), [["a"]], gateway)
    print(json.dumps({"env": "broken_rubric", "ours": rewards, "theirs": rewards, "errors": errors}), flush=True)


for name in sys.argv[1:] or SCRIPTS:
    asyncio.run(compare(name))
asyncio.run(check_broken())
