"""Runtimes: the time that a sandbox costs a rollout, and that a command in it costs, for each runtime of this machine.

Measured side by side: a cold sandbox (prepare, start, stop), a warm sandbox as a rollout waits for it (start of a
prepared sandbox, one command, stop in the background of the next), one command in a running sandbox, and 32 sandboxes
at once. Targets: a warm sandbox adds at most 10 ms to a rollout beside `local`, a cold one at most 80 ms. `container`
is measured where an engine and an image are given: `--container-image IMAGE`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from _check import Row, finish, parser

from ramify.core.errors import ConfigInvalid
from ramify.env import Runtime, Task, plugin

REPEATS = 15
COMMANDS = 30
AT_ONCE = 32
WARM_TARGET_MS, COLD_TARGET_MS = 10.0, 80.0
COMMAND = ["true"]


async def measure_cold(make: Callable[[], Runtime]) -> float:
    """Milliseconds until a new sandbox has run its first command."""
    runtime = make()
    start = time.perf_counter()
    await runtime.start(Task())
    await runtime.run(COMMAND, timeout=60)
    elapsed = time.perf_counter() - start
    await runtime.stop()
    return elapsed * 1e3


async def measure_warm(make: Callable[[], Runtime]) -> float:
    """Milliseconds until a sandbox that was prepared before has run its first command."""
    runtime = make()
    await runtime.prepare()
    start = time.perf_counter()
    await runtime.start(Task())
    await runtime.run(COMMAND, timeout=60)
    elapsed = time.perf_counter() - start
    await runtime.stop()
    return elapsed * 1e3


async def measure_command(make: Callable[[], Runtime]) -> float:
    """Milliseconds of a command in a running sandbox."""
    runtime = make()
    await runtime.start(Task())
    await runtime.run(COMMAND, timeout=60)
    start = time.perf_counter()
    for _ in range(COMMANDS):
        await runtime.run(COMMAND, timeout=60)
    elapsed = time.perf_counter() - start
    await runtime.stop()
    return elapsed * 1e3 / COMMANDS


async def measure_stop(make: Callable[[], Runtime]) -> float:
    """Milliseconds to remove a sandbox that has run a command."""
    runtime = make()
    await runtime.start(Task())
    await runtime.run(COMMAND, timeout=60)
    start = time.perf_counter()
    await runtime.stop()
    return (time.perf_counter() - start) * 1e3


async def measure_at_once(make: Callable[[], Runtime]) -> float:
    """Milliseconds per sandbox for many that start, run a command and stop at once."""
    start = time.perf_counter()
    await asyncio.gather(*(measure_cold(make) for _ in range(AT_ONCE)))
    return (time.perf_counter() - start) * 1e3 / AT_ONCE


MEASURES = {
    "cold sandbox and a command": (measure_cold, REPEATS),
    "warm sandbox and a command": (measure_warm, REPEATS),
    "command in a running sandbox": (measure_command, 3),
    "stop": (measure_stop, REPEATS),
    f"{AT_ONCE} sandboxes at once, each": (measure_at_once, 3),
}


def find_runtimes(tables: list[dict[str, Any]]) -> dict[str, Callable[[], Runtime]]:
    """The runtimes that work here, by id; what does not work is said."""
    runtimes: dict[str, Callable[[], Runtime]] = {}
    for table in tables:
        try:
            runtime_class, config = plugin.resolve_plugin("runtime", table)
            runtime_class(config).check_task(Task())
        except ConfigInvalid as error:
            print(f"{table['id']}: not measured: {error.message}")
            continue
        runtimes[table["id"]] = lambda runtime_class=runtime_class, config=config: runtime_class(config)
    return runtimes


async def measure_all(runtimes: dict[str, Callable[[], Runtime]]) -> dict[tuple[str, str], float]:
    """The median of each measure for each runtime; the runtimes take turns, so that all see the same machine."""
    samples: dict[tuple[str, str], list[float]] = {}
    for name, (measure, repeats) in MEASURES.items():
        for _ in range(repeats):
            for runtime_id, make in runtimes.items():
                samples.setdefault((runtime_id, name), []).append(await measure(make))
    return {key: statistics.median(values) for key, values in samples.items()}


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--container-image", metavar="IMAGE", help="an image for the runtime `container`")
    flags.add_argument(
        "--engine-args", default="", metavar="ARGS", help="arguments that the container engine needs here"
    )
    options = flags.parse_args()
    tables: list[dict[str, Any]] = [{"id": "local"}, {"id": "sandbox"}]
    if options.container_image:
        engine_args = options.engine_args.split()
        tables.append({"id": "container", "image": options.container_image, "engine_args": engine_args})
    runtimes = find_runtimes(tables)
    results = asyncio.run(measure_all(runtimes))
    rows = []
    for runtime_id in runtimes:
        for name in MEASURES:
            reference = results["local", name] if runtime_id != "local" else None
            rows.append(Row(f"{runtime_id}: {name}", results[runtime_id, name], reference, "ms"))
    if "sandbox" in runtimes:
        for kind, target in (("warm", WARM_TARGET_MS), ("cold", COLD_TARGET_MS)):
            name = f"{kind} sandbox and a command"
            difference = results["sandbox", name] - results["local", name]
            rows.append(Row(f"{kind} sandbox beside local", difference, None, "ms", target=target))
    return finish("benchmarks/runtimes.py: the cost of a sandbox, and of a command in it", rows, options)


if __name__ == "__main__":
    raise SystemExit(main())
