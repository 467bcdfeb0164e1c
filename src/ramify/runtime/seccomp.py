"""The system calls that programs of a sandbox may not make, as a filter that the kernel runs.

The namespaces of a sandbox hide what it must not reach. The filter narrows the kernel's surface further: only sockets
of three families, and no calls that trace processes, mount, make namespaces, load code into the kernel or hold keys.
A refused call fails with an error, as on a system that does not offer it.
"""

import errno
import platform
import socket
import struct
from collections.abc import Iterator

# Loads, jumps and returns of the kernel's packet filter language (linux/bpf_common.h).
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_GREATER_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS, FAIL = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h; FAIL | errno
NUMBER_OFFSET, ARCHITECTURE_OFFSET, FIRST_ARGUMENT_OFFSET, SECOND_ARGUMENT_OFFSET = 0, 4, 16, 24

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # calls of the x32 interface have other numbers on x86-64
ALLOWED_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME
TERMINAL_INPUT_REQUESTS = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX, which type into a terminal

# name: (number on x86-64, number on aarch64)
REFUSED_CALLS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
}
CHECKED_CALLS = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
}


def build_seccomp_filter(machine: str | None = None) -> bytes | None:
    """Return the filter for a machine type, by default this machine's; None if the type is not supported."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    numbers = {name: columns[column] for name, columns in (REFUSED_CALLS | CHECKED_CALLS).items()}
    instructions = _build_instructions(ARCHITECTURES[machine], numbers, has_x32=machine == "x86_64")
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
    for name in REFUSED_CALLS:
        yield from _return_if(JUMP_IF_EQUAL, numbers[name], FAIL | errno.EPERM)
    # The flags of clone3 are in memory, which a filter cannot read: without it, libraries use clone.
    yield from _return_if(JUMP_IF_EQUAL, numbers["clone3"], FAIL | errno.ENOSYS)
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
    yield RETURN, 0, 0, ALLOW


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
