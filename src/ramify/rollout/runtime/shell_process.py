"""A program in a sandbox that has a shell and nothing of ours: a container, or a sandbox of a provider.

The sandbox runs one shell per program. That shell changes to the work directory, starts the program and writes records
to its own output, each with a random marker. The host reads them to learn that the program has started, or why not, and
how it ended. So the result does not wait for a background program that keeps the output open.

    stderr   MARKER started PID | MARKER failed ERRNO (cwd|program)     then the program's output
    both     MARKER exited STATUS                                       at the end

A shell reports a program that signal n killed as status 128 + n; `wait` returns -n for it.
The marker is also an environment variable of the program, so that `KILL_SCRIPT` finds all processes it started.
"""

import asyncio
import contextlib
import errno
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from ramify.core.errors import SandboxError
from ramify.env.runtime import ExecResult
from ramify.processes.exit import SIGNAL_EXIT_OFFSET
from ramify.rollout.runtime.piped_process import CapturedProcess

# Records inside the output of a program. A record is one line: the random marker of the program, then words.

RECORD_LIMIT = 200  # bytes of a record at most


class RecordFilter:
    """Removes the records from a stream: `write` gets the rest, `handle` gets each record as a list of words."""

    def __init__(self, marker: str, write: Callable[[bytes], None], handle: Callable[[list[str]], None]) -> None:
        self._start = f"\x1e{marker} ".encode()
        self._write, self._handle = write, handle
        self._pending: bytes = b""

    def write(self, data: bytes) -> None:
        """Take a part of the stream."""
        data = self._pending + data
        self._pending = b""
        while data:
            position = data.find(self._start)
            if position < 0:
                keep = _count_overlap(data, self._start)
                self._write_some(data[: len(data) - keep])
                self._pending = data[len(data) - keep :]
                return
            self._write_some(data[:position])
            data = data[position:]
            end = data.find(b"\n", len(self._start))
            if end < 0 and len(data) < RECORD_LIMIT:
                self._pending = data
                return
            if end >= 0:
                with contextlib.suppress(ValueError, IndexError):  # a program may write anything
                    self._handle(data[len(self._start) : end].decode("ascii", "replace").split())
                data = data[end + 1 :]
            else:  # too long for a record
                self._write_some(data[:1])
                data = data[1:]

    def flush(self) -> None:
        """Pass on what may have been the start of a record: the stream has ended."""
        self._write_some(self._pending)
        self._pending = b""

    def _write_some(self, data: bytes) -> None:
        if data:
            self._write(data)


def _count_overlap(data: bytes, start: bytes) -> int:
    """Return how many bytes at the end of `data` may be the start of a record."""
    return next((size for size in range(min(len(start) - 1, len(data)), 0, -1) if data.endswith(start[:size])), 0)


START_TIMEOUT = 60.0  # seconds for a sandbox to start a program
KILL_TIMEOUT = 30.0  # seconds for a sandbox to kill a program and all it started
MAX_ARGUMENT_BYTES = 1 << 17  # of one argument or variable, on Linux

# It reads its input to the end: podman loses the output of a command that leaves some. It searches PATH itself,
# since the shell of busybox prefers its own programs to those in PATH. No variable of the program begins with `r_`.
SPAWN_SCRIPT = r"""
r_marker=$1 r_cwd=$2 r_stdin=$3; shift 3
finish() { [ -z "$r_stdin" ] || PATH=$PATH:/usr/bin:/bin cat >/dev/null; exit "$1"; }
fail() { printf '\036%s failed %s %s\n' "$r_marker" "$1" "$2" >&2; finish 127; }
cd "$r_cwd" 2>/dev/null || fail 2 cwd
case $1 in
*/*) [ -e "$1" ] || fail 2 program; { [ -f "$1" ] && [ -x "$1" ]; } || fail 13 program;;
*)
    r_program= IFS=:; set -f
    for r_directory in $PATH; do
        r_file=${r_directory:-.}/$1
        if [ -f "$r_file" ] && [ -x "$r_file" ]; then r_program=$r_file; break; fi
    done
    unset IFS; set +f
    [ -n "$r_program" ] || fail 2 program
    shift; set -- "$r_program" "$@";;
esac
/bin/sh -c 'printf "\036%s started %s\n" "$0" "$$" >&2; exec "$@"' "$r_marker" "$@"
r_status=$?
printf '\036%s exited %s\n' "$r_marker" "$r_status"
printf '\036%s exited %s\n' "$r_marker" "$r_status" >&2
finish "$r_status"
"""

# It starts no program but `sleep`: a sandbox may be too full for more. `read` leaves out the null bytes between
# variables.
KILL_SCRIPT = r"""
round=0 killed=yes
while [ -n "$killed" ]; do
    [ "$round" -lt 50 ] || exit 1
    round=$((round + 1)) killed=
    for file in /proc/[0-9]*/environ; do
        while IFS= read -r line || [ -n "$line" ]; do
            case $line in *"$1"*)
                pid=${file#/proc/}
                kill -9 "${pid%/environ}" && killed=yes
            esac
        done < "$file"
    done
    [ -z "$killed" ] || sleep 0.02 || sleep 1
done 2>/dev/null
"""

