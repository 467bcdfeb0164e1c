"""The env server of `verifiers` 0.4.0 with the delayed engine; run by an interpreter that has it, prints one JSON line.

Rollouts use a harness that stays in the worker's process, as in `_verifiers_rollouts.py`, which is the lowest cost.
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

ROLLOUTS, SUSTAINED, CONCURRENCY, WORKERS, ENGINE_DELAY = 200, 1000, 256, (1, 2, 4), 0.2
NAME = "_verifiers_rollouts"


@contextlib.contextmanager
def start_engine():
    from _verifiers_rollouts import REPLY, TINY
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    stop = backend.token_to_id("<|im_end|>")
    ids = [*backend.encode(REPLY, add_special_tokens=False).ids, stop]
    command = [sys.executable, str(Path(__file__).with_name("_instant_engine.py")), "--text", json.dumps(ids)]
    command += ["--stop", str(stop), "--late", str(ENGINE_DELAY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
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


async def run_all(client, url, count, concurrency):
    import verifiers.v1 as vf
    from _verifiers_rollouts import QUESTION, SYSTEM, TINY

    client_config = vf.TrainClientConfig(base_url=url, api_key_var="NO_KEY", renderer_model_name=str(TINY))
    data = vf.TaskData(prompt=QUESTION, system_prompt=SYSTEM).model_dump(mode="json")
    queue = iter(range(count))

    async def work():
        for _ in queue:
            episode = await client.run(client_config, "instant", vf.SamplingConfig(), data)
            (trace,) = episode.traces
            if episode.errors or trace.errors:  # it drops connections when the machine is busy
                print(f"a rollout failed: {episode.errors} {trace.errors}", file=sys.stderr)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - start


async def time_first_rollout(url):
    start = time.perf_counter()
    async with serving(2) as client:
        await run_all(client, url, 1, 1)
        return time.perf_counter() - start


async def main():
    from importlib.metadata import version

    from _verifiers_rollouts import VERSION

    if version("verifiers") != VERSION:
        raise SystemExit(f"expected verifiers {VERSION}, found {version('verifiers')}")
    os.environ["TURNS"] = "2"
    results = {}
    with start_engine() as url:
        results["start to first rollout"] = await time_first_rollout(url)
        for workers in WORKERS:
            async with serving(workers) as client:
                await client.wait_for_server_startup()
                await run_all(client, url, 64, 64)
                if workers == 2:
                    burst = [await run_all(client, url, ROLLOUTS, ROLLOUTS) for _ in range(3)]
                    results[f"{ROLLOUTS} rollouts at once, 2 workers"] = statistics.median(burst)
                results[f"rollouts, {workers} workers"] = SUSTAINED / await run_all(client, url, SUSTAINED, CONCURRENCY)
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main())
