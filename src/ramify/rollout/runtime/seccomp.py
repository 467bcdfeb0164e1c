"""The system calls that programs of a sandbox may make, as a filter that the kernel runs.

The namespaces of a sandbox hide what it must not reach. The filter narrows the kernel's surface further: it allows the
calls of `system_calls.txt`, which ordinary programs need, and refuses all others, among them those that trace
processes, mount, make namespaces, load code into the kernel or hold keys, and those that are not known yet. Some calls
are allowed only with harmless arguments, such as sockets of three families.

A refused call fails with an error: EPERM, or ENOSYS if it is so new that libraries can do without it.
"""

import errno
import platform
import socket
import struct
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

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
