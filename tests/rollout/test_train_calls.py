"""`harness.train`: housekeeping calls are recorded, shown with their reason, and not trained on."""

import asyncio
from typing import Any

import httpx
import pytest
from rich.console import Console

import ramify as rf
from ramify.errors import ConfigInvalid
from ramify.evals.trace_view import render_trace_tree
from ramify.gateway import Gateway
from ramify.harness import Harness
from ramify.orchestrate.algorithms.base import get_trainable_nodes
from ramify.trace import Trace, decode_trace, encode_trace
from tests.rollout.stage import TASK, OneTask, attempted, call, environment

BASH = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
AGENT = {"role": "system", "content": "You are an agent."}
PROMPT = {"role": "user", "content": TASK.prompt}


async def ask(endpoint: rf.Endpoint, messages: list[dict[str, Any]], tools: Any = None) -> str:
    """One call of a program, whose text says what it was for."""
    body = {"model": "any", "messages": messages, **({"tools": tools} if tools else {})}
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {endpoint.api_key}"}, trust_env=False) as http:
        answer = await http.post(f"{endpoint.base_url}/chat/completions", json=body, timeout=10)
    return answer.json()["choices"][0]["message"]["content"]


class Program(Harness):
    """Behaves as agent programs do: a probe, a title, the work, a sub-agent, and a compacted history."""

    requires_endpoint = True
    tools: Any = BASH

    async def run(self, context, session, tools, user, stops) -> str:
        end = context.endpoint
        await ask(end, [{"role": "user", "content": "say hello"}])
        await ask(
            end, [{"role": "system", "content": "Write titles."}, {"role": "user", "content": f"Title: {TASK.prompt}"}]
        )
        first = await ask(end, [AGENT, PROMPT], self.tools)
        replied = [AGENT, PROMPT, {"role": "assistant", "content": first}]
        if self.tools:
            await ask(
                end, [{"role": "system", "content": "You search."}, {"role": "user", "content": "find it"}], self.tools
            )
        await ask(end, [*replied, {"role": "user", "content": "Sum up."}])
        await ask(end, [AGENT, {"role": "user", "content": "So far: nothing."}], self.tools)
        return "done"


class PlainProgram(Program):
    tools = None


class Judged(OneTask):
    @rf.reward
    async def good(self, trace, endpoint) -> float:
        return float(await ask(endpoint, [{"role": "user", "content": "Is it good?"}]) == "judged")


def rollout(taskset: type[rf.Taskset], script: list[str], **source: Any) -> Trace:
    async def main() -> Trace:
        async with Gateway() as gateway:
            return await attempted(environment(taskset, **source), script, gateway=gateway)

    return decode_trace(encode_trace(asyncio.run(asyncio.wait_for(main(), 20))))


def trained(trace: Trace) -> list[str]:
    return [trace.nodes[node].message.text for node in get_trainable_nodes(trace)]


def reasons(trace: Trace) -> dict[str, str]:
    return {trace.nodes[entry["node"]].message.text: entry["reason"] for entry in trace.info.get("untrained", [])}


def printed(trace: Trace) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        console.print(render_trace_tree(trace))
    return captured.get()


WITH_TOOLS = ["hello", "title", "work", "searched", "summary", "went on", "judged"]


def test_what_an_agent_program_does_beside_its_task_is_left_out():
    trace = rollout(Judged, WITH_TOOLS, harness={"id": f"{__name__}:Program"})
    assert trace.rewards == {"good": (1.0, 1.0)}
    assert trained(trace) == ["work", "searched", "summary", "went on"]
    left = reasons(trace)
    assert list(left) == ["hello", "title", "judged"]
    assert "offers no tools" in left["hello"]
    assert "hook" in left["judged"]


def test_show_lists_the_calls_that_are_left_out_with_their_reason():
    text = printed(rollout(Judged, WITH_TOOLS, harness={"id": f"{__name__}:Program"}))
    assert text.count("not trained: offers no tools, unlike other conversations of the agent") == 2
    assert text.count("not trained: made by a hook") == 1
    assert "3 of 7 calls are left out of training" in text


def test_all_calls_are_trained_where_that_is_wanted():
    trace = rollout(Judged, WITH_TOOLS, harness={"id": f"{__name__}:Program", "train": "all"})
    assert trained(trace) == WITH_TOOLS
    assert "untrained" not in trace.info
    assert "left out" not in printed(trace)


def test_a_program_without_tools_is_known_by_the_tasks_prompt_and_its_system_prompt():
    script = ["hello", "title", "work", "summary", "went on", "judged"]
    trace = rollout(Judged, script, harness={"id": f"{__name__}:PlainProgram"})
    assert trained(trace) == ["work", "summary", "went on"]
    assert "neither the task's prompt" in reasons(trace)["title"]


class Asking(OneTask):
    @rf.tool
    async def think(self, question: str, endpoint) -> str:
        """Ask the model itself."""
        return await ask(endpoint, [{"role": "user", "content": question}])


@pytest.mark.parametrize("train", ["main", "all"])
def test_what_a_tool_asks_is_not_the_conversation_of_the_chat_loop(train: str):
    script = [call("think", question="why"), "because", "so it is"]
    trace = rollout(Asking, script, harness={"id": "chat", "train": train})
    assert trained(trace) == (["", "so it is"] if train == "main" else ["", "because", "so it is"])
    assert list(reasons(trace)) == (["because"] if train == "main" else [])


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigInvalid, match="train"):
        environment(Judged, harness={"id": "chat", "train": "some"})
