"""A file system that can be made to hang: a FUSE server that keeps its files in another directory.

    with StoppableStorage(directory) as storage:
        storage.stop()       # every call below storage.path now blocks, as on a network mount whose server is gone
        storage.resume()     # the blocked calls go on

The server is a process of its own, which `stop` suspends. It speaks the kernel's protocol (`linux/fuse.h`) itself, so
that no library is needed; root and /dev/fuse are. Files are not flushed when they are closed, so that a process that is
killed ends, as it does on NFS.
"""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

HEADER = struct.Struct("=IIQQIIIHH")  # length, opcode, request, node, uid, gid, pid, extensions, padding
ATTRIBUTES = struct.Struct("=6Q10I")
SET_ATTRIBUTES = struct.Struct("=IIQQQQQQIIIIIIII")
MAX_WRITE = 1 << 20  # bytes
BATCH_FORGET, FORGET, INTERRUPT, INIT, DESTROY = 42, 2, 36, 26, 38
SETTABLE_MODE, SETTABLE_SIZE, SETTABLE_ATIME, SETTABLE_MTIME = 1, 8, 16, 32
NO_FLUSH = 1 << 5  # when a file is closed, which happens when its process ends
INIT_FLAGS = 1 | 1 << 5  # asynchronous reads, writes of more than one page


