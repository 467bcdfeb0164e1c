"""How bubblewrap is called, and whether it works on this machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ramify
from ramify.env.runtime import Capabilities, Capability
from ramify.rollout.runtime import sandbox_init
from ramify.rollout.runtime.cgroup import Cgroup, find_limit_capabilities
from ramify.rollout.runtime.config import SandboxRuntimeConfig
from ramify.rollout.runtime.seccomp import ARCHITECTURES, build_seccomp_filter

SANDBOX_DIR = "/sandbox"
WORK_DIR = "/sandbox/work"
INIT_FILE = "/.init.py"
USER_ID = "1000"
PROBE_TIMEOUT = 20.0  # seconds
SHARED_MEMORY_BYTES = 64 << 20

SYSTEM_DIRS = tuple(map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")))
# Nothing in these holds secrets or sockets. A sandbox of a root process can read what root can.
CONFIG_FILES = (
    "/etc/alternatives",
    "/etc/ca-certificates.conf",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/pki/tls/certs",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
ETC_DIR = Path(__file__).parent / "sandbox_etc"  # users, groups and host names of a sandbox


@cache
def find_unsupported_reason() -> str | None:
    """Return why bubblewrap cannot make a sandbox on this machine; None if it can. It is tried once."""
    if sys.platform != "linux":
        return "a sandbox needs Linux"
    if build_seccomp_filter() is None:
        return f"there is no system call filter for {os.uname().machine}, only for {' and '.join(ARCHITECTURES)}"
    executable = shutil.which("bwrap")
    if executable is None:
        return "the program bwrap is missing; install the package bubblewrap, version 0.8 or newer"
    options = [*_iter_options(SandboxRuntimeConfig(), 1), "--", "/bin/sh", "-c", "exit 0"]
    try:
        probe = subprocess.run(
            [executable, *options], capture_output=True, env={}, timeout=PROBE_TIMEOUT, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap cannot be run: {error}"
    if probe.returncode == 0:
        return None
    message = probe.stderr.strip()
    if "nknown option" in message:
        return f"bubblewrap is too old, version 0.8 or newer is needed: {message}"
    if "amespace" in message or "ermission denied" in message or "not permitted" in message:
        advice = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 or user.max_user_namespaces)"
        return f"this user may not create namespaces: {message}; {advice}"
    return f"bwrap fails: {message}"


def describe_fallback(table: Mapping[str, Any]) -> str | None:
    """Say that a runtime table falls back to the runtime `local` on this machine, and why; None if it does not."""
    if (
        table.get("id") != "sandbox"
        or table.get("fallback") != "local"
        or (reason := find_unsupported_reason()) is None
    ):
        return None
    return f"programs run without isolation, in the runtime 'local', because a sandbox does not work here: {reason}"


@cache
def find_capabilities() -> Capabilities:
    """Return what a sandbox enforces on this machine."""
    available, reasons = find_limit_capabilities()
    reasons[Capability.IMAGES] = "a sandbox shows the system of this machine; use the runtime 'container'"
    always = {Capability.ISOLATION, Capability.PRIVATE_NETWORK, Capability.GATEWAY, Capability.DISK_LIMIT}
    return Capabilities(available | always, reasons)


def build_bwrap_command(
    config: SandboxRuntimeConfig, disk_mb: int | None, fds: Mapping[str, int], cgroup: Cgroup | None
) -> list[str]:
    """Return the command line of a sandbox. `fds`: the files "control", "info" and "seccomp" that it inherits."""
    command = [
        shutil.which("bwrap") or "bwrap",
        *_iter_options(config, disk_mb),
        "--info-fd",
        str(fds["info"]),
        "--seccomp",
        str(fds["seccomp"]),
        "--",
        _find_interpreter(),
        "-I",
        "-S",
        INIT_FILE,
        str(fds["control"]),
        SANDBOX_DIR,
    ]
    return command if cgroup is None else cgroup.build_join_command(command)


def parse_child_pid(info: bytes) -> int:
    """Return the process id of the sandbox's first process from what bubblewrap reported."""
    return int(json.loads(info)["child-pid"])


def _find_interpreter() -> str:
    """Return this Python outside of any virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(Path(sys.base_prefix) / "bin" / version)


def _iter_options(config: SandboxRuntimeConfig, disk_mb: int | None) -> Iterator[str]:
    yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session")
    yield "--as-pid-1"  # no program of the sandbox can then kill or stop its first program
    yield from ("--uid", USER_ID, "--gid", USER_ID, "--hostname", "sandbox", "--cap-drop", "ALL")
    yield from ("--proc", "/proc", "--dev", "/dev", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm")
    if disk_mb is not None:
        yield from ("--size", str(disk_mb << 20))
    yield from ("--tmpfs", SANDBOX_DIR)
    for name in ("work", "home", "tmp"):
        yield from ("--dir", f"{SANDBOX_DIR}/{name}")
    yield from ("--symlink", f"{SANDBOX_DIR.lstrip('/')}/tmp", "/tmp")  # first: a path below may be in /tmp
    for directory in SYSTEM_DIRS:
        if directory.is_symlink():
            yield from ("--symlink", str(directory.readlink()), str(directory))
        elif directory.is_dir():
            yield from ("--ro-bind", str(directory), str(directory))
    for file in CONFIG_FILES:
        yield from ("--ro-bind-try", file, file)
    for file in sorted(ETC_DIR.iterdir()):
        yield from ("--ro-bind", str(file), f"/etc/{file.name}")
    interpreter = Path(sys.base_prefix)
    bound = [(directory, directory) for directory in SYSTEM_DIRS]
    if not any(interpreter.resolve().is_relative_to(directory.resolve()) for directory in SYSTEM_DIRS):
        bound.append((interpreter, interpreter))
        yield from ("--ro-bind", str(interpreter), str(interpreter))
    for source, target in config.read_only_paths:
        bound.append((source, target))
        yield from ("--ro-bind", str(source), str(target))
    package = Path(ramify.__file__).parent.resolve()
    for source, target in bound:  # an agent must not find tasks and their answers
        if package.is_relative_to(source.resolve()):
            hidden = str(target / package.relative_to(source.resolve()))
            yield from ("--tmpfs", hidden, "--remount-ro", hidden)
    yield from (
        "--ro-bind",
        sandbox_init.__file__,
        INIT_FILE,
        "--remount-ro",
        "/proc",  # root of the machine owns /proc/sys, and a sandbox of a root process has its user id
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/",
        "--chdir",
        "/",
    )
