"""`harness.train`: side calls are recorded, shown with their reason, and not trained on."""

from typing import Any

import httpx
import pytest
from rich.console import Console

import ramify as rf
from ramify.cli.trace_tree import render_trace_tree
from ramify.core.errors import ConfigInvalid
from ramify.infer.gateway import Gateway
from ramify.orchestrate.algorithms import get_trainable_nodes
from ramify.rollout.harness import Harness
from ramify.trace import Trace, decode_trace, encode_trace
from tests.support.attempts import TASK, OneTask, load_env, run_one, tool_call

BASH = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
AGENT = {"role": "system", "content": "You are an agent."}
PROMPT = {"role": "user", "content": TASK.prompt}


async def complete(endpoint: rf.Endpoint, messages: list[dict[str, Any]], tools: Any = None) -> str:
    """Make one model call and return the reply, whose text tells the purpose of the call."""
    body = {"model": "any", "messages": messages, **({"tools": tools} if tools else {})}
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}, trust_env=False) as http:
        answer = await http.post(f"{endpoint.base_url}/chat/completions", json=body, timeout=10)
    return answer.json()["choices"][0]["message"]["content"]


class AgentProgram(Harness):
    """Makes the calls of typical agent programs: a probe, a title, the task, a sub-agent, and a compacted history."""

    requires_endpoint = True
    tools: Any = BASH

    async def run(self, context, session, tools, user, stops) -> str:
        endpoint = context.endpoint
        await complete(endpoint, [{"role": "user", "content": "say hello"}])
        await complete(
            endpoint,
            [{"role": "system", "content": "Write titles."}, {"role": "user", "content": f"Title: {TASK.prompt}"}],
        )
        first = await complete(endpoint, [AGENT, PROMPT], self.tools)
        history = [AGENT, PROMPT, {"role": "assistant", "content": first}]
        if self.tools:
            await complete(
                endpoint,
                [{"role": "system", "content": "You search."}, {"role": "user", "content": "find it"}],
                self.tools,
            )
        await complete(endpoint, [*history, {"role": "user", "content": "Sum up."}])
        await complete(endpoint, [AGENT, {"role": "user", "content": "So far: nothing."}], self.tools)
        return "done"


class AgentWithoutTools(AgentProgram):
    tools = None


class ScoredByModel(OneTask):
    @rf.reward
    async def good(self, trace, endpoint) -> float:
        return float(await complete(endpoint, [{"role": "user", "content": "Is it good?"}]) == "judged")


async def rollout(taskset: type[rf.Taskset], script: list[str], **source: Any) -> Trace:
    async with Gateway() as gateway:
        return decode_trace(encode_trace(await run_one(load_env(taskset, **source), script, gateway=gateway)))


def trained_texts(trace: Trace) -> list[str]:
    return [trace.nodes[node].message.text for node in get_trainable_nodes(trace)]


def exclusion_reasons(trace: Trace) -> dict[str, str]:
    return {trace.nodes[entry["node"]].message.text: entry["reason"] for entry in trace.info.get("untrained", [])}


def render_tree(trace: Trace) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        console.print(render_trace_tree(trace))
    return captured.get()


WITH_TOOLS = ["hello", "title", "work", "searched", "summary", "went on", "judged"]


async def test_side_calls_of_an_agent_program_are_excluded_and_shown_with_their_reason():
    trace = await rollout(ScoredByModel, WITH_TOOLS, harness={"id": f"{__name__}:AgentProgram"})
    assert trace.rewards == {"good": (1.0, 1.0)}
    assert trained_texts(trace) == ["work", "searched", "summary", "went on"]
    excluded = exclusion_reasons(trace)
    assert list(excluded) == ["hello", "title", "judged"]
    assert "offers no tools" in excluded["hello"]
    assert "hook" in excluded["judged"]
    text = render_tree(trace)
    assert text.count("not trained: offers no tools, unlike other conversations of the agent") == 2
    assert text.count("not trained: made by a hook") == 1
    assert "3 of 7 calls are not trained" in text


async def test_train_all_includes_all_calls():
    trace = await rollout(ScoredByModel, WITH_TOOLS, harness={"id": f"{__name__}:AgentProgram", "train": "all"})
    assert trained_texts(trace) == WITH_TOOLS
    assert "untrained" not in trace.info
    assert "left out" not in render_tree(trace)


async def test_main_calls_without_tools_are_found_by_prompt_and_system_prompt():
    script = ["hello", "title", "work", "summary", "went on", "judged"]
    trace = await rollout(ScoredByModel, script, harness={"id": f"{__name__}:AgentWithoutTools"})
    assert trained_texts(trace) == ["work", "summary", "went on"]
    assert "neither the task's prompt" in exclusion_reasons(trace)["title"]


class WithThinkTool(OneTask):
    @rf.tool
    async def think(self, question: str, endpoint) -> str:
        """Ask the model itself."""
        return await complete(endpoint, [{"role": "user", "content": question}])


@pytest.mark.parametrize("train", ["main", "all"])
async def test_calls_of_a_tool_are_not_part_of_the_chat_loop(train: str):
    script = [tool_call("think", question="why"), "because", "so it is"]
    trace = await rollout(WithThinkTool, script, harness={"id": "chat", "train": train})
    assert trained_texts(trace) == (["", "so it is"] if train == "main" else ["", "because", "so it is"])
    assert list(exclusion_reasons(trace)) == (["because"] if train == "main" else [])


def test_unknown_value_of_train_is_refused():
    with pytest.raises(ConfigInvalid, match="train"):
        load_env(ScoredByModel, harness={"id": "chat", "train": "some"})
