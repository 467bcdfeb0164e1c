"""Tokens per second of the native engine, beside transformers and vLLM.

Native and vLLM are measured through the same HTTP endpoint, with logprobs; transformers runs in a process of its own.
Ours and theirs take turns, wave by wave, since the speed of a shared machine changes from minute to minute.
Prompts have 16 tokens, or 512 shared ones and 16 of their own; every request samples 64 tokens at temperature 1. On a
CPU `tiny` runs on one thread, SmolLM2-135M in bfloat16 on two. With `--device cuda` both run in float32 and in bfloat16
at 1, 32 and 256 at once, without targets; a directory without weights gets random ones, which are as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from _check import NO_COMPETITOR, Row, finish, median, parser

from ramify.client.http_client import HttpClient, send_request

CONCURRENCY = {"cpu": (1, 8, 32), "cuda": (1, 32, 256)}
NEW_TOKENS = 64
OWN, SHARED = 16, 512
READY_S = 300.0
REQUEST_S = 600.0
COMPETITOR_S = 3600.0
FEWEST, MOST, ROUNDS_S = 3, 15, 10.0  # turns of a comparison
VLLM_PORT = 18431
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


async def _wave(client: HttpClient, prompts: list[list[int]], new_tokens: int, seed: int) -> int:
    """All prompts at once; returns how many tokens came back."""

    async def one(index: int) -> int:
        knobs = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1, "temperature": 1.0, "seed": seed + index}
        body = {"token_ids": prompts[index], "sampling_params": knobs}
        answer = await send_request(client, "POST", "/inference/v1/generate", body)
        return len(json.loads(answer)["choices"][0]["token_ids"])

    async with asyncio.timeout(REQUEST_S):
        return sum(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


def _client(url: str) -> HttpClient:
    return HttpClient(url, connect_timeout=5.0, max_connections=max(CONCURRENCY["cuda"]))


@contextlib.contextmanager
def connected(url: str) -> Iterator[Callable[[list[list[int]], int, int], int]]:
    """`_wave` on connections that stay open from one wave to the next, as every client's pool keeps them."""
    with asyncio.Runner() as runner:
        client = _client(url)
        try:
            yield lambda prompts, new_tokens, seed: runner.run(_wave(client, prompts, new_tokens, seed))
        finally:
            runner.run(client.aclose())


class Waves:
    """Waves of requests to a server, with fresh prompts each time."""

    def __init__(
        self, wave: Callable[[list[list[int]], int, int], int], subject: Subject, count: int, shared: int
    ) -> None:
        self.wave, self.seeds = wave, itertools.count(100)
        self.prompts = functools.partial(subject.prompts, count, shared)
        wave(self.prompts(1), 4, 1)

    def __call__(self) -> float:
        """Tokens per second of the next one."""
        seed = next(self.seeds)
        prompts = self.prompts(seed)
        started = time.perf_counter()
        return self.wave(prompts, NEW_TOKENS, seed) / (time.perf_counter() - started)


def in_turns(*measures: Callable[[], float]) -> list[float]:
    """The median of each, measured one after the other three times, or more often if that is quick."""
    found: list[list[float]] = []
    started = time.monotonic()
    while len(found) < FEWEST or (len(found) < MOST and time.monotonic() - started < ROUNDS_S):
        found.append([measure() for measure in measures])
    return [statistics.median(column) for column in zip(*found)]


def swap_ms(url: str, subject: Subject) -> float:
    """Milliseconds for which decoding stands still while 32 requests in flight get new weights."""
    from safetensors.torch import load_file

    from ramify.model import publish_weights
    from ramify.trace import PolicyVersion

    async def run(directory: Path) -> float:
        async with contextlib.aclosing(_client(url)) as client:
            flight = asyncio.create_task(_wave(client, subject.prompts(32, 0, 7), NEW_TOKENS, 7))
            await asyncio.sleep(0.1)
            answer = await send_request(client, "POST", "/update_weights", {"path": str(directory), "kv": "recompute"})
            await flight
            return 1e3 * float(json.loads(answer)["seconds"])

    with tempfile.TemporaryDirectory() as temporary:
        tensors = load_file(subject.directory / "model.safetensors")
        steps = iter(range(1, 10))

        def once() -> float:
            step = next(steps)
            return asyncio.run(
                run(publish_weights(Path(temporary) / f"v{step}", tensors, PolicyVersion("bench", 0, step)))
            )

        return median(once)


@contextlib.contextmanager
def transformers(subject: Subject) -> Iterator[Callable[..., float]]:
    """`ask(kind, prompts, new_tokens)` → tokens per second, not a number where that failed."""
    script = str(Path(__file__).with_name("_transformers.py"))
    command = [sys.executable, script, str(subject.directory), subject.dtype, str(subject.threads), subject.device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        watch = threading.Timer(COMPETITOR_S, process.kill)
        watch.start()

        def ask(kind: str, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> float:
            assert process.stdin and process.stdout
            print(json.dumps([kind, prompts, new_tokens]), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            if not answer:
                raise SystemExit("transformers ended before its time")
            return json.loads(answer) or float("nan")

        try:
            yield ask
        finally:
            watch.cancel()
            process.kill()


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
    on_cpu = subject.device == "cpu"
    rows: list[Row] = []
    with server(native(subject), None, {}) as (url, ready), connected(url) as wave:
        rows.append(Row(f"{subject.name}: start to first token", ready, None, "s", 15.0 if on_cpu else None))
        rows.append(Row(f"{subject.name}: pause of a weight swap, 32 in flight", swap_ms(url, subject), None, "ms"))
        with transformers(subject) as ask:
            for count, shared in shapes:
                rows += beside_transformers(subject, Waves(wave, subject, count, shared), ask, count, shared)
        if vllm_python and subject.name != "tiny":
            with (
                server(vllm(subject, vllm_python, VLLM_PORT), f"http://127.0.0.1:{VLLM_PORT}", VLLM_ENV) as (other, _),
                connected(other) as theirs,
            ):
                for shape in shapes:
                    mine, reference = in_turns(Waves(wave, subject, *shape), Waves(theirs, subject, *shape))
                    target = 0.9 * reference if shape == (32, 0) else None
                    what = f"{named(subject, *shape)}, beside vLLM"
                    rows.append(Row(what, mine, reference, "tok/s", target, at_least=True))
    return rows


def beside_transformers(subject: Subject, ours: Waves, ask: Callable[..., float], count: int, shared: int) -> list[Row]:
    prompts = subject.prompts(count, shared, 100)
    ask("static", prompts, 4)
    mine, static = in_turns(ours, lambda: ask("static", prompts))
    if subject.device != "cpu":
        return [Row(f"{named(subject, count, shared)}, beside transformers", mine, static, "tok/s")]
    best = max(static, ask("continuous", prompts))  # once: it claims its cache anew each time
    rows = [Row(f"{named(subject, count, shared)}, beside transformers", mine, best, "tok/s", best, at_least=True)]
    if subject.name == "tiny" and (count, shared) == (32, 0):
        rows.append(Row("tiny: 32 at once, beside static", mine, static, "tok/s", 3 * static, at_least=True))
    return rows


def named(subject: Subject, count: int, shared: int) -> str:
    return f"{subject.name}: {count} at once" + (f", {shared} shared" if shared else "")


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
