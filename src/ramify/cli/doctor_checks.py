"""What the doctor looks at. Each probe answers with findings, and a finding that is not ok says what it would enable.

Nothing heavy is loaded to find out: versions come from package metadata, and torch, which takes seconds to import and
may crash doing so, is asked in a process of its own.
"""

import json
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Literal

from ramify.launch.machine import read_cgroup_limits, usable_cores, usable_memory
from ramify.launch.subprocess_probe import run_probe

VERSION_TIMEOUT = 5.0  # seconds for a program to print its version
TORCH_IMPORT_TIMEOUT = 60.0  # seconds for torch to load from a cold disk

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
    "lora": "training adapters beside the weights, with peft",
    "mcp": "tools that come from MCP servers",
    "parquet": "exports of a run as parquet, and datasets in it",
    "plot": "ramify plot: curves as a picture",
    "tensorboard": "metrics as event files, for TensorBoard",
    "trackio": "metrics to Trackio",
    "wandb": "metrics to Weights & Biases",
    "renderers": "hand-written renderers for model families, where a chat template is not enough",
    "dev": "the checks of this repository: make test, make lint",
}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing the doctor looked at."""

    name: str
    state: Literal["ok", "missing", "broken"]
    found: str
    enables: str = ""
    get: str = ""


def check_system() -> list[CheckResult]:
    """Python, the platform, and how much of the machine is ours."""
    limits = read_cgroup_limits()
    cores, present = usable_cores(limits), os.cpu_count() or 1
    memory = usable_memory(limits)
    return [
        CheckResult("Python", "ok", f"{platform.python_version()} at {sys.executable}"),
        CheckResult("platform", "ok", platform.platform()),
        CheckResult("cores", "ok", f"{cores} usable" + (f" of {present}" if cores < present else "")),
        CheckResult(
            "memory", "ok", _format_gib(memory) + (" (limited by a control group)" if memory == limits.memory else "")
        ),
    ]


def check_torch() -> list[CheckResult]:
    """Torch, the GPUs it can use, and how it computes on the CPU."""
    train = {"enables": EXTRA_PURPOSES["local"], "get": "pip install 'ramify[local]'"}
    gpu = {
        "enables": "training and sampling on a GPU; a CPU is enough for tiny models only",
        "get": "an NVIDIA GPU with its driver, and a CUDA build of torch",
    }
    try:
        installed = version("torch")
    except PackageNotFoundError:
        absent = CheckResult("torch", "missing", "not installed", **train)
        return [absent, CheckResult("CUDA", "missing", "cannot be known without torch", **gpu)]
    answer = run_probe([sys.executable, "-c", TORCH_PROBE_SCRIPT], timeout=TORCH_IMPORT_TIMEOUT)
    if not answer.ok:
        unusable = CheckResult("torch", "broken", f"{installed}, but it does not load: {answer.text}", **train)
        return [unusable, CheckResult("CUDA", "missing", "cannot be known without torch", **gpu)]
    torch_info = json.loads(answer.text.splitlines()[-1])
    build = f"built for CUDA {torch_info['cuda']}" if torch_info["cuda"] else "built without CUDA"
    cpu = torch_info["cpu"]
    results = [
        CheckResult("torch", "ok", f"{torch_info['version']}, {build}"),
        CheckResult("CPU dtype", "ok", f"auto is {cpu['dtype']}"),
        CheckResult("CPU operators", "ok", f"float32 on one thread: {cpu['float32']}; bfloat16: {cpu['bfloat16']}"),
    ]
    if not torch_info["devices"]:
        return [*results, CheckResult("CUDA", "missing", "torch sees no device", **gpu)]
    devices = ", ".join(f"{name} ({_format_gib(memory)})" for name, memory in torch_info["devices"])
    return [*results, CheckResult("CUDA", "ok", devices)]


def check_extras() -> list[CheckResult]:
    """Each extra the package declares, and whether all it asks for is installed."""
    try:
        declared = requires("ramify") or []
    except PackageNotFoundError:
        enables, get = "knowing which extras there are", "pip install -e . in the source tree"
        return [CheckResult("extras", "broken", "ramify is importable, but not installed", enables, get)]
    packages_by_extra: dict[str, list[str]] = {}
    for requirement in declared:
        package = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", requirement)
        if package and extra:
            packages_by_extra.setdefault(extra[1], []).append(package[0])
    return [_check_extra(name, packages) for name, packages in packages_by_extra.items()]


def _check_extra(name: str, packages: list[str]) -> CheckResult:
    versions: list[str] = []
    absent: list[str] = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            absent.append(package)
    if absent:
        get = f"pip install 'ramify[{name}]'"
        return CheckResult(
            f"extra {name}", "missing", f"without {', '.join(absent)}", EXTRA_PURPOSES.get(name, ""), get
        )
    return CheckResult(f"extra {name}", "ok", ", ".join(versions))


def check_bubblewrap() -> list[CheckResult]:
    """Bubblewrap, and whether this machine lets it make a sandbox."""
    enables = "nothing yet: a sandbox runtime, agent programs in a box of their own without root, is to come"
    get = "install the package bubblewrap of your distribution"
    if shutil.which("bwrap") is None:
        return [CheckResult("bubblewrap", "missing", "no bwrap on PATH", enables, get)]
    told = run_probe(["bwrap", "--version"], timeout=VERSION_TIMEOUT)
    tried = run_probe(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], timeout=VERSION_TIMEOUT)
    if told.ok and tried.ok:
        return [CheckResult("bubblewrap", "ok", told.text)]
    get = "allow unprivileged user namespaces on this machine (in a container: on its host)"
    return [CheckResult("bubblewrap", "broken", f"{told.text}, but no sandbox: {tried.text}", enables, get)]


def check_docker() -> list[CheckResult]:
    """The docker client, and whether an engine answers it."""
    enables = "nothing yet: a docker runtime, for tasks that bring their own image, is to come"
    if shutil.which("docker") is None:
        get = "install Docker, or another engine with a docker command"
        return [CheckResult("docker", "missing", "no docker on PATH", enables, get)]
    client = run_probe(["docker", "--version"], timeout=VERSION_TIMEOUT)
    engine = run_probe(["docker", "info", "--format", "{{.ServerVersion}}"], timeout=VERSION_TIMEOUT)
    if engine.ok:
        return [CheckResult("docker", "ok", f"{client.text}; engine {engine.text}")]
    get = "start the engine, and let this user talk to it"
    return [CheckResult("docker", "broken", f"{client.text}; no engine answers: {engine.text}", enables, get)]


def check_node() -> list[CheckResult]:
    """Node, which many agent programs are written for."""
    enables = "agent programs that are npm packages, started by a harness of your own"
    get = "install Node.js 20 or newer"
    if shutil.which("node") is None:
        return [CheckResult("Node", "missing", "no node on PATH", enables, get)]
    told = run_probe(["node", "--version"], timeout=VERSION_TIMEOUT)
    if told.ok:
        return [CheckResult("Node", "ok", told.text.removeprefix("v"))]
    return [CheckResult("Node", "broken", told.text, enables, get)]


def _format_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
