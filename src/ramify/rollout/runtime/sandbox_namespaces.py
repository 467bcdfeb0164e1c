"""Namespaces, mounts and the system call filter of a sandbox, without bubblewrap.

Bubblewrap ends in `exec`, so it cannot start a sandbox with packages that are already imported. This module does what
bubblewrap does, from the same list of mounts (`bwrap.iter_mounts`), and returns in the sandbox. It uses the standard
library alone: it runs inside sandboxes, which do not have this package.

    unshare_and_fork   new namespaces; this process stays outside of the new process namespace, the fork is its first
    build_root         the sandbox's file system; the file system from which it is built is detached
    become_user        a user namespace inside the first one: no capability of it applies to the mounts made before
    drop_privileges    no capabilities, no new privileges, the filter
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Sequence

USER_ID = 1000
CLONE_NEWUSER = 0x10000000
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET
ALL_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | CLONE_NEWUSER | 0x20000000 | 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_SETATTR = 442  # the same number on all architectures
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 22, 24, 38, 47
CAP_VERSION_3 = 0x20080522
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
STAGE_DIR = "/tmp"  # where the new root is built; what it hides is visible again in OLD_ROOT
NEW_ROOT, OLD_ROOT = "/new", "/old"

_libc = ctypes.CDLL(None, use_errno=True)


def unshare_and_fork(hostname: str, proc: str | int) -> int:
    """Move this process to new namespaces, and fork. Return 0 in the fork, which is the first process of the sandbox.

    `proc`: a directory of /proc that can be written, as a path or an open file; it maps the user.
    """
    user_id, group_id = os.geteuid(), os.getegid()
    _check(_libc.unshare(ALL_NAMESPACES), "no new namespaces")
    _map_user(proc, 0, user_id, group_id)  # root must be mapped to mount a devpts
    pid = os.fork()
    if pid == 0:
        socket.sethostname(hostname)
        _set_loopback_up()
    return pid


def build_root(mounts: Sequence[Sequence[str]]) -> None:
    """Replace the file system by the mounts of the list, and leave nothing of the old one."""
    sources = {source: os.path.realpath(source) for kind, source, _ in mounts if kind.startswith("ro-bind")}
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", STAGE_DIR, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    os.chdir(STAGE_DIR)
    for name in (NEW_ROOT, OLD_ROOT):
        os.mkdir(name[1:], 0o755)
    _pivot(".", OLD_ROOT[1:])
    os.chdir("/")
    _mount("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for kind, source, target in mounts:
        _apply(kind, OLD_ROOT + sources.get(source, ""), source, NEW_ROOT + target)
    _unmount(OLD_ROOT)
    os.chdir(NEW_ROOT)
    _pivot(".", ".")
    _unmount(".")  # the stage, which now covers the root
    os.chdir("/")


def open_process_directory() -> int:
    """Mount a /proc without settings of the kernel, and return it as an open directory that has no path."""
    path = STAGE_DIR
    _mount("proc", path, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    _unmount(path)
    return directory


def become_user(proc: int) -> None:
    """Become the user of the sandbox, in a user namespace of its own."""
    _check(_libc.unshare(CLONE_NEWUSER), "no second user namespace")
    _map_user(proc, USER_ID, 0, 0)


def drop_privileges(seccomp_filter: bytes | None = None) -> None:
    """Drop all capabilities for ever, and add the filter of system calls."""
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:  # fails for the first number that is none
        capability += 1
    if ctypes.get_errno() != errno.EINVAL:
        _check(-1, "the bounding set of capabilities stays")
    _check(_libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0), "the ambient capabilities stay")  # 4: clear all
    header = struct.pack("=Ii", CAP_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "the capabilities stay")
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs cannot be set")
    if seccomp_filter is not None:
        program = _FilterProgram(len(seccomp_filter) // 8, seccomp_filter)
        _check(_libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "the filter of system calls is refused")


def allow_access() -> None:
    """Allow the processes of the sandbox access to this one through /proc, as to a program that was started."""
    _check(_libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "cannot allow access to this process")


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def _apply(kind: str, source: str, text: str, target: str) -> None:
    """Make one entry of the list of mounts below the new root."""
    if kind == "symlink":
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(text, target)
    elif kind == "remount-ro":
        _restrict(target, MS_RDONLY, 0)
    elif kind.startswith("ro-bind"):
        if kind.endswith("-try") and not os.path.exists(source):
            return
        _bind(source, target)
        _restrict(target, MS_RDONLY | MS_NOSUID | MS_NODEV, AT_RECURSIVE)
    else:
        os.makedirs(target, exist_ok=True)
        if kind == "tmpfs":
            options = "mode=0755" + (",size=" + text if text else "")
            _mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, options)
        elif kind == "proc":
            _mount("proc", target, "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
        elif kind == "dev":
            _make_devices(target)
        else:
            assert kind == "dir", kind


def _make_devices(directory: str) -> None:
    _mount("tmpfs", directory, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for name in DEVICES:
        _bind(OLD_ROOT + "/dev/" + name, directory + "/" + name)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", directory + "/" + name)
    os.symlink("/proc/self/fd", directory + "/fd")
    os.symlink("/proc/kcore", directory + "/core")
    for name in ("shm", "pts"):
        os.mkdir(directory + "/" + name, 0o755)
    _mount("devpts", directory + "/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", directory + "/ptmx")


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    _mount(source, target, None, MS_BIND | MS_REC)


def _restrict(target: str, attributes: int, flags: int) -> None:
    """Add attributes to a mount. They have the bits of the older flags."""
    change = _MountAttributes(attributes, 0, 0, 0)
    result = _libc.syscall(MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, ctypes.byref(change), ctypes.sizeof(change))
    _check(result, "cannot restrict the mount " + target)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    names = [None if text is None else text.encode() for text in (source, target, kind, options)]
    result = _libc.mount(names[0], names[1], names[2], ctypes.c_ulong(flags), names[3])
    _check(result, f"cannot mount {source} at {target}")


def _unmount(path: str) -> None:
    _check(_libc.umount2(path.encode(), MNT_DETACH), "cannot unmount " + path)


def _pivot(new_root: str, old_root: str) -> None:
    _check(_libc.pivot_root(new_root.encode(), old_root.encode()), "cannot change the root directory")


def _map_user(proc: str | int, inside: int, user_id: int, group_id: int) -> None:
    directory = os.open(proc, os.O_RDONLY | os.O_DIRECTORY) if isinstance(proc, str) else proc
    try:
        _write(directory, "setgroups", "deny")
        _write(directory, "uid_map", f"{inside} {user_id} 1")
        _write(directory, "gid_map", f"{inside} {group_id} 1")
    finally:
        if directory != proc:
            os.close(directory)


def _write(directory: int, name: str, text: str) -> None:
    fd = os.open("self/" + name, os.O_WRONLY, dir_fd=directory)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _set_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))


def _check(result: int, message: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, message + ": " + os.strerror(code))
