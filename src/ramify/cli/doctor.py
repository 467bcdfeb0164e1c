"""`ramify doctor`: check what this machine can run, and how to install what is missing.

A missing component is not a failure, because all of them are optional. So the exit code is 0, and the report says what
each component is needed for. No heavy library is imported: versions come from package metadata, and torch, whose import
takes seconds and may crash, is probed in a subprocess.
"""

import json
import os
import platform
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, requires, version
from textwrap import TextWrapper
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramify import __version__
from ramify.core.console import PipeConsole
from ramify.launch.machine import count_usable_cores, get_usable_memory, read_cgroup_limits
from ramify.model.resolve import fetch_config
from ramify.processes.program import run_program
from ramify.rollout.runtime.bwrap import find_unsupported_reason

STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}
VERSION_TIMEOUT = 5.0  # seconds for a program to print its version
TORCH_IMPORT_TIMEOUT = 60.0  # seconds, for an import from a cold disk

LABEL_WIDTH = 12  # columns before the values of a model

TORCH_PROBE_SCRIPT = """
import json, torch
from ramify.model.precision import describe_cpu

devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": [[device.name, device.total_memory] for device in devices],
    "cpu": describe_cpu(),
}))
"""

EXTRA_PURPOSES = {
    "local": "training, and sampling with the native engine, on this machine",
    "math": "the reward math-verify of the taskset dataset",
    "mcp": "tools of MCP servers",
    "openenv": "servers of the taskset openenv on this machine; the taskset itself does not need it",
    "parquet": "exports to parquet, and datasets in parquet or arrow files",
    "plot": "ramify plot",
    "vision": "images in prompts",
    "prime": "the runtime hosted, with sandboxes of Prime Intellect",
    "ray": "runs on several machines: ramify rl --cluster ray",
    "reasoning-gym": "the taskset reasoning-gym",
    "tensorboard": "metrics in TensorBoard",
    "textarena": "the taskset textarena",
    "trackio": "metrics in Trackio",
    "verifiers": "the taskset verifiers, with environments of its generation v1",
    "verifiers-v0": "the taskset verifiers, with environments of its generation v0",
    "wandb": "metrics in Weights & Biases",
    "renderers": "hand-written renderers of model families whose chat template is not sufficient",
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The state of one component; if it is not ok, what it is needed for and how to install or fix it."""

    name: str
    state: Literal["ok", "missing", "broken"]
    detail: str
    needed_for: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the result as an entry of `ramify doctor --json`."""
        keys = ("name", "state", "found", "enables", "get")
        return dict(zip(keys, (self.name, self.state, self.detail, self.needed_for, self.fix)))


def run(options: Namespace) -> int:
    """Run all checks and print the report; with `--model`, print how that model runs."""
    if options.model is not None:
        return _print_model(options.model, as_json=options.json)
    results = run_checks()
    if options.json:
        print(json.dumps({"version": __version__, "findings": [result.to_json() for result in results]}, indent=2))
    else:
        print_report(results, PipeConsole())
    return 0


def _print_model(name: str, *, as_json: bool) -> int:
    """Print the row of `docs/models.md` for a model. Return 1 if engine and trainer refuse it."""
    from ramify.model.support import REFUSED, read_directory_support  # transformers, and with it torch

    support = read_directory_support(fetch_config(name))
    if as_json:
        print(json.dumps(asdict(support), indent=2))
    else:
        console, indent = PipeConsole(), " " * LABEL_WIDTH
        wrapper = TextWrapper(console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        columns = [(field.name, getattr(support, field.name)) for field in fields(support) if field.name != "notes"]
        for label, value in (*columns, *(("note", note) for note in support.notes)):
            text = Text(wrapper.fill(f"{label:{LABEL_WIDTH}}{value}"))
            text.stylize("bold", 0, LABEL_WIDTH)
            console.print(text, soft_wrap=True)
    return int(support.engine == support.trainer == REFUSED)


def run_checks() -> list[CheckResult]:
    """Run all checks concurrently, because they wait for other programs, and return their results in order."""
    with ThreadPoolExecutor() as pool:
        checks = (check_system, check_torch, check_extras, check_node, check_sandbox)
        futures = [pool.submit(check) for check in checks]
        return [result for future in futures for result in future.result()]


def print_report(results: Sequence[CheckResult], console: Console) -> None:
    """Print the results as a table."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for result in results:
        table.add_row(Text(result.state, STYLES[result.state]), Text(result.name, "bold"), Text(result.detail))
        if result.state != "ok":
            table.add_row("", "", Text(f"needed for: {result.needed_for}"))
            table.add_row("", "", Text(f"install:    {result.fix}"))
    console.print(Text(f"ramify {__version__}", "bold"))
    console.print(table)


def check_system() -> list[CheckResult]:
    """Check Python, the platform, and the usable cores and memory."""
    limits = read_cgroup_limits()
    cores, present = count_usable_cores(limits), os.cpu_count() or 1
    memory = get_usable_memory(limits)
    return [
        CheckResult("Python", "ok", f"{platform.python_version()} at {sys.executable}"),
        CheckResult("platform", "ok", platform.platform()),
        CheckResult("cores", "ok", f"{cores} usable" + (f" of {present}" if cores < present else "")),
        CheckResult("memory", "ok", _format_gib(memory) + (" (cgroup limit)" if memory == limits.memory else "")),
    ]


def check_torch() -> list[CheckResult]:
    """Check torch, the GPUs it can use, and its CPU dtype and operators."""
    torch_advice = (EXTRA_PURPOSES["local"], "pip install 'ramify[local]'")
    gpu_advice = (
        "training and sampling on a GPU; a CPU is sufficient for tiny models only",
        "an NVIDIA GPU with its driver, and a CUDA build of torch",
    )
    unknown_gpu = CheckResult("CUDA", "missing", "unknown: torch is not available", *gpu_advice)
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return [CheckResult("torch", "missing", "not installed", *torch_advice), unknown_gpu]
    probe = run_program([sys.executable, "-c", TORCH_PROBE_SCRIPT], timeout=TORCH_IMPORT_TIMEOUT)
    if not probe.ok:
        detail = f"{installed}, but it cannot be imported: {probe.text}"
        return [CheckResult("torch", "broken", detail, *torch_advice), unknown_gpu]
    torch_info = json.loads(probe.text.splitlines()[-1])
    build = f"built for CUDA {torch_info['cuda']}" if torch_info["cuda"] else "built without CUDA"
    cpu = torch_info["cpu"]
    results = [
        CheckResult("torch", "ok", f"{torch_info['version']}, {build}"),
        CheckResult("CPU dtype", "ok", f"auto is {cpu['dtype']}"),
        CheckResult("CPU operators", "ok", f"float32: {cpu['float32']}; bfloat16: {cpu['bfloat16']}"),
    ]
    if not torch_info["devices"]:
        return [*results, CheckResult("CUDA", "missing", "torch sees no device", *gpu_advice)]
    devices = ", ".join(f"{name} ({_format_gib(memory)})" for name, memory in torch_info["devices"])
    return [*results, CheckResult("CUDA", "ok", devices)]


def check_extras() -> list[CheckResult]:
    """Check for each extra of the package whether all its requirements are installed."""
    try:
        declared = requires("ramify") or []
    except PackageNotFoundError:
        detail = "ramify is on the path but not installed as a package"
        return [CheckResult("extras", "broken", detail, "the list of extras", "pip install -e . in the source tree")]
    packages_by_extra: dict[str, list[str]] = {}
    for requirement in declared:
        package = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", requirement)
        if package and extra:
            packages_by_extra.setdefault(extra[1], []).append(package[0])
    return [_check_extra(name, packages) for name, packages in packages_by_extra.items()]


def _check_extra(name: str, packages: list[str]) -> CheckResult:
    versions: list[str] = []
    missing: list[str] = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        advice = (EXTRA_PURPOSES.get(name, ""), f"pip install 'ramify[{name}]'")
        return CheckResult(f"extra {name}", "missing", f"missing {', '.join(missing)}", *advice)
    return CheckResult(f"extra {name}", "ok", ", ".join(versions))


def check_node() -> list[CheckResult]:
    """Check Node, which many agent programs need."""
    advice = ("agent programs that are npm packages, started by your own harness", "install Node.js 20 or newer")
    if shutil.which("node") is None:
        return [CheckResult("Node", "missing", "no node on PATH", *advice)]
    probe = run_program(["node", "--version"], timeout=VERSION_TIMEOUT)
    if probe.ok:
        return [CheckResult("Node", "ok", probe.text.removeprefix("v"))]
    return [CheckResult("Node", "broken", probe.text, *advice)]


def check_sandbox() -> list[CheckResult]:
    """Check that bubblewrap can start a sandbox."""
    if (reason := find_unsupported_reason()) is None:
        return [CheckResult("bubblewrap", "ok", "a sandbox can be started")]
    advice = (
        "the runtime sandbox, which isolates the programs of agents",
        "install bubblewrap 0.8 or newer and allow user namespaces, or use the runtime container",
    )
    return [CheckResult("bubblewrap", "broken" if shutil.which("bwrap") else "missing", reason, *advice)]


def _format_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
