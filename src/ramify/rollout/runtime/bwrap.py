"""How bubblewrap is called, whether it works on this machine, and which system calls its programs may make.

The namespaces of a sandbox hide what it must not reach. A filter that the kernel runs narrows the surface further: it
allows the calls of `system_calls.txt`, which ordinary programs need, some of them only with harmless arguments, and
refuses all others, also those that are not known yet. A refused call fails with EPERM, or with ENOSYS if it is so new
that libraries can do without it.
"""

import errno
import os
import platform
import shutil
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from ramify.env.runtime import Capabilities, Capability
from ramify.processes.program import run_program
from ramify.rollout.runtime import sandbox_init
from ramify.rollout.runtime.cgroup import Cgroup, find_limit_capabilities
from ramify.rollout.runtime.config import SandboxRuntimeConfig, find_package_paths
from ramify.rollout.runtime.sandbox_namespaces import USER_ID
from ramify.rollout.runtime.sandbox_template import INIT_FILE

# Loads, jumps and returns of the kernel's packet filter language (linux/bpf_common.h).
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_GREATER_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS, FAIL = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h; FAIL | errno
NUMBER_OFFSET, ARCHITECTURE_OFFSET, FIRST_ARGUMENT_OFFSET, SECOND_ARGUMENT_OFFSET = 0, 4, 16, 24

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # calls of the x32 interface have other numbers on x86-64
ALLOWED_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME
TERMINAL_INPUT_REQUESTS = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX, which type into a terminal

CLONE3 = 435
FIRST_OPTIONAL_CALL = 447  # of Linux 5.14; from here on, calls have the same number on all architectures


@cache
def read_allowed_calls(machine: str) -> dict[str, int]:
    """Return the numbers of the allowed calls by name for a machine type."""
    column = 1 + list(ARCHITECTURES).index(machine)
    lines = Path(__file__).with_name("system_calls.txt").read_text().splitlines()
    calls = [line.split() for line in lines if line and not line.startswith("#")]
    return {fields[0]: int(fields[column]) for fields in calls if fields[column] != "-"}


def build_seccomp_filter(machine: str | None = None) -> bytes | None:
    """Return the filter for a machine type, by default this machine's; None if the type is not supported."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return None
    instructions = _build_instructions(ARCHITECTURES[machine], read_allowed_calls(machine), has_x32=machine == "x86_64")
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _build_instructions(
    architecture: int, numbers: dict[str, int], *, has_x32: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (operation, instructions to skip if true, if false, operand)."""
    yield LOAD_WORD, 0, 0, ARCHITECTURE_OFFSET
    yield from _return_unless(JUMP_IF_EQUAL, architecture, KILL_PROCESS)
    yield LOAD_WORD, 0, 0, NUMBER_OFFSET
    if has_x32:
        yield from _return_if(JUMP_IF_GREATER_EQUAL, X32_BIT, FAIL | errno.ENOSYS)
    # The flags of clone3 are in memory, which a filter cannot read: without it, libraries use clone.
    yield from _return_if(JUMP_IF_EQUAL, CLONE3, FAIL | errno.ENOSYS)
    yield from _check_argument(
        numbers["clone"],
        FIRST_ARGUMENT_OFFSET,
        [*_return_if(JUMP_IF_ANY_BIT, NAMESPACE_FLAGS, FAIL | errno.EPERM), (RETURN, 0, 0, ALLOW)],
    )
    is_allowed_family = [
        instruction for family in ALLOWED_FAMILIES for instruction in _return_if(JUMP_IF_EQUAL, family, ALLOW)
    ]
    for name in ("socket", "socketpair"):
        refusal = (RETURN, 0, 0, FAIL | errno.EAFNOSUPPORT)
        yield from _check_argument(numbers[name], FIRST_ARGUMENT_OFFSET, [*is_allowed_family, refusal])
    refused_requests = [
        instruction
        for request in TERMINAL_INPUT_REQUESTS
        for instruction in _return_if(JUMP_IF_EQUAL, request, FAIL | errno.EPERM)
    ]
    yield from _check_argument(numbers["ioctl"], SECOND_ARGUMENT_OFFSET, [*refused_requests, (RETURN, 0, 0, ALLOW)])
    # A limit of another process, such as the sandbox's first program, could make the kernel kill it.
    own_limits = [*_return_if(JUMP_IF_EQUAL, 0, ALLOW), (RETURN, 0, 0, FAIL | errno.EPERM)]
    yield from _check_argument(numbers["prlimit64"], FIRST_ARGUMENT_OFFSET, own_limits)
    for first, last in _find_ranges(sorted(numbers.values())):
        yield JUMP_IF_GREATER_EQUAL, 2, 0, last + 1
        yield from _return_if(JUMP_IF_GREATER_EQUAL, first, ALLOW)
    yield from _return_if(JUMP_IF_GREATER_EQUAL, FIRST_OPTIONAL_CALL, FAIL | errno.ENOSYS)
    yield RETURN, 0, 0, FAIL | errno.EPERM


