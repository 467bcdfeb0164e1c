"""Run with the interpreter of verifiers: compare rewards, rollout by rollout, with verifiers' own runner.

Both get the same replies, one list per rollout. It prints one line of JSON per environment.
"""

import asyncio
import json

from ramify.core.errors import BudgetExceeded
from ramify.infer.gateway import Gateway
from ramify.infer.gateway.config import RolloutLimits, SamplingConfig
from ramify.infer.gateway.session import RolloutSession
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.rollout.validation import ScriptedPolicy
from ramify.trace import Message, ToolCall, Trace

AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
CALL = Message("assistant", tool_calls=(ToolCall("call0", "numbers_double", '{"number": 3}'),))
SCRIPTS = {
    "reverse-text-v1": [["<reversed_text>ab</reversed_text>"], ["nothing"]],
    "double-numbers-v1": [["6"], [CALL, "It is 6."], ["I do not know"]],
}


def make_policy(replies):
    return ScriptedPolicy(replies, BudgetExceeded)


async def run_theirs(name, replies, gateway):
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.utils.loaders import environment_class, resolve_env_config

    env = environment_class(name, "")(resolve_env_config({"taskset": {"id": name}, "agent": AGENT}))
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
    return episode.traces[0].reward


async def compare(name):
    env = Environment.load(SourceConfig(taskset={"id": "verifiers", "env": name, "agent": {"harness": {"id": "null"}}}))
    task = next(env.iter_tasks())
    ours, theirs, errors = [], [], []
    async with Gateway() as gateway:
        for number, replies in enumerate(SCRIPTS[name]):
            episode = await run_attempt(
                env, task, policy=make_policy(replies), gateway=gateway, id=f"r{number}", attempt=number
            )
            ours.append(episode.traces[0].reward)
            errors += [error.message for error in episode.traces[0].errors]
            theirs.append(await run_theirs(name, replies, gateway))
    print(json.dumps({"env": name, "ours": ours, "theirs": theirs, "errors": errors}), flush=True)


for name in SCRIPTS:
    asyncio.run(compare(name))
