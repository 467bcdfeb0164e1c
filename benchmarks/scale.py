"""Scale: how many rollouts a second the control plane sustains, and how it grows.

The real orchestrator, ledger and wire run as in a run; env servers, engine and trainer are stubs in one other process
(`_stub_world.py`), which replay episodes of 2 kB. Measured are rollouts per second with 1 to 256 env servers, with up
to 10,000 groups in flight, and after a start from a ledger of up to 1,000,000 groups; the time of that start; and the
orchestrator's memory. `--quick` measures only what `--check` checks.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _check import Row, finish, parser
from _long_ledger import write_ledger

from ramify.processes.wire.listener import PortReservation

GROUP_SIZE, GROUPS_PER_BATCH = 8, 64
WARMUP_SECONDS, MEASURED_SECONDS = 5.0, 15.0
ENV_SERVERS = (1, 16, 64, 256)
GROUPS_IN_FLIGHT = (128, 1000, 10_000)
LEDGER_GROUPS, LEDGER_GROUP_SIZE = (10_000, 100_000, 1_000_000), 2


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run of the orchestrator showed."""

    rollouts_per_second: float
    start_seconds: float
    """From the start of the command to the first trained step."""
    cpu_milliseconds: float
    """CPU time of the orchestrator per rollout."""
    memory_growth: float
    """The memory at the end, divided by that after the warm-up."""


def write_config(folder: Path, world: dict[str, Any], addresses: dict[str, str], groups_in_flight: int) -> Path:
    """Write the configuration of the orchestrator; the allowed staleness gives slots for `groups_in_flight` groups."""
    max_staleness = round(1.3 * groups_in_flight / GROUPS_PER_BATCH)
    lines = [
        'name = "run"',
        f'output = "{folder}"',
        "max_steps = 1000000",
        "seq_len = 512",
        'model = { name = "tiny" }',
        f'inference = {{ engine = "external", base_url = ["{world["engine"]}"] }}',
        "[orchestrator]",
        f"batch_size = {GROUP_SIZE * GROUPS_PER_BATCH}",
        f"group_size = {GROUP_SIZE}",
        f"max_staleness = {max_staleness}",
        "max_concurrency = 1024",
        f'address = "{addresses["trainer"]}"',
        f'status_address = "{addresses["status"]}"',
    ]
    for number, address in enumerate(world["env_servers"]):
        lines += ["[[train]]", f'name = "source{number}"', 'taskset = { id = "stub" }', f'address = "{address}"']
        lines += ["sampling = { max_tokens = 64 }", "max_turns = 1"]
    file = folder / "run.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


@contextlib.contextmanager
def start_world(settings: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start the stubs; yield their process and their addresses."""
    command = [sys.executable, str(Path(__file__).with_name("_stub_world.py")), json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def measure(*, num_env_servers: int = 1, groups_in_flight: int = 512, ledger_groups: int = 0) -> Measurement:
    """Run the orchestrator for a while."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if ledger_groups:
            write_ledger(folder / "run", ledger_groups, LEDGER_GROUP_SIZE, GROUPS_PER_BATCH, "source0")
        reservation = PortReservation({"trainer": "tcp://127.0.0.1:0", "status": "http://127.0.0.1:0"})
        addresses = reservation.addresses
        reservation.close()
        settings = {"orchestrator": addresses["trainer"], "num_env_servers": num_env_servers}
        world_process, world = stack.enter_context(start_world(settings))
        file = write_config(folder, world, addresses, groups_in_flight)
        log = stack.enter_context((folder / "orchestrator.log").open("w"))
        started_at = time.time()
        command = [sys.executable, "-m", "ramify", "orchestrator", "@", str(file)]
        orchestrator = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        stack.callback(orchestrator.kill)
        try:
            return observe(world_process, psutil.Process(orchestrator.pid), started_at)
        except (RuntimeError, psutil.Error) as error:
            raise SystemExit(f"{error}\n{(folder / 'orchestrator.log').read_text()[-3000:]}") from error


def observe(world: subprocess.Popen[str], orchestrator: psutil.Process, started_at: float) -> Measurement:
    """Read the steps of the trainer until enough time has passed."""
    assert world.stdout is not None
    first_at: float | None = None
    begun: tuple[float, int, float, int] | None = None  # time, step, CPU time and memory after the warm-up
    for line in world.stdout:
        step, now = json.loads(line)["step"], json.loads(line)["time"]
        first_at = first_at or now
        cpu_seconds, memory = sum(orchestrator.cpu_times()[:2]), orchestrator.memory_info().rss
        if begun is None and now >= first_at + WARMUP_SECONDS:
            begun = now, step, cpu_seconds, memory
        if begun is not None and now >= begun[0] + MEASURED_SECONDS:
            begun_at, begun_step, begun_cpu, begun_memory = begun
            seconds = now - begun_at
            num_rollouts = (step - begun_step) * GROUP_SIZE * GROUPS_PER_BATCH
            return Measurement(
                num_rollouts / seconds,
                first_at - started_at,
                1e3 * (cpu_seconds - begun_cpu) / num_rollouts,
                memory / begun_memory,
            )
    raise RuntimeError("the stub trainer ended")


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--quick", action="store_true", help="measure only what has a target")
    args = flags.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    rows: list[Row] = []
    base = measure(num_env_servers=4)
    rows.append(Row("rollouts, 4 env servers", base.rollouts_per_second, None, "/s", 1000.0, at_least=True))
    rows.append(Row("CPU time of the orchestrator per rollout", base.cpu_milliseconds, None, "ms"))
    for count in () if args.quick else ENV_SERVERS:
        result = measure(num_env_servers=count)
        rows.append(Row(f"rollouts, {count} env servers", result.rollouts_per_second, None, "/s", at_least=True))
    for count in () if args.quick else GROUPS_IN_FLIGHT:
        result = measure(groups_in_flight=count)
        rows.append(Row(f"rollouts, {count} groups in flight", result.rollouts_per_second, None, "/s", at_least=True))
    for count in LEDGER_GROUPS[-1:] if args.quick else LEDGER_GROUPS:
        result = measure(ledger_groups=count)
        is_largest = count == LEDGER_GROUPS[-1]
        name = f"ledger of {count:,} groups"
        rows.append(Row(f"{name}: start to first step", result.start_seconds, None, "s", 10.0 if is_largest else None))
        rows.append(Row(f"{name}: rollouts", result.rollouts_per_second, None, "/s", at_least=True))
        growth = Row(f"{name}: memory growth", result.memory_growth, None, "x", 1.05 if is_largest else None)
        rows.append(growth)
    return finish("benchmarks/scale.py: the control plane with stub env servers", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
