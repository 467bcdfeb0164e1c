"""The env server of `verifiers` 0.4.0 against the late engine; run by an interpreter that has it, prints one JSON line.

Rollouts run a harness that stays in the worker's process, as in `_verifiers_rollouts.py`: the least that it can cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROLLOUTS, SUSTAINED, CONCURRENCY, WORKERS, LATE = 200, 1000, 256, (1, 2, 4), 0.2
NAME = "_verifiers_rollouts"


@contextlib.contextmanager
def engine():
    from _verifiers_rollouts import REPLY, TINY
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    stop = backend.token_to_id("<|im_end|>")
    ids = [*backend.encode(REPLY, add_special_tokens=False).ids, stop]
    command = [sys.executable, str(Path(__file__).with_name("_instant.py")), "--text", json.dumps(ids)]
    command += ["--stop", str(stop), "--late", str(LATE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.kill()


def serve(workers, config, queue):
    from verifiers.v1.serve import serve_env

    serve_env(max_workers=workers, address="tcp://127.0.0.1:0", address_queue=queue, elastic=False, config_data=config)


@contextlib.asynccontextmanager
async def serving(workers):
    import verifiers.v1 as vf
    from verifiers.v1.serve import EnvClient, env_config_data

    agent = {"harness": {"id": NAME}, "runtime": {"type": "subprocess"}}
    config = vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": NAME}, "agent": agent})
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=serve, args=(workers, env_config_data(config), queue))
    process.start()
    client = EnvClient(await asyncio.to_thread(queue.get))
    try:
        yield client
    finally:
        await client.close()
        process.terminate()
        process.join(30)


async def through(client, url, count, concurrency):
    import verifiers.v1 as vf
    from _verifiers_rollouts import QUESTION, SYSTEM, TINY

    asked = vf.TrainClientConfig(base_url=url, api_key_var="NO_KEY", renderer_model_name=str(TINY))
    data = vf.TaskData(prompt=QUESTION, system_prompt=SYSTEM).model_dump(mode="json")
    waiting = iter(range(count))

    async def work():
        for _ in waiting:
            episode = await client.run(asked, "instant", vf.SamplingConfig(), data)
            (trace,) = episode.traces
            if episode.errors or trace.errors:  # it gives up connections when the machine is busy
                print(f"a rollout went wrong: {episode.errors} {trace.errors}", file=sys.stderr)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - start


async def first(url):
    start = time.perf_counter()
    async with serving(2) as client:
        await through(client, url, 1, 1)
        return time.perf_counter() - start


async def main():
    from importlib.metadata import version

    from _verifiers_rollouts import VERSION

    if version("verifiers") != VERSION:
        raise SystemExit(f"expected verifiers {VERSION}, found {version('verifiers')}")
    os.environ["TURNS"] = "2"
    found = {}
    with engine() as url:
        found["start to first rollout"] = await first(url)
        for workers in WORKERS:
            async with serving(workers) as client:
                await client.wait_for_server_startup()
                await through(client, url, 64, 64)
                if workers == 2:
                    burst = [await through(client, url, ROLLOUTS, ROLLOUTS) for _ in range(3)]
                    found[f"{ROLLOUTS} rollouts at once, 2 workers"] = statistics.median(burst)
                found[f"rollouts, {workers} workers"] = SUSTAINED / await through(client, url, SUSTAINED, CONCURRENCY)
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
