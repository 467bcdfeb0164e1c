"""Rollouts of `verifiers` 0.4.0 with the instant engine; run by an interpreter that has it, prints one JSON object.

Its chat harnesses start a process for each rollout, which takes a second. This measures the lowest possible cost: an
equivalent harness that runs its loop in process, which the API allows, and sends every model call to the interception
server with plain httpx. The training client renders, so that traces contain tokens as Ramify's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

VERSION = "0.4.0"
CONCURRENCY = (16, 64, 256)
MIN_ROLLOUTS = 128  # rollouts of one measurement
LAG_INTERVAL = 0.002
TINY = Path(__file__).parents[1] / "src/ramify/model/bundled/tiny"
SYSTEM = "You are a careful assistant. Answer inside <answer> tags and think of the units."
QUESTION = "A train leaves at nine and another at ten; which one arrives first, and by how many minutes?"
REPLY = "The first train arrives ten minutes before the second. <answer>the first, by ten minutes</answer>"
DOUBT = "Are you sure? Check it once more."

__all__ = ["InProcess", "Trains"]


class Trains(vf.Taskset):
    def load(self):
        while True:
            yield Train(vf.TaskData(prompt=QUESTION, system_prompt=SYSTEM))

    INFINITE = True


class Train(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("the first, by ten minutes" in (trace.last_reply or ""))


class InProcess(vf.Harness):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        turns = int(os.environ["TURNS"])
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        headers = {"Authorization": f"Bearer {secret}"}
        for _ in range(turns):
            body = {"model": ctx.model, "messages": messages}
            url = f"{endpoint.rstrip('/')}/chat/completions"
            answer = await HTTP.post(url, json=body, headers=headers)
            answer.raise_for_status()
            message = answer.json()["choices"][0]["message"]
            messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": DOUBT}]
        return ProgramResult(0, "", "")


HTTP = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=1024, max_keepalive_connections=1024))


@contextlib.contextmanager
def start_engine():
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    stop = backend.token_to_id("<|im_end|>")
    ids = [*backend.encode(REPLY, add_special_tokens=False).ids, stop]
    command = [sys.executable, str(Path(__file__).with_name("_instant_engine.py")), "--text", json.dumps(ids)]
    with subprocess.Popen([*command, "--stop", str(stop)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.kill()


async def measure(env, ctx, turns: int, concurrency: int) -> dict[str, float]:
    os.environ["TURNS"] = str(turns)
    lags: list[float] = []

    async def record_lag() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL
            await asyncio.sleep(LAG_INTERVAL)
            lags.append(loop.time() - due)

    async def run_all(count: int) -> None:
        tasks = iter(env.taskset.take(count))

        async def work() -> None:
            for task in tasks:
                episode = await env.run_episode(task, ctx)
                (trace,) = episode.traces
                if not episode.ok or trace.reward != 1.0:
                    raise AssertionError(f"a rollout failed: {episode.errors} {trace.errors}")

        await asyncio.gather(*(work() for _ in range(concurrency)))

    count = max(MIN_ROLLOUTS, concurrency)
    await run_all(16)
    gc.collect()
    lag_task = asyncio.create_task(record_lag())
    wall, cpu = time.perf_counter(), time.process_time()
    await run_all(count)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    lag_task.cancel()
    return {"cpu": 1e3 * cpu / count, "rate": count / wall, "lag": 1e3 * statistics.quantiles(lags, n=100)[98]}


async def main() -> None:
    if version("verifiers") != VERSION:
        raise SystemExit(f"expected verifiers {VERSION}, found {version('verifiers')}")
    results = {}
    with start_engine() as url:
        agent = {"harness": {"id": "_verifiers_rollouts"}, "runtime": {"type": "subprocess"}}
        config = vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": "_verifiers_rollouts"}, "agent": agent})
        env = vf.SingleAgentEnv(config)
        client = vf.TrainClientConfig(base_url=url, api_key_var="NO_KEY", renderer_model_name=str(TINY))
        ctx = vf.ModelContext(model="instant", client=client)
        async with env.serving():
            for kind, turns in {"1 turn": 1, "2 turns, user": 2}.items():
                for concurrency in CONCURRENCY:
                    results[f"{kind}, {concurrency}"] = await measure(env, ctx, turns, concurrency)
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main())
