"""Tokens per second of the native engine, compared with transformers and vLLM.

The native engine and vLLM are measured through the same HTTP endpoint, with logprobs; transformers runs in a process of
its own. The engines are measured alternately, since the speed of a shared machine changes from minute to minute.
Prompts have 16 tokens, or 512 shared tokens and 16 of their own; every request samples 64 tokens at temperature 1. On a
CPU `tiny` runs on one thread, SmolLM2-135M on two, in bfloat16 unless the CPU emulates it. With `--device cuda` both
run in float32 and bfloat16 with 1, 32 and 256 concurrent requests, without targets; a directory without weights gets
random ones, equally fast.
A random model of 0.48 B parameters is measured with targets, in process and through HTTP (`_sampler_gpu.py`); with
another `--size` there are no targets. `--only engines` measures prefill and decode steps in process, beside vLLM if its
interpreter is given (`_engines_gpu.py`).
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from _check import NO_COMPETITOR, Row, finish, median, parser
from _engines_gpu import WAVES as ENGINE_WAVES
from _random_qwen import SIZES

from ramify.infer.client.http_client import HttpClient, send_request

CONCURRENCY = {"cpu": (1, 8, 32), "cuda": (1, 32, 256)}
NEW_TOKENS = 64
OWN_TOKENS, SHARED_TOKENS = 16, 512  # of a prompt
TARGET_SIZE, LARGE_SIZE = "0.5b", "8b"  # of the random models
READY_TIMEOUT = 300.0
REQUEST_TIMEOUT = 600.0
COMPETITOR_TIMEOUT = 3600.0
MIN_ROUNDS, MAX_ROUNDS, ROUNDS_SECONDS = 3, 15, 10.0  # of a comparison
VLLM_PORT = 18431
TINY = Path(__file__).parent.parent / "src" / "ramify" / "model" / "bundled" / "tiny"


@dataclass(frozen=True)
class ModelSetup:
    """A model and how it is run."""

    name: str
    directory: Path
    dtype: str
    threads: int
    vocab_size: int
    device: str = "cpu"

    def build_prompts(self, count: int, shared: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        prefix = [rng.randrange(self.vocab_size) for _ in range(shared)]
        return [prefix + [rng.randrange(self.vocab_size) for _ in range(OWN_TOKENS)] for _ in range(count)]


@contextlib.contextmanager
def run_server(command: list[str], url: str | None, env: dict[str, str]) -> Iterator[tuple[str, float]]:
    """Run a server process; yields its address and the seconds from its start to the first sampled token."""
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while not _is_ready(address := url or _read_address(Path(log.name))):
                if process.poll() is not None or time.monotonic() - started > READY_TIMEOUT:
                    tail = "\n".join(Path(log.name).read_text().splitlines()[-20:])
                    raise SystemExit(f"{command[0]} did not become ready (exit code {process.poll()}):\n{tail}")
                time.sleep(0.1)
            with connect(address) as wave:
                wave([[1, 2, 3]], 1, 0)
            yield address, time.monotonic() - started
        finally:
            _stop_process(process)


def _read_address(log: Path) -> str:
    """Return the address that a native server has printed, or ""."""
    match = re.search(r"at (http://\S+)", log.read_text())
    return match[1] if match else ""


def _is_ready(address: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return bool(address) and httpx.get(f"{address}/health", timeout=5).status_code == 200
    return False


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)


async def _send_wave(
    client: HttpClient, prompts: list[list[int]], new_tokens: int, seed: int, **extra_fields: Any
) -> int:
    """Send all prompts at once; return the number of sampled tokens. `extra_fields` are added to each body."""

    async def sample(index: int) -> int:
        params = {"max_tokens": new_tokens, "ignore_eos": True, "logprobs": 1, "temperature": 1.0, "seed": seed + index}
        body = {"token_ids": prompts[index], "sampling_params": params, **extra_fields}
        response = await send_request(client, "POST", "/inference/v1/generate", body)
        return len(json.loads(response)["choices"][0]["token_ids"])

    async with asyncio.timeout(REQUEST_TIMEOUT):
        return sum(await asyncio.gather(*(sample(index) for index in range(len(prompts)))))


def _open_client(url: str) -> HttpClient:
    return HttpClient(url, connect_timeout=5.0, max_connections=max(CONCURRENCY["cuda"]))


@contextlib.contextmanager
def connect(url: str, **extra_fields: Any) -> Iterator[Callable[[list[list[int]], int, int], int]]:
    """Yield `_send_wave` with connections that stay open between waves, as in the pool of a client."""
    with asyncio.Runner() as runner:
        client = _open_client(url)
        try:
            yield lambda prompts, new_tokens, seed: runner.run(
                _send_wave(client, prompts, new_tokens, seed, **extra_fields)
            )
        finally:
            runner.run(client.aclose())


class WaveBenchmark:
    """Sends waves of requests to a server, each with new prompts."""

    def __init__(
        self, wave: Callable[[list[list[int]], int, int], int], setup: ModelSetup, count: int, shared: int
    ) -> None:
        self.wave, self.seeds = wave, itertools.count(100)
        self.build_prompts = functools.partial(setup.build_prompts, count, shared)
        wave(self.build_prompts(1), 4, 1)

    def __call__(self) -> float:
        """Send a wave and return its tokens per second."""
        seed = next(self.seeds)
        prompts = self.build_prompts(seed)
        started = time.perf_counter()
        return self.wave(prompts, NEW_TOKENS, seed) / (time.perf_counter() - started)


def measure_alternately(*measures: Callable[[], float]) -> list[float]:
    """Return the median of each measure, taken alternately in at least three rounds, in more if they are fast."""
    rounds: list[list[float]] = []
    started = time.monotonic()
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.monotonic() - started < ROUNDS_SECONDS):
        rounds.append([measure() for measure in measures])
    return [statistics.median(column) for column in zip(*rounds)]


def measure_swap_ms(url: str, setup: ModelSetup) -> float:
    """Return the milliseconds for which a weight swap stops decoding, with 32 running requests."""
    from safetensors.torch import load_file

    from ramify.model import publish_weights
    from ramify.trace import PolicyVersion

    async def run(directory: Path) -> float:
        async with contextlib.aclosing(_open_client(url)) as client:
            wave = asyncio.create_task(_send_wave(client, setup.build_prompts(32, 0, 7), NEW_TOKENS, 7))
            await asyncio.sleep(0.1)
            body = {"path": str(directory), "kv": "recompute"}
            response = await send_request(client, "POST", "/update_weights", body)
            await wave
            return 1e3 * float(json.loads(response)["seconds"])

    with tempfile.TemporaryDirectory() as temporary:
        tensors = load_file(setup.directory / "model.safetensors")
        steps = iter(range(1, 10))

        def swap_once() -> float:
            step = next(steps)
            return asyncio.run(
                run(publish_weights(Path(temporary) / f"v{step}", tensors, PolicyVersion("bench", 0, step)))
            )

        return median(swap_once)


@contextlib.contextmanager
def run_transformers(setup: ModelSetup) -> Iterator[Callable[..., float]]:
    """Yield a function (kind, prompts, new_tokens) -> tokens per second, NaN if generation failed."""
    script = str(Path(__file__).with_name("_transformers.py"))
    command = [sys.executable, script, str(setup.directory), setup.dtype, str(setup.threads), setup.device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(COMPETITOR_TIMEOUT, process.kill)
        timer.start()

        def measure_generation(kind: str, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> float:
            assert process.stdin and process.stdout
            print(json.dumps([kind, prompts, new_tokens]), file=process.stdin, flush=True)
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the transformers process ended early")
            return json.loads(line) or float("nan")

        try:
            yield measure_generation
        finally:
            timer.cancel()
            process.kill()


def build_native_command(setup: ModelSetup) -> list[str]:
    engine = {"dtype": setup.dtype, "threads": str(setup.threads), "device": setup.device}
    if setup.device == "cuda":
        engine |= {"max_running_requests": "256", "max_num_batched_tokens": "8192"}
    flags = [arg for key, value in engine.items() for arg in (f"--inference.{key}", value)]
    return [sys.executable, "-m", "ramify", "serve", "-m", str(setup.directory), "--server.port", "0", *flags]


def build_vllm_command(setup: ModelSetup, python: str, port: int) -> list[str]:
    flags = {
        "--dtype": setup.dtype,
        "--port": str(port),
        "--logprobs-mode": "processed_logprobs",
        "--max-model-len": "1024",
    }
    args = [arg for flag in flags.items() for arg in flag]
    serve = [str(Path(python).with_name("vllm")), "serve", str(setup.directory)]
    return [*serve, *args, "--enable-scale-out", "--enforce-eager"]


VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def measure(setup: ModelSetup, vllm_python: str | None) -> list[Row]:
    shapes = [(count, shared) for shared in (0, SHARED_TOKENS) for count in CONCURRENCY[setup.device]]
    on_cpu = setup.device == "cpu"
    rows: list[Row] = []
    with run_server(build_native_command(setup), None, {}) as (url, ready), connect(url) as wave:
        rows.append(Row(f"{setup.name}: start to first token", ready, None, "s", 15.0 if on_cpu else None))
        rows.append(Row(f"{setup.name}: pause of a weight swap, 32 in flight", measure_swap_ms(url, setup), None, "ms"))
        with run_transformers(setup) as measure_transformers:
            for count, shared in shapes:
                rows += compare_with_transformers(
                    setup, WaveBenchmark(wave, setup, count, shared), measure_transformers, count, shared
                )
        if vllm_python and setup.name != "tiny":
            with (
                run_server(
                    build_vllm_command(setup, vllm_python, VLLM_PORT), f"http://127.0.0.1:{VLLM_PORT}", VLLM_ENV
                ) as (vllm_url, _),
                connect(vllm_url) as vllm_wave,
            ):
                for shape in shapes:
                    native_speed, vllm_speed = measure_alternately(
                        WaveBenchmark(wave, setup, *shape), WaveBenchmark(vllm_wave, setup, *shape)
                    )
                    target = 0.9 * vllm_speed if shape == (32, 0) else None
                    label = f"{format_label(setup, *shape)}, beside vLLM"
                    rows.append(Row(label, native_speed, vllm_speed, "tok/s", target, at_least=True))
    return rows


def compare_with_transformers(
    setup: ModelSetup, native: WaveBenchmark, measure_transformers: Callable[..., float], count: int, shared: int
) -> list[Row]:
    prompts = setup.build_prompts(count, shared, 100)
    measure_transformers("static", prompts, 4)
    native_speed, static = measure_alternately(native, lambda: measure_transformers("static", prompts))
    if setup.device != "cpu":
        return [Row(f"{format_label(setup, count, shared)}, beside transformers", native_speed, static, "tok/s")]
    best = max(static, measure_transformers("continuous", prompts))  # once: it allocates its cache each time
    rows = [
        Row(
            f"{format_label(setup, count, shared)}, beside transformers",
            native_speed,
            best,
            "tok/s",
            best,
            at_least=True,
        )
    ]
    if setup.name == "tiny" and (count, shared) == (32, 0):
        rows.append(Row("tiny: 32 at once, beside static", native_speed, static, "tok/s", 3 * static, at_least=True))
    return rows


def measure_sampler(directory: Path) -> list[Row]:
    """Return the rows of the random model on a GPU: in process, and through HTTP with logprobs."""
    from _sampler_gpu import ENGINE, HTTP_SHARE, ROUNDS, WAVES, build_prompts, measure_in_process

    name, (groups, size, length, new_tokens, _) = next(iter(WAVES.items()))
    flags = [arg for key, value in ENGINE.items() for arg in (f"--inference.{key}", str(value))]
    command = [sys.executable, "-m", "ramify", "serve", "-m", str(directory), "--server.port", "0", *flags]
    speeds: list[float] = []
    with (
        run_server([*command, "--inference.device", "cuda"], None, {}) as (url, _),
        connect(url, flat_logprobs=True) as wave,
    ):
        for seed in range(2 + ROUNDS):
            prompts = build_prompts(groups, size, length, seed)
            started = time.perf_counter()
            speeds.append(wave(prompts, new_tokens, seed) / (time.perf_counter() - started))
    print("tok/s through HTTP: " + " ".join(f"{speed:.0f}" for speed in speeds), flush=True)
    rows, in_process = measure_in_process(directory)
    share = Row(
        f"{name}: through HTTP, share of in process", max(speeds) / in_process, None, "x", HTTP_SHARE, at_least=True
    )
    return [*rows, Row(f"{name}: through HTTP", max(speeds), None, "tok/s"), share]


def measure_engines(model: Path, size: str, waves: list[str], vllm_python: str | None) -> list[Row]:
    """Return the milliseconds of a prefill and of a decode step, beside vLLM if its interpreter is given."""
    ours = run_engine(sys.executable, "ramify", model, waves)
    theirs = run_engine(vllm_python, "vllm", model, waves) if vllm_python else {}
    return [Row(f"{size}: {wave}", milliseconds, theirs.get(wave), "ms") for wave, milliseconds in ours.items()]


def run_engine(python: str, kind: str, model: Path, waves: list[str]) -> dict[str, float]:
    """Return what `_engines_gpu.py` measures in an interpreter. Its stderr is shown: it has each wave at once."""
    command = [python, str(Path(__file__).with_name("_engines_gpu.py")), kind, str(model), *waves]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=COMPETITOR_TIMEOUT, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def write_random_model(directory: Path, size: str) -> Path:
    """Write a random model in a process of its own, so that this one uses no GPU memory."""
    script = Path(__file__).with_name("_random_qwen.py")
    subprocess.run([sys.executable, script, directory / size, size], check=True, timeout=REQUEST_TIMEOUT)
    return directory / size


def measure_random_model(args: Any) -> list[Row]:
    """Return the rows of `sampler`, `quantized` or `engines`."""
    size = args.size or (LARGE_SIZE if args.only in ("quantized", "engines") else TARGET_SIZE)
    with tempfile.TemporaryDirectory() as temporary:
        model = write_random_model(args.home or Path(temporary), size)
        if args.only == "engines":
            return measure_engines(model, size, args.waves, args.vllm_python)
        if args.only == "quantized":
            from _sampler_gpu import measure_quantized

            return measure_quantized(model)
        rows = measure_sampler(model)
        return rows if size == TARGET_SIZE else [replace(row, target=None) for row in rows]


def format_label(setup: ModelSetup, count: int, shared: int) -> str:
    return f"{setup.name}: {count} at once" + (f", {shared} shared" if shared else "")


def read_vocab_size(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])


def list_gpu_setups(args: Any) -> Iterator[ModelSetup]:
    """Yield both models in both dtypes."""
    with tempfile.TemporaryDirectory() as temporary:
        directories = {"tiny": TINY} | (
            {"SmolLM2": _ensure_weights(args.smollm2, Path(temporary))} if args.smollm2 else {}
        )
        for name, directory in directories.items():
            if args.only in (None, name.lower()):
                for dtype in ("float32", "bfloat16"):
                    yield ModelSetup(f"{name} {dtype}", directory, dtype, 1, read_vocab_size(directory), "cuda")


def _ensure_weights(directory: Path, copy: Path) -> Path:
    """Return the directory, or a copy with random weights if it has none."""
    if any(directory.glob("*.safetensors")):
        return directory
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(copy)
    return copy


def main() -> int:
    flags: argparse.ArgumentParser = parser(__doc__, shown_flags=["--vllm-python", "--smollm2"])
    flags.add_argument(
        "--only",
        choices=["tiny", "smollm2", "sampler", "quantized", "engines"],
        help="measure one model; `sampler`: a random one; `quantized`: one with its base in 16, 8 and 4 bits; "
        "`engines`: prefill and decode steps of one, beside vLLM",
    )
    flags.add_argument(
        "--size",
        choices=SIZES,
        help=f"size of a random model; by default {TARGET_SIZE} for `sampler`, else {LARGE_SIZE}",
    )
    waves = ", ".join(f"'{wave}'" for wave in ENGINE_WAVES)
    flags.add_argument(
        "--waves",
        nargs="+",
        choices=list(ENGINE_WAVES),
        default=[],
        metavar="WAVE",
        help=f"only these of `engines`: {waves}",
    )
    flags.add_argument("--home", type=Path, help="directory of random models; one that is there is used")
    flags.add_argument("--device", choices=list(CONCURRENCY), default="cpu", help="where the engines run")
    args: Any = flags.parse_args()
    if args.device == "cuda":
        rows = [row for setup in list_gpu_setups(args) for row in measure(setup, None)]
        if args.only in (None, "sampler", "quantized", "engines"):
            rows += measure_random_model(args)
        return finish("benchmarks/inference.py: the native engine on a GPU", rows, args)
    if args.check and not (args.smollm2 and args.vllm_python):
        print("SmolLM2 (--smollm2) and vLLM (--vllm-python) are needed for the comparison", file=sys.stderr)
        return NO_COMPETITOR
    rows: list[Row] = []
    if args.only != "smollm2":
        rows += measure(ModelSetup("tiny", TINY, "float32", 1, read_vocab_size(TINY)), None)
    if args.smollm2 and args.only != "tiny":
        from ramify.model.precision import cpu_has_bfloat16

        dtype = "bfloat16" if cpu_has_bfloat16() else "float32"
        smollm2 = ModelSetup(f"SmolLM2 {dtype}", args.smollm2, dtype, 2, read_vocab_size(args.smollm2))
        rows += measure(smollm2, args.vllm_python)
    return finish("benchmarks/inference.py: the native engine on CPU", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
