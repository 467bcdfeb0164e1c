"""Tokens per second of the native engine, beside transformers and vLLM.

Native and vLLM are measured through the same HTTP endpoint, with logprobs; transformers runs in a process of its own.
Prompts have 16 tokens, or 512 shared ones and 16 of their own; every request samples 64 tokens at temperature 1. On a
CPU `tiny` runs on one thread, SmolLM2-135M in bfloat16 on two. With `--device cuda` both run in float32 and in bfloat16
at 1, 32 and 256 at once, without targets; a directory without weights gets random ones, which are as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from _check import NO_COMPETITOR, Row, finish, median, parser

from ramify.client.http import Connections, exchange, open_client

CONCURRENCY = {"cpu": (1, 8, 32), "cuda": (1, 32, 256)}
NEW_TOKENS = 64
OWN, SHARED = 16, 512
READY_S = 300.0
REQUEST_S = 600.0
TINY = Path(__file__).parent.parent / "src" / "ramify" / "models" / "tiny"


@dataclass(frozen=True)
class Subject:
    """A model and how it is run."""

    name: str
    directory: Path
    dtype: str
    threads: int
    vocabulary: int
    device: str = "cpu"

    def prompts(self, count: int, shared: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        prefix = [rng.randrange(self.vocabulary) for _ in range(shared)]
        return [prefix + [rng.randrange(self.vocabulary) for _ in range(OWN)] for _ in range(count)]


@contextlib.contextmanager
def server(command: list[str], url: str | None, env: dict[str, str]) -> Iterator[tuple[str, float]]:
    """A server process while it answers: its address, and the seconds from its start to the first sampled token."""
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while not _ready(address := url or _announced(Path(log.name))):
                if process.poll() is not None or time.monotonic() - started > READY_S:
                    tail = "\n".join(Path(log.name).read_text().splitlines()[-20:])
                    raise SystemExit(f"{command[0]} did not become ready (exit code {process.poll()}):\n{tail}")
                time.sleep(0.1)
            with connected(address) as wave:
                wave([[1, 2, 3]], 1, 0)
            yield address, time.monotonic() - started
        finally:
            _end(process)


def _announced(log: Path) -> str:
    """The address a native server prints when it serves, "" until then."""
    found = re.search(r"at (http://\S+)", log.read_text())
    return found[1] if found else ""


def _ready(address: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return bool(address) and httpx.get(f"{address}/health", timeout=5).status_code == 200
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)


async def _wave(client: Connections, prompts: list[list[int]], new_tokens: int, seed: int) -> int:
    """All prompts at once; returns how many tokens came back."""

    async def one(index: int) -> int:
        knobs = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1, "temperature": 1.0, "seed": seed + index}
        body = {"token_ids": prompts[index], "sampling_params": knobs}
        answer = await exchange(client, "POST", "/inference/v1/generate", body)
        return len(json.loads(answer)["choices"][0]["token_ids"])

    async with asyncio.timeout(REQUEST_S):
        return sum(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


def _client(url: str) -> Connections:
    return open_client(url, connect=5.0, connections=max(CONCURRENCY["cuda"]))


@contextlib.contextmanager
def connected(url: str) -> Iterator[Callable[[list[list[int]], int, int], int]]:
    """`_wave` on connections that stay open from one wave to the next, as every client's pool keeps them."""
    with asyncio.Runner() as runner:
        client = _client(url)
        try:
            yield lambda prompts, new_tokens, seed: runner.run(_wave(client, prompts, new_tokens, seed))
        finally:
            runner.run(client.aclose())


def throughput(url: str, subject: Subject, count: int, shared: int) -> float:
    """Tokens per second of one wave of requests, median of three with fresh prompts each time."""
    seeds = iter(range(100, 200))
    with connected(url) as wave:
        wave(subject.prompts(count, shared, 1), 4, 1)

        def once() -> float:
            seed = next(seeds)
            prompts = subject.prompts(count, shared, seed)
            started = time.perf_counter()
            tokens = wave(prompts, NEW_TOKENS, seed)
            return tokens / (time.perf_counter() - started)

        return median(once)


def swap_ms(url: str, subject: Subject) -> float:
    """Milliseconds for which decoding stands still while 32 requests in flight get new weights."""
    from safetensors.torch import load_file

    from ramify.model import Version, publish

    async def run(directory: Path) -> float:
        async with contextlib.aclosing(_client(url)) as client:
            flight = asyncio.create_task(_wave(client, subject.prompts(32, 0, 7), NEW_TOKENS, 7))
            await asyncio.sleep(0.1)
            answer = await exchange(client, "POST", "/update_weights", {"path": str(directory), "kv": "recompute"})
            await flight
            return 1e3 * float(json.loads(answer)["seconds"])

    with tempfile.TemporaryDirectory() as temporary:
        tensors = load_file(subject.directory / "model.safetensors")
        steps = iter(range(1, 10))

        def once() -> float:
            step = next(steps)
            return asyncio.run(run(publish(Path(temporary) / f"v{step}", tensors, Version("bench", 0, step))))

        return median(once)


