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

from ramify.cli.ask import ask
from ramify.cli.machine import limits, usable_cores, usable_memory

QUICK = 5.0  # seconds for a program to print its version
SLOW = 60.0  # seconds for torch to load from a cold disk

TORCH = """
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

EXTRAS = {
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
class Finding:
    """One thing the doctor looked at."""

    name: str
    state: Literal["ok", "missing", "broken"]
    found: str
    enables: str = ""
    get: str = ""


def system() -> list[Finding]:
    """Python, the platform, and how much of the machine is ours."""
    limit = limits()
    cores, present = usable_cores(limit), os.cpu_count() or 1
    memory = usable_memory(limit)
    return [
        Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}"),
        Finding("platform", "ok", platform.platform()),
        Finding("cores", "ok", f"{cores} usable" + (f" of {present}" if cores < present else "")),
        Finding("memory", "ok", _size(memory) + (" (limited by a control group)" if memory == limit.memory else "")),
    ]


def torch() -> list[Finding]:
    """Torch, the GPUs it can use, and how it computes on the CPU."""
    train = {"enables": EXTRAS["local"], "get": "pip install 'ramify[local]'"}
    gpu = {
        "enables": "training and sampling on a GPU; a CPU is enough for tiny models only",
        "get": "an NVIDIA GPU with its driver, and a CUDA build of torch",
    }
    try:
        installed = version("torch")
    except PackageNotFoundError:
        absent = Finding("torch", "missing", "not installed", **train)
        return [absent, Finding("CUDA", "missing", "cannot be known without torch", **gpu)]
    answer = ask([sys.executable, "-c", TORCH], deadline=SLOW)
    if not answer.ok:
        useless = Finding("torch", "broken", f"{installed}, but it does not load: {answer.text}", **train)
        return [useless, Finding("CUDA", "missing", "cannot be known without torch", **gpu)]
    told = json.loads(answer.text.splitlines()[-1])
    build = f"built for CUDA {told['cuda']}" if told["cuda"] else "built without CUDA"
    cpu = told["cpu"]
    found = [
        Finding("torch", "ok", f"{told['version']}, {build}"),
        Finding("CPU dtype", "ok", f"auto is {cpu['dtype']}"),
        Finding("CPU operators", "ok", f"float32 on one thread: {cpu['float32']}; bfloat16: {cpu['bfloat16']}"),
    ]
    if not told["devices"]:
        return [*found, Finding("CUDA", "missing", "torch sees no device", **gpu)]
    devices = ", ".join(f"{name} ({_size(memory)})" for name, memory in told["devices"])
    return [*found, Finding("CUDA", "ok", devices)]


def extras() -> list[Finding]:
    """Each extra the package declares, and whether all it asks for is installed."""
    try:
        declared = requires("ramify") or []
    except PackageNotFoundError:
        enables, get = "knowing which extras there are", "pip install -e . in the source tree"
        return [Finding("extras", "broken", "ramify is importable, but not installed", enables, get)]
    wanted: dict[str, list[str]] = {}
    for requirement in declared:
        package = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", requirement)
        if package and extra:
            wanted.setdefault(extra[1], []).append(package[0])
    return [_extra(name, packages) for name, packages in wanted.items()]


def _extra(name: str, packages: list[str]) -> Finding:
    versions: list[str] = []
    absent: list[str] = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            absent.append(package)
    if absent:
        get = f"pip install 'ramify[{name}]'"
        return Finding(f"extra {name}", "missing", f"without {', '.join(absent)}", EXTRAS.get(name, ""), get)
    return Finding(f"extra {name}", "ok", ", ".join(versions))


def bubblewrap() -> list[Finding]:
    """Bubblewrap, and whether this machine lets it make a sandbox."""
    enables = "nothing yet: a sandbox runtime, agent programs in a box of their own without root, is to come"
    get = "install the package bubblewrap of your distribution"
    if shutil.which("bwrap") is None:
        return [Finding("bubblewrap", "missing", "no bwrap on PATH", enables, get)]
    told = ask(["bwrap", "--version"], deadline=QUICK)
    tried = ask(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], deadline=QUICK)
    if told.ok and tried.ok:
        return [Finding("bubblewrap", "ok", told.text)]
    get = "allow unprivileged user namespaces on this machine (in a container: on its host)"
    return [Finding("bubblewrap", "broken", f"{told.text}, but no sandbox: {tried.text}", enables, get)]


def docker() -> list[Finding]:
    """The docker client, and whether an engine answers it."""
    enables = "nothing yet: a docker runtime, for tasks that bring their own image, is to come"
    if shutil.which("docker") is None:
        get = "install Docker, or another engine with a docker command"
        return [Finding("docker", "missing", "no docker on PATH", enables, get)]
    client = ask(["docker", "--version"], deadline=QUICK)
    engine = ask(["docker", "info", "--format", "{{.ServerVersion}}"], deadline=QUICK)
    if engine.ok:
        return [Finding("docker", "ok", f"{client.text}; engine {engine.text}")]
    get = "start the engine, and let this user talk to it"
    return [Finding("docker", "broken", f"{client.text}; no engine answers: {engine.text}", enables, get)]


def node() -> list[Finding]:
    """Node, which many agent programs are written for."""
    enables = "agent programs that are npm packages, started by a harness of your own"
    get = "install Node.js 20 or newer"
    if shutil.which("node") is None:
        return [Finding("Node", "missing", "no node on PATH", enables, get)]
    told = ask(["node", "--version"], deadline=QUICK)
    if told.ok:
        return [Finding("Node", "ok", told.text.removeprefix("v"))]
    return [Finding("Node", "broken", told.text, enables, get)]


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