KillFunction = Callable[[str], Awaitable[None]]


class ShellProcess(CapturedProcess):
    """A program that `SPAWN_SCRIPT` started. A subclass connects its streams and calls `feed` and `set_exit_code`.

    - `kill_marked`: kills the processes of the sandbox with a marker. None: `kill` closes the streams only.
    - `can_end_input`: whether the host can end the standard input of an interactive program.
    """

    can_end_input: ClassVar[bool] = True

    def __init__(self, max_output_bytes: int, kill_marked: KillFunction | None, *, interactive: bool) -> None:
        super().__init__(max_output_bytes, interactive=interactive)
        self._kill_marked = kill_marked
        self.marker = secrets.token_hex(16)
        self.is_interactive = interactive
        self.is_closed = False
        self._filters = (
            RecordFilter(self.marker, self._write_stdout, self._handle_stdout_record),
            RecordFilter(self.marker, self._outputs[1].write, self._handle_stderr_record),
        )
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_exit_records = 0
        self._has_stdout_ended = False
        self._program = ""
        self._cwd = ""

    def build_arguments(self, argv: Sequence[str], cwd: str, *, has_stdin: bool) -> list[str]:
        """Return the arguments of `sh` that start a program. Raises ValueError or OSError if an argument is invalid."""
        check_arguments([*argv, cwd])
        self._program, self._cwd = argv[0], cwd
        return ["-c", SPAWN_SCRIPT, "sh", self.marker, cwd, "yes" if has_stdin else "", *argv]

    async def wait_started(self) -> None:
        """Wait until the program runs. Raises OSError if it cannot, SandboxError if the sandbox does not answer."""
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await asyncio.wait([self._started, self._exit_code], return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as error:
            raise SandboxError(f"the sandbox did not start {self._program!r} in {START_TIMEOUT:g} s") from error
        if not self._started.done():
            raise SandboxUnreachable(self._outputs[1].getvalue().decode("utf-8", "replace").strip())
        self._started.result()

    def limit_unread_output(self, transport: asyncio.ReadTransport) -> None:
        """Pause a transport while an interactive program's output is not read."""
        if self._lines is not None:
            self._lines.set_transport(transport)

    def feed(self, stream: int, data: bytes) -> None:
        """Take what the sandbox wrote to standard output (1) or standard error (2)."""
        self._filters[stream - 1].write(data)

    def feed_eof(self, stream: int) -> None:
        """Take the end of standard output (1) or standard error (2)."""
        self._filters[stream - 1].flush()
        if stream == 1:
            self._end_stdout()

    def set_exit_code(self, exit_code: int) -> None:
        """Record the exit status that the sandbox reports."""
        is_signal = SIGNAL_EXIT_OFFSET < exit_code < SIGNAL_EXIT_OFFSET + signal.NSIG
        super().set_exit_code(SIGNAL_EXIT_OFFSET - exit_code if is_signal else exit_code)

    async def kill_tree(self) -> None:
        """Kill the program and all processes it started; return when they are gone."""
        if self._kill_marked is not None:
            await self._kill_marked(self.marker)

    async def wait(self, timeout: float) -> ExecResult:
        """Wait until the program exits, or kill it after `timeout` seconds, and return its output."""
        timed_out = not (await asyncio.wait([self._exit_code], timeout=timeout))[0]
        if timed_out:
            await self.kill_tree()
        result = self._build_result(timed_out=timed_out)
        if timed_out:
            await self.close()
        return result

    def _write_stdout(self, data: bytes) -> None:
        self._outputs[0].write(data)
        if self._lines is not None and not self._has_stdout_ended:
            self._lines.feed_data(data)

    def _end_stdout(self) -> None:
        if self._lines is not None and not self._has_stdout_ended:
            self._lines.feed_eof()
        self._has_stdout_ended = True

    def _handle_stdout_record(self, fields: list[str]) -> None:
        if fields[0] == "exited":
            self._count_exit_record(fields)
            self._end_stdout()

    def _handle_stderr_record(self, fields: list[str]) -> None:
        if fields[0] == "started" and not self._started.done():
            self.pid = int(fields[1])
            self._started.set_result(None)
        elif fields[0] == "failed" and not self._started.done():
            number = int(fields[1])
            file = self._cwd if fields[2] == "cwd" else self._program
            self._started.set_exception(OSError(number, os.strerror(number), file))
        elif fields[0] == "exited":
            self._count_exit_record(fields)

    def _count_exit_record(self, fields: list[str]) -> None:
        self._num_exit_records += 1
        if self._num_exit_records == len(self._filters):  # all that the program itself wrote has arrived
            self.set_exit_code(int(fields[1]))


class SandboxUnreachable(Exception):
    """The sandbox did not run its shell; the text is what the engine or the provider wrote."""


def check_arguments(texts: Sequence[str]) -> None:
    """Raise ValueError or OSError if a text cannot be an argument or an environment variable of a program."""
    for text in texts:
        if b"\0" in os.fsencode(text):
            raise ValueError("embedded null byte")
        if len(os.fsencode(text)) >= MAX_ARGUMENT_BYTES:
            raise OSError(errno.E2BIG, os.strerror(errno.E2BIG), text[:40])