def transformers(subject: Subject, shapes: list[tuple[int, int]]) -> list[dict[str, float | None]]:
    jobs = [[subject.prompts(count, shared, 100), NEW_TOKENS] for count, shared in shapes]
    script = str(Path(__file__).with_name("_transformers.py"))
    command = [sys.executable, script, str(subject.directory), subject.dtype, str(subject.threads), subject.device]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, check=True, timeout=3600)
    return json.loads(done.stdout.splitlines()[-1])["rows"]


def native(subject: Subject) -> list[str]:
    engine = {"dtype": subject.dtype, "threads": str(subject.threads), "device": subject.device}
    if subject.device == "cuda":
        engine |= {"max_running": "256", "max_batch_tokens": "8192"}
    flags = [word for key, value in engine.items() for word in (f"--inference.{key}", value)]
    return [sys.executable, "-m", "ramify", "serve", "-m", str(subject.directory), "--server.port", "0", *flags]


def vllm(subject: Subject, python: str, port: int) -> list[str]:
    flags = {
        "--dtype": subject.dtype,
        "--port": str(port),
        "--logprobs-mode": "processed_logprobs",
        "--max-model-len": "1024",
    }
    words = [word for flag in flags.items() for word in flag]
    serve = [str(Path(python).with_name("vllm")), "serve", str(subject.directory)]
    return [*serve, *words, "--enable-scale-out", "--enforce-eager"]


VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def measure(subject: Subject, vllm_python: str | None) -> list[Row]:
    shapes = [(count, shared) for shared in (0, SHARED) for count in CONCURRENCY[subject.device]]
    with server(native(subject), None, {}) as (url, ready):
        ours = [throughput(url, subject, *shape) for shape in shapes]
        pause = swap_ms(url, subject)
    theirs = transformers(subject, shapes)
    rows = [
        Row(f"{subject.name}: start to first token", ready, None, "s", 15.0 if subject.device == "cpu" else None),
        Row(f"{subject.name}: pause of a weight swap, 32 in flight", pause, None, "ms"),
    ]
    for (count, shared), mine, other in zip(shapes, ours, theirs, strict=True):
        best = max(value for value in other.values() if value is not None)
        what = f"{subject.name}: {count} at once" + (f", {shared} shared" if shared else "")
        target = best if subject.device == "cpu" else None
        rows.append(Row(f"{what}, beside transformers", mine, best, "tok/s", target, at_least=True))
    if subject.device == "cuda":
        return rows
    if subject.name == "tiny":
        static = theirs[2]["static"] or 0.0
        rows.append(Row("tiny: 32 at once, beside static", ours[2], static, "tok/s", 3 * static, at_least=True))
    elif vllm_python:
        port = 18431
        with server(vllm(subject, vllm_python, port), f"http://127.0.0.1:{port}", VLLM_ENV) as (url, _):
            for (count, shared), mine in zip(shapes, ours, strict=True):
                reference = throughput(url, subject, count, shared)
                target = 0.9 * reference if (count, shared) == (32, 0) else None
                what = f"{subject.name}: {count} at once" + (f", {shared} shared" if shared else "")
                rows.append(Row(f"{what}, beside vLLM", mine, reference, "tok/s", target, at_least=True))
    return rows


def vocabulary(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])


def on_a_gpu(args: Any) -> Iterator[Subject]:
    """Both models in both types."""
    with tempfile.TemporaryDirectory() as temporary:
        found = {"tiny": TINY} | ({"SmolLM2": _filled(args.smollm2, Path(temporary))} if args.smollm2 else {})
        for name, directory in found.items():
            if args.only in (None, name.lower()):
                for dtype in ("float32", "bfloat16"):
                    yield Subject(f"{name} {dtype}", directory, dtype, 1, vocabulary(directory), "cuda")


def _filled(directory: Path, spare: Path) -> Path:
    """The directory, or a copy with random weights where it has none."""
    if any(directory.glob("*.safetensors")):
        return directory
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(spare)
    return spare


def main() -> int:
    flags: argparse.ArgumentParser = parser(__doc__.splitlines()[0])
    flags.add_argument("--only", choices=["tiny", "smollm2"], help="measure one of the models")
    flags.add_argument("--device", choices=list(CONCURRENCY), default="cpu")
    args: Any = flags.parse_args()
    if args.device == "cuda":
        rows = [row for subject in on_a_gpu(args) for row in measure(subject, None)]
        return finish("benchmarks/inference.py: the native engine on a GPU", rows, args)
    if args.check and not (args.smollm2 and args.vllm_python):
        print("SmolLM2 (--smollm2) and vLLM (--vllm-python) are needed for the comparison", file=sys.stderr)
        return NO_COMPETITOR
    rows: list[Row] = []
    if args.only != "smollm2":
        rows += measure(Subject("tiny", TINY, "float32", 1, vocabulary(TINY)), None)
    if args.smollm2 and args.only != "tiny":
        smollm2 = Subject("SmolLM2", args.smollm2, "bfloat16", 2, vocabulary(args.smollm2))
        rows += measure(smollm2, args.vllm_python)
    return finish("benchmarks/inference.py: the native engine on CPU", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
