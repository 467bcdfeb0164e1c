"""Rollouts of a program with the scripted server, and the checks of their traces."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from ramify.infer.client import ClientConfig, InferenceClient
from ramify.infer.config import EngineConfig
from ramify.infer.gateway import Gateway, TokenPolicy
from ramify.model.render import load_renderer
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.trace import Trace
from tests.agents.coding_task import CodingTask, ReviewedTask
from tests.agents.scripts import NOTES, TURN_REPLIES
from tests.support.scripted_server import ScriptedServer, run_scripted_server

SINGLE_TURN_PROGRAMS = ("mini-swe-agent",)  # it cannot continue a conversation


def get_taskset(program: str) -> type[CodingTask]:
    """Return the taskset for a program: with a reviewer, unless the program cannot continue a conversation."""
    return CodingTask if program in SINGLE_TURN_PROGRAMS else ReviewedTask


def build_source(program: str, programs: Path) -> dict[str, Any]:
    """Return the tables of a source that runs a program, installed beneath `programs`, in a sandbox."""
    path = [str(programs / "node_modules" / ".bin"), str(programs / "python" / "bin")]
    return {
        "taskset": {"id": f"tests.agents.coding_task:{get_taskset(program).__name__}"},
        "harness": {"id": program, "timeout": 900},
        "runtime": {"id": "sandbox", "read_only": [str(programs)], "prepend_path": path},
        "sampling": {"temperature": 1.0, "max_tokens": 512},
    }


def serve_script(program: str, model: Path, folder: Path) -> AbstractContextManager[ScriptedServer]:
    """Run the scripted server for a program."""
    engine = EngineConfig(dtype="float32", kv_cache_tokens=400_000, max_num_batched_tokens=2048)
    script = "tests.agents.scripts:reply_to"
    return run_scripted_server(folder, script, program, model=str(model), engine=engine, name=program)


async def run_rollout(source: dict[str, Any], url: str, model: Path) -> Trace:
    """Run one rollout of the first task against a server."""
    env = Environment.load(SourceConfig(**source))
    try:
        async with InferenceClient(url, ClientConfig()) as client, Gateway() as gateway:
            policy = TokenPolicy(client, load_renderer(model), "scripted", max_model_len=65536)
            task = next(env.iter_tasks())
            episode = await run_attempt(env, task, policy=policy, gateway=gateway, id="r1", train=True)
            return episode.traces[0]
    finally:
        await env.close()


def check_trace(program: str, trace: Trace, calls: Path) -> None:
    """Check that the trace has every call of the server with its tokens, and one unbroken main conversation.

    The conversation has three turns, if a reviewer answers the program.
    """
    assert not trace.errors, trace.errors
    assert "refusals" not in trace.info, trace.info["refusals"]
    assert not [name for name in trace.metrics if name.startswith("render/breaks")], trace.metrics
    logged = [json.loads(line) for line in calls.read_text().splitlines()]
    nodes = [trace.nodes[index] for index in trace.sampled_nodes]
    assert len(nodes) == len(logged)
    for node, call in zip(nodes, logged):
        path_ids = trace.graph.path_tokens(node.index)
        assert path_ids.tolist() == call["prompt"] + call["tokens"]
        assert np.allclose(node.logprobs, call["logprobs"], atol=1e-6)
    trained = [node for node in nodes if node.is_trainable]
    num_calls = [len(node.message.tool_calls) for node in trained]
    if program in SINGLE_TURN_PROGRAMS:
        assert (num_calls[:2], len(num_calls), trace.stop) == ([2, 3], 3, "done")
    else:
        assert (num_calls, trace.stop) == ([2, 3, 0, 2, 0, 0], "user")
        assert trace.info["replies_to_user"] == list(TURN_REPLIES)
    check_tool_calls(program, trace)
    assert trace.info["program"]["exit_code"] == 0
    main_leaves = [leaf for leaf in trace.leaves if trace.nodes[leaf].is_trainable]
    assert len(main_leaves) == 1, f"{len(main_leaves)} branches: {trace.info.get('forks')}"


def check_tool_calls(program: str, trace: Trace) -> None:
    """Check that the tools of the taskset kept their state, and that the model got their results."""
    calls = trace.info["tool_calls"]
    assert not any(call["is_error"] for call in calls), calls
    results = [call["result"] for call in calls if call["tool"] == "note"]
    assert results == [f"note {number}: {text}" for number, text in enumerate(NOTES[: len(results)], 1)]
    assert len(results) == (1 if program in SINGLE_TURN_PROGRAMS else 2)
    assert [call["tool"] for call in calls].count("diagram") == 1
    answers = [node.message.text for node in trace.nodes if node.message.role == "tool"]
    for text in (*results, "the diagram of calc.py"):
        assert [text in answer for answer in answers].count(True) == 1, answers
