"""Rollouts of the three harnesses on rows of the three datasets, with a scripted model, and a training run on them."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from ramify.infer.client import ClientConfig, InferenceClient
from ramify.infer.config import EngineConfig
from ramify.infer.gateway import Gateway, TokenPolicy
from ramify.model.render import load_renderer
from ramify.rollout import Environment, SourceConfig, run_attempt
from ramify.trace import Trace
from tests.support.external_runs import RUN_START, format_table, read_metric
from tests.support.scripted_server import ScriptedServer, run_scripted_server
from tests.swe.scores import build_source
from tests.swe.scripts import NUM_REPLIES

NUM_ROLLOUTS = 20
MAX_CONCURRENCY = 4
ROLLOUTS_DEADLINE = 1200  # seconds
RL_DEADLINE = 900
POLL_SECONDS = 0.5
LABEL = ("purpose", "ramify-swe-test")
SAMPLING = {"temperature": 1.0, "max_tokens": 512}
RUN_CONFIG = (
    RUN_START
    + """\
max_concurrency = 4

[[train]]
name = "r2e-gym"
taskset = {{ id = "swe", path = "{r2e}" }}
harness = {{ id = "bash" }}
runtime = {runtime}
sampling = {{ max_tokens = 512 }}

[[eval]]
name = "swe-bench"
taskset = {{ id = "swe", path = "{swe_bench}" }}
harness = {{ id = "bash" }}
runtime = {runtime}
sampling = {{ max_tokens = 512 }}
num_tasks = 1
repetitions = 4
interval = 1
"""
)


def serve_script(harness: str, model: Path, folder: Path) -> AbstractContextManager[ScriptedServer]:
    """Run the scripted server for a harness."""
    engine = EngineConfig(dtype="float32", kv_cache_tokens=400_000, max_num_batched_tokens=2048)
    script = "tests.swe.scripts:reply_to"
    return run_scripted_server(folder, script, harness, model=str(model), engine=engine, name=harness)


async def check_rollouts(
    harness: str, rows: dict[str, Path], runtime: dict[str, Any], server: ScriptedServer, model: Path
) -> None:
    """Run rollouts on the rows of all shapes in turn; check and print their rewards, tokens and times."""
    tables = {"harness": {"id": harness, "timeout": 600}, "sampling": SAMPLING}
    envs = [Environment.load(SourceConfig(**build_source(path, runtime, **tables))) for path in rows.values()]
    slots, start = asyncio.Semaphore(MAX_CONCURRENCY), time.monotonic()

    async def run_one(index: int, env: Environment) -> Trace:
        async with slots:
            task = next(env.iter_tasks())
            options = {"policy": policy, "gateway": gateway, "id": f"r{index}", "seed": index, "train": True}
            (trace,) = (await run_attempt(env, task, **options)).traces
            return trace

    async with asyncio.timeout(ROLLOUTS_DEADLINE), InferenceClient(server.url, ClientConfig()) as client:
        async with Gateway() as gateway:
            policy = TokenPolicy(client, load_renderer(model), "scripted", max_model_len=65536)
            envs_in_turn = enumerate(islice(cycle(envs), NUM_ROLLOUTS))
            traces = await asyncio.gather(*(run_one(index, env) for index, env in envs_in_turn))
        for env in envs:
            await env.close()
    seconds = time.monotonic() - start
    check_traces(traces, server.calls)
    num_solved = sum(trace.reward == 1.0 for trace in traces)
    phases = {
        name: statistics.mean(getattr(trace.timing, name) for trace in traces)
        for name in traces[0].timing.__struct_fields__
    }
    shown = ", ".join(f"{name} {value:.2f}" for name, value in phases.items() if name != "stalled")
    print(
        f"== {harness}: {len(traces)} rollouts in {seconds:.0f} s, {num_solved} solved; mean seconds: {shown}",
        flush=True,
    )


def check_traces(traces: list[Trace], calls: Path) -> None:
    """Check that each reward is what the script deserves, and that the traces have every call with its tokens."""
    recorded: Counter[tuple[int, ...]] = Counter()
    for trace in traces:
        assert not trace.errors, trace.errors
        assert not [name for name in trace.metrics if name.startswith("render/breaks")], trace.metrics
        nodes = [trace.nodes[index] for index in trace.sampled_nodes]
        assert len([node for node in nodes if node.is_trainable]) == NUM_REPLIES, trace.num_turns
        arguments = [str(call.arguments) for node in nodes for call in node.message.tool_calls]
        is_complete = any("humans" in text for text in arguments)
        assert trace.reward == float(is_complete), (trace.reward, arguments, trace.info["tests"])
        recorded.update(tuple(trace.graph.path_tokens(node.index).tolist()) for node in nodes)
    logged = [json.loads(line) for line in calls.read_text().splitlines()]
    assert recorded == Counter((*call["prompt"], *call["tokens"]) for call in logged)
    assert {trace.reward for trace in traces} == {0.0, 1.0}


def train(rows: dict[str, Path], runtime: dict[str, Any], url: str, model: Path, folder: Path) -> None:
    """Train two steps on rows of R2E-Gym, evaluate on rows of SWE-bench, and look at containers and log meanwhile."""
    commands = {"setup": ["python3 --version"], "pre_run": ["echo base is $(git log --format=%s)"]}
    table = {**runtime, **commands, "labels": dict([LABEL]), "max_starts_per_second": 4.0}
    paths = {"r2e": rows["r2e-gym"], "swe_bench": rows["swe-bench"], "folder": folder, "model": model}
    sizes = {"seq_len": 8192, "pack_tokens": 16384}
    config = folder / "swe.toml"
    config.write_text(RUN_CONFIG.format(name="swe", url=url, runtime=format_table(table), **paths, **sizes))
    start, labels = time.monotonic(), set[str]()
    with (folder / "swe.rl.log").open("w") as log:
        command = [sys.executable, "-m", "ramify", "rl", "@", str(config)]
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                labels.update(inspect_labels(runtime["engine"]))
                if time.monotonic() - start > RL_DEADLINE:
                    process.kill()
                time.sleep(POLL_SECONDS)
    assert process.returncode == 0, (folder / "swe.rl.log").read_text()[-3000:]
    print(f"== training: 2 steps on R2E-Gym, evals on SWE-bench, {time.monotonic() - start:.0f} s", flush=True)
    run = folder / "outputs" / "swe"
    for name in ("reward/r2e-gym/mean", "eval/swe-bench/avg"):
        print(f"   {name}: {read_metric(run, name)}")
    assert labels, "no container with the label was seen"
    print(f"   {runtime['engine']} inspect: {sorted(labels)[0]}")
    lines = [line for log in run.rglob("*.log") for line in log.read_text().splitlines() if "command ended" in line]
    pre_run = [line for line in lines if "key=runtime.pre_run[0]" in line]
    assert pre_run and all(line.endswith('output="base is base"') for line in pre_run), pre_run
    assert any("key=runtime.setup[0]" in line and "Python 3" in line for line in lines)
    print(f"   {len(lines)} commands in the log, such as: {pre_run[0]}", flush=True)


def inspect_labels(engine: str) -> Iterator[str]:
    """Yield the labels of the containers that run, as the engine shows them."""
    listing = run_engine(engine, "ps", "--filter", f"label={'='.join(LABEL)}", "--format", "{{.Names}}")
    for name in listing.split():
        text = run_engine(engine, "inspect", "--format", "{{json .Config.Labels}}", name)
        if text:  # it may have ended
            labels: dict[str, str] = json.loads(text)
            assert labels[LABEL[0]] == LABEL[1]
            yield json.dumps(labels, sort_keys=True)


def run_engine(engine: str, *args: str) -> str:
    """Return the output of a command of the engine."""
    return subprocess.run([engine, *args], capture_output=True, text=True, timeout=60).stdout.strip()