def _find_ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last number of each run of consecutive numbers."""
    for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


def _return_if(jump: int, operand: int, action: int) -> Iterator[tuple[int, int, int, int]]:
    yield jump, 0, 1, operand
    yield RETURN, 0, 0, action


def _return_unless(jump: int, operand: int, action: int) -> Iterator[tuple[int, int, int, int]]:
    yield jump, 1, 0, operand
    yield RETURN, 0, 0, action


def _check_argument(
    number: int, offset: int, checks: list[tuple[int, int, int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield `checks` on an argument of a call; they end in a return. Another call skips them."""
    yield JUMP_IF_EQUAL, 0, 1 + len(checks), number
    yield LOAD_WORD, 0, 0, offset
    yield from checks


SANDBOX_DIR = sandbox_init.FILES_DIR
WORK_DIR = "/sandbox/work"
PROBE_TIMEOUT = 20.0  # seconds
SHARED_MEMORY_BYTES = 64 << 20

Mount = tuple[str, str, str]
"""An option of bubblewrap without its dashes, its source (of "tmpfs": the size in bytes or ""), and its target."""

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
    probe = run_program([executable, *options], timeout=PROBE_TIMEOUT, env={})
    if probe.ok:
        return None
    if probe.returncode is None:
        return f"{executable} {probe.text}"
    message = probe.stderr
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
        find_interpreter(),
        "-I",
        "-S",
        INIT_FILE,
        str(fds["control"]),
    ]
    return command if cgroup is None else cgroup.build_join_command(command)


def build_env(config: SandboxRuntimeConfig) -> dict[str, str]:
    """Return the environment variables of all programs of a sandbox."""
    search_path = [*config.prepend_path, f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
    return {
        "PATH": ":".join(dict.fromkeys(search_path)),
        "HOME": f"{SANDBOX_DIR}/home",
        "TMPDIR": f"{SANDBOX_DIR}/tmp",
        "USER": "agent",
        "LANG": "C.UTF-8",
    } | config.env


def find_interpreter() -> str:
    """Return this Python outside of any virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(Path(sys.base_prefix) / "bin" / version)


def _iter_options(config: SandboxRuntimeConfig, disk_mb: int | None) -> Iterator[str]:
    yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session")
    yield "--as-pid-1"  # no program of the sandbox can then kill or stop its first program
    yield from ("--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", "sandbox", "--cap-drop", "ALL")
    for kind, source, target in iter_mounts(config, disk_mb, {INIT_FILE: sandbox_init.__file__}):
        if kind == "tmpfs":
            yield from ("--size", source, "--tmpfs", target) if source else ("--tmpfs", target)
        elif source:
            yield from (f"--{kind}", source, target)
        else:
            yield from (f"--{kind}", target)
    yield from ("--chdir", "/")


def iter_mounts(config: SandboxRuntimeConfig, disk_mb: int | None, scripts: Mapping[str, str]) -> Iterator[Mount]:
    """Yield the file system of a sandbox in the order in which it is made.

    Bubblewrap applies it (`_iter_options`), and so does `sandbox_namespaces` in a forked sandbox. `scripts`: the files
    of this package that the sandbox has, by their path in it.
    """
    yield "proc", "", "/proc"
    yield "dev", "", "/dev"
    yield "tmpfs", str(SHARED_MEMORY_BYTES), "/dev/shm"
    yield "tmpfs", "" if disk_mb is None else str(disk_mb << 20), SANDBOX_DIR
    for name in ("work", "home", "tmp"):
        yield "dir", "", f"{SANDBOX_DIR}/{name}"
    yield "symlink", f"{SANDBOX_DIR.lstrip('/')}/tmp", "/tmp"  # first: a path below may be in /tmp
    for directory in SYSTEM_DIRS:
        if directory.is_symlink():
            yield "symlink", str(directory.readlink()), str(directory)
        elif directory.is_dir():
            yield "ro-bind", str(directory), str(directory)
    for file in CONFIG_FILES:
        yield "ro-bind-try", file, file
    for file in sorted(ETC_DIR.iterdir()):
        yield "ro-bind", str(file), f"/etc/{file.name}"
    interpreter = Path(sys.base_prefix)
    bound = [(directory, directory) for directory in SYSTEM_DIRS]
    if not any(interpreter.resolve().is_relative_to(directory.resolve()) for directory in SYSTEM_DIRS):
        bound.append((interpreter, interpreter))
        yield "ro-bind", str(interpreter), str(interpreter)
    for source, target in config.read_only_paths:
        bound.append((source, target))
        yield "ro-bind", str(source), str(target)
    for directory in find_package_paths(bound):
        yield "tmpfs", "", directory
        yield "remount-ro", "", directory
    for target, source in scripts.items():
        yield "ro-bind", source, target
    # root of the machine owns /proc/sys, and a sandbox of a root process has its user id
    for place in ("/proc", "/dev", "/"):
        yield "remount-ro", "", place
