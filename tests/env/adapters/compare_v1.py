"""Run with the interpreter of verifiers: compare rewards, rollout by rollout, with verifiers' own runner.

Both get the same replies, one list per rollout. It prints one line of JSON for
each environment named on its command line.
"""

import asyncio
import json
import sys
from collections import defaultdict
from statistics import mean

from ramify.core.errors import BudgetExceeded
from ramify.infer.gateway import Gateway
from ramify.infer.gateway.config import RolloutLimits, SamplingConfig
from ramify.infer.gateway.session import RolloutSession
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.rollout.validation import ScriptedPolicy
from ramify.trace import Message, ToolCall, Trace

AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
CALL = Message("assistant", tool_calls=(ToolCall("call0", "numbers_double", '{"number": 3}'),))
RUNS = {  # by name: the taskset, the options of its environment, its agents, and the replies of each rollout
    "reverse-text-v1": (
        "reverse-text-v1",
        {},
        ["agent"],
        [["<reversed_text>ab</reversed_text>"], ["nothing"]],
    ),
    "double-numbers-v1": (
        "double-numbers-v1",
        {},
        ["agent"],
        [["6"], [CALL, "It is 6."], ["I do not know"]],
    ),
    "kuhn-poker": (
        "kuhn-poker",
        {},
        ["player0", "player1"],
        [
            ["[bet]", "[call]"],
            ["[check]", "I [bet].", "[fold]"],
            ["[check]", "[check]"],
            ["I [bet] or [check].", "[bet]", "[fold]"],
            ["no", "move"],
        ],
    ),
    "user-sim+reverse-text-v1": (
        "reverse-text-v1",
        {"id": "user-sim", "user": {"max_turns": 2}},
        ["assistant", "user"],
        [["Reverse it.", "<reversed_text>ab</reversed_text>", "###DONE###"]],
    ),
}


def make_policy(replies):
    return ScriptedPolicy(replies, BudgetExceeded)


async def run_theirs(env_id, options, agents, replies, gateway):
    """Return the reward of each agent: the mean, if it ran several times."""
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    roles = {name: {**AGENT, **options.get(name, {})} for name in agents}
    env = load_environment(resolve_env_config({"taskset": {"id": env_id}, **options, **roles}))
    session = RolloutSession(
        Trace(id="theirs"), make_policy(replies), sampling=SamplingConfig(), limits=RolloutLimits()
    )
    endpoint = gateway.register(session)
    headers = {"x-api-key": endpoint.api_key}
    client = EvalClientConfig(base_url=endpoint.base_url, api_key_var="UNUSED", headers=headers)
    async with env.serving():
        (slot,) = env.slots(next(iter(env.taskset)))
        episode = await env.run_slot(slot, ModelContext(model=endpoint.model, client=client))
    gateway.unregister(session)
    rewards = defaultdict(list)
    for trace in episode.traces:
        rewards[trace.agent.name].append(trace.reward)
    return [mean(rewards[name]) for name in agents]


async def compare(name):
    env_id, options, agents, scripts = RUNS[name]
    agent = {"harness": {"id": "null"}}
    taskset = {"id": "verifiers", "env": env_id, "agent": agent, "env_options": options}
    env = Environment.load(SourceConfig(taskset=taskset))
    task = next(env.iter_tasks())
    ours, theirs, errors = [], [], []
    async with Gateway() as gateway:
        for number, replies in enumerate(scripts):
            episode = await run_attempt(
                env, task, policy=make_policy(replies), gateway=gateway, id=f"r{number}", attempt=number
            )
            assert [trace.agent or "agent" for trace in episode.traces] == agents
            ours += [trace.reward for trace in episode.traces]
            errors += [error.message for trace in episode.traces for error in trace.errors]
            theirs += await run_theirs(env_id, options, agents, replies, gateway)
    print(json.dumps({"env": name, "ours": ours, "theirs": theirs, "errors": errors}), flush=True)


for name in sys.argv[1:]:
    asyncio.run(compare(name))
