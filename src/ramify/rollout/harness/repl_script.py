"""The Python REPL of the harness `rlm`, as it runs inside a runtime: `python3 -u -c SOURCE_OF_THIS_FILE`.

It uses only the standard library, because a runtime has no ramify. The host and the REPL exchange JSON messages:

    host -> REPL   start, run (code), reply (to a call), interrupt         one line each
    REPL -> host   ready, call (of `llm` or of a tool), done (with the output and the answer)

A message of the REPL may be longer than the line that the host reads, so it is sent in parts: `+` starts a line that
another one continues, `=` the last one. The messages use copies of standard input and output.
The code runs in this process and could write to them, so the host checks every message. File descriptors 1 and 2 lead
into a pipe, which collects what the code prints, also from the programs it starts.
"""

from __future__ import annotations

import ast
import itertools
import json
import linecache
import os
import queue
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

DRAIN_TIMEOUT = 2.0  # seconds for the output of finished code to arrive
READ_BYTES = 1 << 16


class Channel:
    """The messages to and from the host. A thread receives them, so that an interrupt is seen while code runs."""

    def __init__(self, input_fd: int, output_fd: int) -> None:
        self._input, self._output_fd = os.fdopen(input_fd, "rb"), output_fd
        self._send_lock = threading.Lock()
        self._call_ids = itertools.count(1)
        self._replies: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._main_pid, self._main_thread = os.getpid(), threading.get_ident()
        self.requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.max_line_bytes = 1024
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message in as many lines as it needs. An interrupt waits until all of them are sent."""
        data = json.dumps(message, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        self.exit_if_forked()
        size = self.max_line_bytes - 2
        with self._send_lock:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                for start in range(0, len(data), size):
                    mark = b"+" if start + size < len(data) else b"="
                    _write_all(self._output_fd, mark + data[start : start + size] + b"\n")
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def call(self, function: str, arguments: dict[str, Any]) -> Any:
        """Let the host run a function and return the result."""
        call_id = next(self._call_ids)
        replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._replies[call_id] = replies
        try:
            self.send({"op": "call", "id": call_id, "function": function, "arguments": arguments})
            reply = replies.get()
        finally:
            del self._replies[call_id]
        if reply.get("error") is not None:
            raise RuntimeError(reply["error"])
        return reply["value"]

    def exit_if_forked(self) -> None:
        """End a copy of this process that the code made with `os.fork`: only the original may use the channel."""
        if os.getpid() != self._main_pid:
            os._exit(0)

    def _receive(self) -> None:
        for line in self._input:
            message = json.loads(line)
            if message["op"] == "interrupt":
                signal.pthread_kill(self._main_thread, signal.SIGINT)
            elif message["op"] == "reply":
                waiting = self._replies.get(message["id"])
                if waiting is not None:
                    waiting.put(message)
            else:
                self.requests.put(message)
        os._exit(0)  # the host closed the channel


class OutputCapture:
    """Collects what is written to the file descriptors 1 and 2: the first and the last `limit` bytes of a run."""

    def __init__(self) -> None:
        self.limit = READ_BYTES
        self._read_fd, self._write_fd = os.pipe()
        self._head, self._tail, self._is_cut = b"", b"", False
        self._end_mark = b"\0" + os.urandom(16) + b"\0"
        self._arrived = threading.Event()
        self._streams: dict[str, Any] = {}
        threading.Thread(target=self._collect, daemon=True).start()

    def start(self) -> None:
        """Direct the standard output and error of this process, and of those it starts, into the pipe."""
        os.dup2(self._write_fd, 1)
        os.dup2(self._write_fd, 2)
        for name in ("stdout", "stderr"):
            if name not in self._streams or self._streams[name].closed:
                fd = os.dup(self._write_fd)
                self._streams[name] = os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
            setattr(sys, name, self._streams[name])

    def finish(self) -> tuple[str, bool]:
        """Return the output since the last call, and whether some of it was dropped."""
        for stream in self._streams.values():
            if not stream.closed:
                stream.flush()
        self._arrived.clear()
        _write_all(self._write_fd, self._end_mark)  # one write of few bytes: nothing can come in between
        self._arrived.wait(DRAIN_TIMEOUT)
        output, is_cut = self._head + self._tail, self._is_cut
        self._head, self._tail, self._is_cut = b"", b"", False
        return output.decode("utf-8", "replace"), is_cut

    def _collect(self) -> None:
        pending = b""
        while data := os.read(self._read_fd, READ_BYTES):
            pending += data
            before, mark, after = pending.partition(self._end_mark)
            if mark:
                self._keep(before)
                pending = after
                self._arrived.set()
            else:  # the mark may have arrived in part
                self._keep(pending[: -len(self._end_mark)])
                pending = pending[-len(self._end_mark) :]

    def _keep(self, data: bytes) -> None:
        room = self.limit - len(self._head)
        self._head += data[:room]
        tail = self._tail + data[room:]
        self._is_cut = self._is_cut or len(tail) > self.limit
        self._tail = tail[-self.limit :]


class CodeRunner:
    """Runs code in one namespace and keeps it."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._capture = channel, OutputCapture()
        self._is_running = False
        self._num_runs = 0
        module = types.ModuleType("__main__")
        self._script_module, sys.modules["__main__"] = sys.modules["__main__"], module
        self._namespace = module.__dict__

    def start(self, message: dict[str, Any]) -> None:
        """Define the functions and variables that the host sends."""
        self._channel.max_line_bytes = message["max_line_bytes"]
        self._capture.limit = message["max_output_bytes"]
        self._namespace.update(llm=self._llm, llm_batch=self._llm_batch, answer=None, **message["variables"])
        for tool in message["tools"]:
            self._namespace[tool["function"]] = self._build_function(**tool)

    def serve(self) -> None:
        """Run code for the host, for ever."""
        while True:
            try:
                message = self._channel.requests.get()
            except KeyboardInterrupt:  # a handler that the code set
                continue
            self._num_runs += 1
            self._capture.start()
            signal.signal(signal.SIGINT, self._handle_interrupt)
            self._is_running = True
            try:
                self._run(message["code"])
                answer = _to_text(self._namespace.get("answer"))
            except BaseException as error:  # noqa: BLE001 - also SystemExit and an interrupt belong to the code
                self._is_running = False
                answer = None
                _print_error(error)
            self._is_running = False
            self._channel.exit_if_forked()
            output, is_cut = self._capture.finish()
            self._channel.send({"op": "done", "output": output, "is_cut": is_cut, "answer": answer})

    def _run(self, code: str) -> None:
        """Run the statements; print the value of the last one if it is an expression, as an interactive Python does."""
        name = f"<run {self._num_runs}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for tracebacks
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._namespace)
            if value is not None:
                print(repr(value))

    def _handle_interrupt(self, signum: int, frame: object) -> None:
        if self._is_running:
            raise KeyboardInterrupt

    def _llm(self, prompt: str) -> str:
        """Ask the model, which sees nothing but the prompt, and return its answer."""
        return self._channel.call("llm", {"prompts": [str(prompt)]})[0]

    def _llm_batch(self, prompts: Sequence[str]) -> list[str]:
        """Ask the model several prompts at the same time and return its answers in order."""
        if isinstance(prompts, str):
            raise TypeError("llm_batch expects a list of prompts; use llm for one")
        return self._channel.call("llm", {"prompts": [str(prompt) for prompt in prompts]})

    def _build_function(self, function: str, tool: str, parameters: list[str], doc: str) -> Callable[..., Any]:
        """Return a function that lets the host call a tool."""

        def call_tool(*args: Any, **kwargs: Any) -> Any:
            if len(args) > len(parameters):
                raise TypeError(f"{function} takes {len(parameters)} arguments, {len(args)} were given")
            return self._channel.call("tool", {"tool": tool, "arguments": {**dict(zip(parameters, args)), **kwargs}})

        call_tool.__name__ = call_tool.__qualname__ = function
        call_tool.__doc__ = f"{function}({', '.join(parameters)})\n\n{doc}"
        return call_tool


def _to_text(answer: Any) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    return json.dumps(answer) if isinstance(answer, (dict, list, tuple)) else str(answer)


def _print_error(error: BaseException) -> None:
    """Print a traceback without the frames of this script, also of the errors that it follows from."""
    pending: list[BaseException] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = _drop_own_frames(current.__traceback__)
            pending += [cause for cause in (current.__cause__, current.__context__) if cause is not None]
    try:
        traceback.print_exception(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 - the code may have replaced sys.stderr, or raised an error that cannot be shown
        os.write(2, type(error).__name__.encode("utf-8", "replace"))


def _drop_own_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    kept: list[types.TracebackType] = []
    while frames is not None:
        if frames.tb_frame.f_globals is not globals():
            kept.append(frames)
        frames = frames.tb_next
    rebuilt: types.TracebackType | None = None
    for frame in reversed(kept):
        rebuilt = types.TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rebuilt


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def main() -> None:
    """Serve the host at the other ends of standard input and output."""
    channel = Channel(os.dup(0), os.dup(1))
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    sys.stdin = os.fdopen(null_fd)
    runner = CodeRunner(channel)
    runner.start(channel.requests.get())
    channel.send({"op": "ready"})
    runner.serve()


if __name__ == "__main__":
    main()
