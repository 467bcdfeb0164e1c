"""Do runs that the planner accepts fit the GPU? Random configurations of three models on one GPU of 24 to 140 GiB.

Each configuration is planned as `ramify rl` plans it. Then one process, whose memory is limited to the GPU of the plan,
holds the engine and the trainer with the planned sizes: it fills the KV cache, runs the trainer's trial, and trains the
two largest steps, one of full groups and one of paths of `seq_len` tokens. A limit that the trainer had to lower is
reported too. Several configurations run side by side while their planned sizes fit the GPU.

With `--hand`, six settings made by hand are tried in some cases. If the planner accepts the case, the speed with the
planned sizes is compared with those that fit. If it refuses the case, the engine has the smallest sizes that can be
planned, and the check requires that no setting fits.

The cases follow from `--seed` and `--memories`. Each is printed as soon as it has ended and added to `plans.jsonl` in
`--output`, so what a killed run has measured is not lost. `--plan-only` needs no GPU: it prints the plans, and the
time of a step that the planner expects with them and with the settings by hand, relative to one huge pack.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _check import NO_COMPETITOR, Row, finish, parser

from ramify.core.config import parse
from ramify.core.errors import ClusterTooSmall, GpuMemoryFull
from ramify.infer.config import EngineConfig
from ramify.launch.capacity import fits, place_run, plan_sizes
from ramify.launch.launcher import ClusterNode
from ramify.launch.process_configs import build_serve_config
from ramify.orchestrate.run_config import RunConfig
from ramify.train.memory import ModelSize
from ramify.train.step_sizes import estimate_step_cost

GIB = 1 << 30
MODELS, MEMORIES = ("0.5b", "4b", "8b"), (24, 48, 80, 140)
SEQ_LENS, GROUP_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768), (4, 8, 16, 32, 64)
CONTEXTS_GIB = 2  # of the two processes of a run, outside the allocator of torch
USABLE_GIB = 138  # of the GPU, by all processes
MAX_RUNNING, MODEL_TIMEOUT, POLL_INTERVAL = 5, 400.0, 0.2
HAND_SETTINGS = ((16384, 0.0), (16384, 1.0), (8192, 0.0), (8192, 1.0), (4096, 0.0), (4096, 0.5))
HAND_SPEED = 0.85
NEW_TOKENS = 8
TASKSET = Path(__file__).with_name("_long_prompts.py")
RESULTS_FILE = "plans.jsonl"


@dataclass(frozen=True, slots=True)
class Plan:
    """The configuration of a case with its sizes, the smallest if it is refused."""

    config: RunConfig
    gpu_gib: float  # GPU memory that the sizes take; all of it if the case is refused
    refusal: str = ""


def draw_cases(count: int, seed: int, memories: Sequence[int]) -> list[dict[str, Any]]:
    """Return random configurations."""
    rng = random.Random(seed)
    choices = {"model": MODELS, "lora": (True, False), "seq_len": SEQ_LENS, "group": GROUP_SIZES, "memory": memories}
    return [{"number": n, **{key: rng.choice(values) for key, values in choices.items()}} for n in range(count)]


def plan_case(case: dict[str, Any], model: Path) -> Plan:
    """Plan a case as `ramify rl` would."""
    flags = {
        "model.name": model,
        "seq_len": case["seq_len"],
        "orchestrator.group_size": case["group"],
        "train": json.dumps([{"taskset": {"id": str(TASKSET)}, "sampling": {"max_tokens": case["seq_len"] // 2}}]),
        "trainer.optim.lr": "1e-6",
        "trainer.lora.enabled": str(case["lora"]).lower(),
        "max_steps": 8,
    }
    config = parse(RunConfig, [argument for key, value in flags.items() for argument in (f"--{key}", str(value))])
    node = build_node(case)
    planned, _ = plan_sizes(config, [node])
    try:
        memory = place_run(planned, [node], user_config=config).list_memory()
    except ClusterTooSmall as error:
        return Plan(planned, case["memory"], error.message.splitlines()[-1])
    return Plan(planned, max(needed for name, needed, _ in memory if name.startswith("GPU")) / GIB)


def build_node(case: dict[str, Any]) -> ClusterNode:
    """Return the machine of a case."""
    memory = case["memory"] * GIB
    return ClusterNode("this", "127.0.0.1", 16, 1, gpu_memory=memory, is_head=True, allows_sharing=True)


def format_plan(case: dict[str, Any], model: Path) -> str:
    """Return the plan of a case, and what the planner expects of it and of the settings by hand."""
    size = ModelSize.from_name(str(model))
    assert size is not None
    kind = "lora" if case["lora"] else "all"
    name = f"{case['number']:2} {case['model']:>4} {kind:>4} {case['memory']:3} GiB"
    name += f" {case['seq_len']:5} x {case['group']:2}"
    plan = plan_case(case, model)
    config = plan.config
    trainer, inference = config.trainer, config.inference
    assert isinstance(inference, EngineConfig) and inference.kv_cache_tokens is not None

    def expect(num_tokens: int, num_layers: int) -> str:
        """Return the relative time of a step, and whether it fits beside the planned engine."""
        cost = estimate_step_cost(trainer, size, case["seq_len"], num_tokens=num_tokens, num_layers=num_layers)
        sizes = {"pack_tokens": num_tokens, "recompute_layers": num_layers}
        tried = config.model_copy(update={"trainer": trainer.model_copy(update=sizes)})
        return f"{num_tokens}/{num_layers} {cost:.2f}{'' if fits(tried, [build_node(case)]) else ' too large'}"

    by_hand = ", ".join(expect(*limits) for limits in list_hand_limits(case, size.num_layers))
    if plan.refusal:
        return f"{name}: refused: {plan.refusal}; by hand {by_hand}"
    full_requests = inference.kv_cache_tokens / case["seq_len"]
    sizes = [
        expect(trainer.max_pack_tokens, trainer.num_recomputed_layers),
        f"moments {trainer.optim.moments}",
        f"running {inference.max_running_requests}",
        f"cache {inference.kv_cache_tokens} ({full_requests:.3g} at full length)",
    ]
    return f"{name}: {', '.join(sizes)}; by hand {by_hand}"


def list_hand_limits(case: dict[str, Any], num_layers: int) -> list[tuple[int, int]]:
    """Return the tokens of a pack and the recomputed layers of each setting made by hand, without repetitions."""
    limits = [(max(tokens, case["seq_len"]), round(share * num_layers)) for tokens, share in HAND_SETTINGS]
    return list(dict.fromkeys(limits))


def run_case(case: dict[str, Any], model: Path) -> dict[str, Any]:
    """Hold engine and trainer of a case in memory, and let them work; return whether they fit."""
    import torch

    plan = plan_case(case, model)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (case["memory"] - CONTEXTS_GIB) * GIB / total))
    if plan.refusal:
        return _try_refused_case(case, model, plan)
    config, lines = plan.config, list[str]()
    assert isinstance(config.inference, EngineConfig)
    engine = start_engine(model, config)
    trainer = _build_trainer(model, config, lines)
    _fill_engine(engine, config)
    for packs in _list_largest_steps(trainer, case):
        trainer.step(_make_batch(packs))
    result: dict[str, Any] = {
        "outcome": "lowered" if any(line.startswith("memory:") for line in lines) else "fits",
        "detail": f"{trainer.activations.limits}, moments {trainer.config.optim.moments}, "
        f"cache {config.inference.kv_cache_tokens}",
        "peak": torch.cuda.max_memory_reserved() / GIB + CONTEXTS_GIB,
    }
    return {**result, "speeds": _compare_by_hand(trainer, case)} if case["hand"] else result


def _try_refused_case(case: dict[str, Any], model: Path, plan: Plan) -> dict[str, Any]:
    """Return which settings by hand fit beside the engine, although the case is refused."""
    detail, fitting = plan.refusal, list[str]()
    try:
        engine = start_engine(model, plan.config)
        trainer = _build_trainer(model, plan.config, [])
        _fill_engine(engine, plan.config)
    except (RuntimeError, GpuMemoryFull) as error:
        if not _lacks_memory(error):
            raise
        detail += f"; engine and trainer do not fit: {str(error).splitlines()[0]}"
    else:
        fitting = list_fitting_limits(trainer, case)
    return {"outcome": "refused", "detail": detail, "fits_by_hand": fitting}


def list_fitting_limits(trainer: Any, case: dict[str, Any]) -> list[str]:
    """Return the settings by hand with which the trainer takes the largest steps."""
    fitting: list[str] = []
    for limits in _list_activation_limits(trainer, case):
        _set_limits(trainer, limits)
        if all(_try_step(trainer, packs) is not None for packs in _list_largest_steps(trainer, case)):
            fitting.append(str(limits))
    return fitting


def start_engine(model: Path, config: RunConfig) -> Any:
    """Return the engine of the run without its thread, with adapters if the run has them."""
    from ramify.infer.engine import Engine

    return Engine.load(str(model), EngineConfig(**build_serve_config(config, is_trainer_on_gpu=True)["inference"])).core


def _build_trainer(model: Path, config: RunConfig, lines: list[str]) -> Any:
    import torch

    from ramify.train.build import build_trainer
    from ramify.train.distributed import Ranks

    return build_trainer(
        model,
        config.trainer,
        Ranks(torch.device("cuda", 0)),
        quantize=config.model.quantize,
        seq_len=config.seq_len,
        log=lines.append,
    )


def _fill_engine(core: Any, config: RunConfig) -> None:
    """Run as many requests as the engine runs at a time, as long as its cache holds them."""
    from ramify.infer.request import SamplingParams

    limits = core.config.get_limits(gpu=True)
    length = min(config.seq_len, core.config.kv_cache_tokens // limits.max_running_requests) - NEW_TOKENS - 1
    rng = random.Random(0)
    for seed in range(limits.max_running_requests):
        prompt = [rng.randrange(300, 30_000) for _ in range(max(16, length))]
        core.enqueue(core.create_request(prompt, SamplingParams(max_tokens=NEW_TOKENS, seed=seed)))
    while core.has_unfinished_requests:
        core.step()


def _list_largest_steps(trainer: Any, case: dict[str, Any]) -> list[list[Any]]:
    """Return the packs of two steps: of groups that share half of their tokens, and of paths, all trained."""
    from _gpu import TraceMaker

    from ramify.trace import build_forest
    from ramify.train import pack_forests

    maker, pack_tokens, seq_len = TraceMaker(30_000), trainer.activations.limits.pack_tokens, case["seq_len"]
    prompt = maker.ids(seq_len // 2)
    group = [maker.chain(prompt, seq_len // 2) for _ in range(case["group"])]
    paths = [[maker.chain(maker.ids(16), seq_len - 16)] for _ in range(max(1, 2 * pack_tokens // seq_len))]
    steps = [pack_forests([build_forest(group)], pack_tokens), pack_forests(_build_forests(paths), pack_tokens)]
    return [packs[:3] for packs in steps]  # more packs take no more memory


def _build_forests(groups: list[Any]) -> list[Any]:
    from ramify.trace import build_forest

    return [build_forest(group) for group in groups]


def _make_batch(packs: list[Any]) -> Any:
    from ramify.train import Batch

    return Batch.from_packs(0, packs)


def _compare_by_hand(trainer: Any, case: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a step of the same rollouts, planned and with each setting by hand that fits."""
    from _gpu import TraceMaker

    from ramify.train import pack_forests

    maker, seq_len = TraceMaker(30_000), case["seq_len"]
    shares = [maker.ids(seq_len // 2) for _ in range(max(1, 65_536 // (seq_len * case["group"] // 2)))]
    forests = _build_forests([[maker.chain(prompt, seq_len // 2) for _ in range(case["group"])] for prompt in shares])
    planned = trainer.activations.limits
    seconds: dict[str, float] = {}
    for limits in [planned, *_list_activation_limits(trainer, case)]:
        _set_limits(trainer, limits)
        packs = pack_forests(forests, limits.pack_tokens)
        if _try_step(trainer, packs) is not None and (metrics := _try_step(trainer, packs)) is not None:
            seconds["planned" if limits is planned else str(limits)] = metrics.seconds
    return seconds


def _list_activation_limits(trainer: Any, case: dict[str, Any]) -> list[Any]:
    from ramify.train.activation_limits import ActivationLimits

    num_layers = trainer.policy.model.config.num_hidden_layers
    return [ActivationLimits(*limits) for limits in list_hand_limits(case, num_layers)]


def _set_limits(trainer: Any, limits: Any) -> None:
    trainer.activations.planned = limits
    trainer.activations.set_limits(limits)


def _try_step(trainer: Any, packs: list[Any]) -> Any:
    """Take a step and return its metrics; None if it does not fit within the limits as they are set."""
    limits = trainer.activations.limits
    try:
        metrics = trainer.step(_make_batch(packs))
    except (RuntimeError, GpuMemoryFull) as error:
        if not _lacks_memory(error):
            raise
        metrics = None
    if metrics is None:
        trainer.free_memory()
    return metrics if trainer.activations.limits == limits else None


def _lacks_memory(error: Exception) -> bool:
    from ramify.model.device_memory import is_out_of_memory

    return isinstance(error, GpuMemoryFull) or is_out_of_memory(error)


def run_all(cases: list[dict[str, Any]], home: Path, args: Any) -> list[dict[str, Any]]:
    """Run cases in processes of their own, side by side while their memory fits.

    After `--limit` seconds no case is started, and those that run are ended.
    """
    started_at, results, waiting = time.monotonic(), list[dict[str, Any]](), list[dict[str, Any]]()

    def add_result(result: dict[str, Any]) -> None:
        results.append(result)
        line = json.dumps({**result, "at_seconds": round(time.monotonic() - started_at, 1)})
        print(line, flush=True)
        with (args.output / RESULTS_FILE).open("a") as file:
            file.write(f"{line}\n")

    for case in sorted(cases, key=lambda case: case["memory"]):
        plan, by_hand = plan_case(case, home / case["model"]), case["number"] in args.hand
        if plan.refusal and not by_hand:
            add_result({**case, "outcome": "refused", "detail": plan.refusal})
        else:
            is_timed = by_hand and not plan.refusal
            waiting.append({**case, "hand": by_hand, "is_timed": is_timed, "planned": round(plan.gpu_gib, 1)})
    running: list[tuple[dict[str, Any], subprocess.Popen[bytes], Path, float]] = []
    last_end = started_at + args.limit
    while running or (waiting and time.monotonic() < last_end):
        for entry in [entry for entry in running if _has_ended(*entry)]:
            running.remove(entry)
            add_result(_read_result(*entry))
        free = USABLE_GIB - sum(_count_gib(entry[0]) for entry in running)
        case = next((case for case in waiting if _count_gib(case) <= free), None)
        if case is not None and time.monotonic() < last_end and len(running) < MAX_RUNNING:
            waiting.remove(case)
            log = args.output / f"case-{case['number']}.log"
            command = [sys.executable, __file__, "--case", json.dumps(case), "--home", str(home)]
            with log.open("w") as output:
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            deadline = min(last_end, time.monotonic() + (2 if case["hand"] else 1) * args.case_timeout)
            running.append((case, process, log, deadline))
            continue
        time.sleep(POLL_INTERVAL)
    for case in waiting:
        add_result({**case, "outcome": "not finished", "detail": f"the limit of {args.limit:g} s was reached"})
    return results


def _count_gib(case: dict[str, Any]) -> float:
    """Return the GiB that a case takes of the GPU; one whose steps are timed runs alone."""
    return USABLE_GIB if case["is_timed"] else min(case["planned"], USABLE_GIB)


def _has_ended(case: dict[str, Any], process: subprocess.Popen[bytes], log: Path, deadline: float) -> bool:
    if process.poll() is None and time.monotonic() > deadline:
        process.kill()
        process.wait()
    return process.poll() is not None


def _read_result(case: dict[str, Any], process: subprocess.Popen[bytes], log: Path, deadline: float) -> dict[str, Any]:
    text = log.read_text()
    lines = text.splitlines()
    if process.returncode == 0 and lines:
        return {**case, **json.loads(lines[-1])}
    is_full = "out of memory" in text.lower() or "GpuMemoryFull" in text
    outcome = "out of memory" if is_full else "not finished" if time.monotonic() > deadline else "failed"
    return {**case, "outcome": outcome, "detail": "\n".join(lines[-4:])}


def build_rows(results: list[dict[str, Any]]) -> list[Row]:
    """Return the rows of all cases that ran."""
    counts = {
        name: float(sum(result["outcome"] == name for result in results))
        for name in ("fits", "refused", "not finished")
    }
    rows = [Row(f"configurations: {name}", count, None, "") for name, count in counts.items()]
    for name in ("lowered", "out of memory", "failed"):
        count = float(sum(result["outcome"] == name for result in results))
        rows.append(Row(f"configurations: {name}", count, None, "", None if name == "lowered" else 0.0))
    for result in results:
        if speeds := result.get("speeds"):
            best = min(speeds.values())
            name = f"case {result['number']}: speed over the best of {len(speeds) - 1} by hand"
            rows.append(Row(name, best / speeds["planned"], None, "x", HAND_SPEED, at_least=True))
        if (fitting := result.get("fits_by_hand")) is not None:
            name = f"case {result['number']}: settings by hand that fit, although it is refused"
            rows.append(Row(name, float(len(fitting)), None, "", 0.0))
    return rows


def print_plans(cases: list[dict[str, Any]]) -> int:
    """Print the plan of each case, for models that are not made."""
    from _random_qwen import write_shapes

    with tempfile.TemporaryDirectory() as home:
        for size in dict.fromkeys(case["model"] for case in cases):
            write_shapes(Path(home, size), size)
        for case in cases:
            print(format_plan(case, Path(home, case["model"])), flush=True)
    return 0


def main() -> int:
    flags: argparse.ArgumentParser = parser(__doc__)
    flags.add_argument("--cases", type=int, default=20, help="configurations")
    flags.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="only these of the configurations")
    flags.add_argument("--seed", type=int, default=0, help="seed of the configurations")
    flags.add_argument("--memories", type=int, nargs="+", default=MEMORIES, help="GiB of the GPUs")
    flags.add_argument(
        "--hand",
        type=int,
        nargs="+",
        default=[],
        metavar="NUMBER",
        help="cases in which settings by hand are tried, too",
    )
    flags.add_argument("--limit", type=float, default=3600.0, help="seconds after which no case is started or runs on")
    flags.add_argument("--case-timeout", type=float, default=200.0, help="seconds of a case; twice with --hand")
    flags.add_argument("--plan-only", action="store_true", help="print the plans, on any machine")
    flags.add_argument("--output", type=Path, help=f"directory of {RESULTS_FILE} and logs; default: --home")
    flags.add_argument("--home", type=Path, help="directory of the models; a model that is there is not made again")
    flags.add_argument("--case", help=argparse.SUPPRESS)
    args: Any = flags.parse_args()
    if args.case:
        case = json.loads(args.case)
        print(json.dumps(run_case(case, args.home / case["model"])))
        return 0
    numbers = args.only or range(args.cases)
    if unknown := [number for number in (*numbers, *args.hand) if number not in range(args.cases)]:
        flags.error(f"configuration {unknown[0]} does not exist; --only and --hand take 0 to {args.cases - 1}")
    drawn = draw_cases(args.cases, args.seed, args.memories)
    cases = [drawn[number] for number in numbers]
    if args.plan_only:
        return print_plans(cases)
    import torch

    if not torch.cuda.is_available():
        print("this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return NO_COMPETITOR
    with tempfile.TemporaryDirectory() as temporary:
        home = args.home or Path(temporary)
        for size in dict.fromkeys(case["model"] for case in cases):
            script = Path(__file__).with_name("_random_qwen.py")
            subprocess.run([sys.executable, script, home / size, size], check=True, timeout=MODEL_TIMEOUT)
        args.output = args.output or home
        args.output.mkdir(parents=True, exist_ok=True)
        results = run_all(cases, home, args)
    return finish("benchmarks/plans_gpu.py: planned sizes on one GPU", build_rows(results), args)


if __name__ == "__main__":
    raise SystemExit(main())