class StoppableStorage:
    """Mounts `directory`/mount; its files are in `directory`/files, where they stay readable."""

    def __init__(self, directory: Path) -> None:
        self.path, self.files = directory / "mount", directory / "files"
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        for path in (self.path, self.files):
            path.mkdir(parents=True)
        command = [sys.executable, __file__, str(self.path), str(self.files)]
        self._server = server = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert server.stdout is not None
        if server.stdout.readline() != b"mounted\n":
            raise OSError(f"{self.path} could not be mounted; root and /dev/fuse are needed")
        return self

    def stop(self) -> None:
        """Make all calls block. A process in such a call can be killed: the server has not read its request."""
        self._send(signal.SIGSTOP)
        assert self._server is not None
        os.waitid(os.P_PID, self._server.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Let calls go on."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        assert self._server is not None
        self._server.send_signal(number)

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        subprocess.run(["umount", "--lazy", str(self.path)], check=False, timeout=60)
        self._server.kill()  # blocked calls fail then
        self._server.wait(60)


class _Server:
    """Answers requests one after another. A node is a file, known by an O_PATH descriptor, whatever its name."""

    def __init__(self, device: int, root: str) -> None:
        self._device = device
        self._nodes = {1: os.open(root, os.O_PATH)}
        self._node_by_inode: dict[tuple[int, int], int] = {}
        self._handlers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._look_up,
            3: lambda node, _: self._encode_attributes(self._nodes[node]),
            4: self._set_attributes,
            5: lambda node, _: os.fsencode(os.readlink("", dir_fd=self._nodes[node])),
            6: self._symlink,
            9: self._mkdir,
            10: lambda node, body: self._remove(os.unlink, node, body),
            11: lambda node, body: self._remove(os.rmdir, node, body),
            12: lambda node, body: self._rename(node, body[:8], body[8:]),
            13: self._link,
            14: self._open,
            15: self._read,
            16: self._write,
            17: self._statfs,
            18: self._release,
            20: self._fsync,
            INIT: self._init,
            27: lambda node, body: struct.pack("=QII", 0, 0, 0),
            28: self._read_directory,
            29: lambda node, body: b"",
            30: lambda node, body: b"",
            35: self._create,
            45: lambda node, body: self._rename(node, body[:8], body[16:]),
        }

    def serve(self) -> None:
        """Answer requests until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._device, MAX_WRITE + 65536)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            _, opcode, number, node, *_ = HEADER.unpack_from(request)
            if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            error_number, reply = 0, b""
            try:
                reply = self._handlers[opcode](node, request[HEADER.size :])
            except KeyError:
                error_number = errno.ENOSYS
            except OSError as error:
                error_number = error.errno or errno.EIO
            with contextlib.suppress(FileNotFoundError):  # the caller was killed
                os.write(self._device, struct.pack("=IiQ", 16 + len(reply), -error_number, number) + reply)
            if opcode == DESTROY:
                return

    def _init(self, node: int, body: bytes) -> bytes:
        major, minor, readahead, _ = struct.unpack_from("=4I", body)
        limits = (16, 12, MAX_WRITE, 1, 0, 0, 0)  # requests in flight, bytes of a write, granularity of times
        return struct.pack("=IIIIHHIIHHI28x", major, min(minor, 31), readahead, INIT_FLAGS, *limits)

    def _encode_stat(self, fd: int) -> bytes:
        info = os.fstat(fd)
        times = [info.st_atime_ns, info.st_mtime_ns, info.st_ctime_ns]
        seconds = [nanoseconds // 10**9 for nanoseconds in times]
        fractions = [nanoseconds % 10**9 for nanoseconds in times]
        owner = (info.st_mode, info.st_nlink, info.st_uid, info.st_gid, 0, 4096, 0)
        return ATTRIBUTES.pack(info.st_ino, info.st_size, info.st_blocks, *seconds, *fractions, *owner)

    def _encode_attributes(self, fd: int) -> bytes:
        return struct.pack("=QII", 0, 0, 0) + self._encode_stat(fd)

    def _encode_entry(self, parent: int, name: bytes) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent])
        info = os.fstat(fd)
        key = (info.st_dev, info.st_ino)
        if key in self._node_by_inode:
            os.close(fd)
        else:
            self._node_by_inode[key] = len(self._nodes) + 1
            self._nodes[len(self._nodes) + 1] = fd
        node = self._node_by_inode[key]
        return struct.pack("=QQQQII", node, 0, 0, 0, 0, 0) + self._encode_stat(self._nodes[node])

    def _look_up(self, node: int, body: bytes) -> bytes:
        return self._encode_entry(node, body.rstrip(b"\0"))

    def _set_attributes(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, *_ = SET_ATTRIBUTES.unpack_from(body)
        fd = self._nodes[node]
        path = f"/proc/self/fd/{fd}"
        if valid & SETTABLE_MODE:
            Path(path).chmod(stat.S_IMODE(mode))
        if valid & SETTABLE_SIZE:
            os.truncate(path, size)
        if valid & (SETTABLE_ATIME | SETTABLE_MTIME):
            info = os.fstat(fd)
            times = (
                atime * 10**9 + atime_ns if valid & SETTABLE_ATIME else info.st_atime_ns,
                mtime * 10**9 + mtime_ns if valid & SETTABLE_MTIME else info.st_mtime_ns,
            )
            os.utime(path, ns=times)
        return self._encode_attributes(fd)

    def _symlink(self, node: int, body: bytes) -> bytes:
        name, target = body.rstrip(b"\0").split(b"\0")
        os.symlink(target, name, dir_fd=self._nodes[node])
        return self._encode_entry(node, name)

    def _mkdir(self, node: int, body: bytes) -> bytes:
        mode, _ = struct.unpack_from("=II", body)
        name = body[8:].rstrip(b"\0")
        os.mkdir(name, mode, dir_fd=self._nodes[node])
        return self._encode_entry(node, name)

    def _remove(self, remove: Callable[..., None], node: int, body: bytes) -> bytes:
        remove(body.rstrip(b"\0"), dir_fd=self._nodes[node])
        return b""

    def _rename(self, node: int, target_node: bytes, names: bytes) -> bytes:
        old_name, new_name = names.rstrip(b"\0").split(b"\0")
        target = self._nodes[struct.unpack("=Q", target_node)[0]]
        os.rename(old_name, new_name, src_dir_fd=self._nodes[node], dst_dir_fd=target)
        return b""

    def _link(self, node: int, body: bytes) -> bytes:
        source, name = self._nodes[struct.unpack_from("=Q", body)[0]], body[8:].rstrip(b"\0")
        os.link(f"/proc/self/fd/{source}", name, dst_dir_fd=self._nodes[node], follow_symlinks=True)
        return self._encode_entry(node, name)

    def _open(self, node: int, body: bytes) -> bytes:
        flags, _ = struct.unpack_from("=II", body)
        flags &= ~(os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW)
        return struct.pack("=QII", os.open(f"/proc/self/fd/{self._nodes[node]}", flags), NO_FLUSH, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode, _, _ = struct.unpack_from("=4I", body)
        name = body[16:].rstrip(b"\0")
        fd = os.open(name, (flags | os.O_CREAT) & ~os.O_APPEND, mode, dir_fd=self._nodes[node])
        return self._encode_entry(node, name) + struct.pack("=QII", fd, NO_FLUSH, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("=QQI", body)
        return os.pread(fd, size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        fd, offset, size = struct.unpack_from("=QQI", body)
        return struct.pack("=II", os.pwrite(fd, body[40 : 40 + size], offset), 0)

    def _statfs(self, node: int, body: bytes) -> bytes:
        info = os.statvfs(self._nodes[1])
        counts = (info.f_blocks, info.f_bfree, info.f_bavail, info.f_files, info.f_ffree)
        return struct.pack("=5Q4I24x", *counts, info.f_bsize, info.f_namemax, info.f_frsize, 0)

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("=Q", body)[0])
        return b""

    def _fsync(self, node: int, body: bytes) -> bytes:
        os.fsync(struct.unpack_from("=Q", body)[0])
        return b""

    def _read_directory(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        reply = b""
        with os.scandir(f"/proc/self/fd/{self._nodes[node]}") as entries:
            for position, entry in enumerate(sorted(entries, key=lambda entry: entry.name), 1):
                name = os.fsencode(entry.name)
                kind = stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) >> 12
                record = struct.pack("=QQII", entry.inode(), position, len(name), kind) + name
                record += bytes(-len(record) % 8)
                if position > offset:
                    if len(reply) + len(record) > size:
                        break
                    reply += record
        return reply


def _mount(target: str, device: int) -> None:
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"ramify", target.encode(), b"fuse.ramify", 0, options):
        raise OSError(ctypes.get_errno(), f"{target} could not be mounted")


def _serve(target: str, files: str) -> None:
    _, max_open = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_open, max_open))  # a node holds a descriptor
    device = os.open("/dev/fuse", os.O_RDWR)
    _mount(target, device)
    print("mounted", flush=True)
    _Server(device, files).serve()


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])
