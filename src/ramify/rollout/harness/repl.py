"""The host's side of the REPL of the harness `rlm`: an interactive Python in the rollout's runtime.

    run(code) -> the REPL executes it; calls of `llm` and of tools come back here and are answered -> output, answer

The code belongs to the policy, so whatever it does to its REPL is the policy's fault. Code that runs too long is
interrupted. A REPL that exits, ignores the interrupt or sends an invalid message is replaced by a new one, and the
model is told that its variables are lost; after `max_restarts` of them the rollout ends with `AgentFailed`.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ramify.core.errors import AgentFailed, ConfigInvalid, RamifyError, SandboxError
from ramify.env import Runtime, RuntimeProcess
from ramify.rollout.harness.config import RlmHarnessConfig

REPL_SCRIPT = Path(__file__).with_name("repl_script.py").read_text()
START_TIMEOUT = 60.0  # seconds for the interpreter to start
WRITE_TIMEOUT = 60.0  # seconds for the REPL to read a message
INTERRUPT_TIMEOUT = 2.0  # seconds for interrupted code to end
EXIT_TIMEOUT = 5.0  # seconds for the exit code after the output has ended
MAX_LINE_BYTES = 1 << 16
MIN_LINE_BYTES = 1024
MAX_MESSAGE_BYTES = 64 << 20  # of one message of the REPL
MAX_CHAR_BYTES = 4  # of a character in UTF-8
STDERR_CHARS = 500  # of an interpreter that ended, in an error message

ReplFunction = Literal["llm", "tool"]
CallHandler = Callable[[ReplFunction, dict[str, Any]], Awaitable[Any]]
"""Runs a function that code in the REPL calls, and returns its result. A RamifyError that blames the policy is raised
in the code, any other ends the rollout."""


class ReplMessage(msgspec.Struct):
    """A message of the REPL."""

    op: Literal["ready", "call", "done"]
    id: int = 0
    function: ReplFunction = "llm"
    arguments: dict[str, Any] = {}
    output: str = ""
    is_cut: bool = False
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class ReplResult:
    """What code printed, cut to the budget, and the value of the variable `answer` as text."""

    output: str
    answer: str | None = None


class ReplLost(Exception):
    """The interpreter ended or is unusable; the message says why."""


class Repl:
    """A Python interpreter that keeps its variables from one run to the next. It is started by the first run.

    - `variables`: what it defines at the start.
    - `tools`: its functions that call tools: the names of function, tool and parameters, and the docstring.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: RlmHarnessConfig,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        handle_call: CallHandler,
    ) -> None:
        self._runtime, self._config, self._handle_call = runtime, config, handle_call
        self._variables, self._tools = variables, tools
        self._process: RuntimeProcess | None = None
        self._partial_message = bytearray()
        self._num_lost = 0

    async def run(self, code: str) -> ReplResult:
        """Run code and return what it printed. Raises AgentFailed if the code ended its REPL too often."""
        try:
            process = self._process or await self._start()
            await self._send(process, {"op": "run", "code": code})
            message, was_interrupted = await self._wait_until_done(process)
        except ReplLost as lost:
            await self.close()
            self._num_lost += 1
            if self._num_lost > self._config.max_restarts:
                raise AgentFailed(
                    f"the agent's code ended its REPL {self._num_lost} times; the last time {lost}"
                ) from lost
            return ReplResult(f"error: {lost}. A new REPL starts with the next code; all variables you set are lost.")
        output = cut_text(message.output, self._config.max_output_chars, force=message.is_cut)
        if was_interrupted:
            output += f"\nerror: interrupted after {self._config.run_timeout:g} s"
        if message.answer is not None and len(message.answer) > self._config.max_answer_chars:
            output += f"\nerror: `answer` has {len(message.answer)} characters, and at most "
            return ReplResult(output + f"{self._config.max_answer_chars} are accepted; set a shorter one")
        return ReplResult(output, message.answer)

    async def close(self) -> None:
        """End the interpreter and all it started."""
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    async def _start(self) -> RuntimeProcess:
        try:
            process = await self._runtime.spawn(["python3", "-u", "-c", REPL_SCRIPT], interactive=True)
        except FileNotFoundError as error:
            raise ConfigInvalid(
                f"the runtime {self._runtime.config.id!r} has no python3, which the harness rlm needs: add it to the "
                "image or to `runtime.prepend_path`, or use another harness"
            ) from error
        except (OSError, ValueError) as error:
            raise SandboxError(f"a REPL cannot be started: {error}") from error
        self._process, self._partial_message = process, bytearray()
        start = {
            "op": "start",
            "variables": self._variables,
            "tools": self._tools,
            "max_line_bytes": min(MAX_LINE_BYTES, self._runtime.config.max_output_bytes),
            "max_output_bytes": self._config.max_output_chars * MAX_CHAR_BYTES,
        }
        try:
            await self._send(process, start)
            await self._receive(process, START_TIMEOUT)
        except (ReplLost, TimeoutError) as error:
            if self._num_lost:  # an earlier REPL of the agent ran in this sandbox and may have broken it
                raise AgentFailed(
                    f"a REPL cannot be started again after the agent's code ended one: {error}"
                ) from error
            await self.close()
            raise SandboxError(f"a REPL did not start: {error or f'no answer in {START_TIMEOUT:g} s'}") from error
        return process

    async def _wait_until_done(self, process: RuntimeProcess) -> tuple[ReplMessage, bool]:
        """Answer calls until the code is done; interrupt it after `run_timeout`. Return also whether it was."""
        remaining, was_interrupted = self._config.run_timeout, False
        while True:
            start = time.monotonic()
            try:
                message = await self._receive(process, max(remaining, 0.0))
            except TimeoutError:
                if was_interrupted:
                    raise ReplLost(
                        f"the code ran for {self._config.run_timeout:g} s and ignored an interrupt"
                    ) from None
                await self._send(process, {"op": "interrupt"})
                remaining, was_interrupted = INTERRUPT_TIMEOUT, True
                continue
            if message.op == "done":
                return message, was_interrupted
            if message.op != "call":
                raise ReplLost(f"the REPL sent a message out of turn: {message.op}")
            remaining -= time.monotonic() - start
            start = time.monotonic()
            await self._answer_call(process, message)
            if message.function == "tool":
                remaining -= time.monotonic() - start

    async def _answer_call(self, process: RuntimeProcess, message: ReplMessage) -> None:
        reply: dict[str, Any] = {"op": "reply", "id": message.id}
        try:
            reply["value"] = await self._handle_call(message.function, message.arguments)
        except RamifyError as error:
            if error.blame != "policy":
                raise
            reply["error"] = f"{error.name}: {error.message}"
        await self._send(process, reply)

    async def _send(self, process: RuntimeProcess, message: Mapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT):
                await process.write(json.dumps(message).encode() + b"\n")
        except TimeoutError as error:
            raise ReplLost(f"the REPL did not read a message for {WRITE_TIMEOUT:g} s") from error
        except BrokenPipeError:
            raise ReplLost(await _describe_exit(process)) from None

    async def _receive(self, process: RuntimeProcess, timeout: float) -> ReplMessage:
        """Return the next message. Raises TimeoutError after `timeout` seconds; the next call continues the message."""
        message = self._partial_message
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = await process.read_line(max(deadline - time.monotonic(), 0.001))
            except ValueError:
                raise ReplLost("the REPL sent a line that is too long") from None
            if not line.endswith(b"\n"):
                raise ReplLost(await _describe_exit(process))
            message += line[1:-1]
            if len(message) > MAX_MESSAGE_BYTES:
                raise ReplLost(f"the code sent more than {MAX_MESSAGE_BYTES >> 20} MiB at once")
            if line[:1] != b"+":
                break
        self._partial_message = bytearray()
        try:
            return msgspec.json.decode(message, type=ReplMessage)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # the code may have written anything
            raise ReplLost(f"the REPL sent an invalid message: {error}") from None


def cut_text(text: str, max_chars: int, *, force: bool = False, note: str = "") -> str:
    """Return the first and the last half of a text that is longer than `max_chars`, with a note between them.

    `force`: the middle of the text is missing already.
    """
    if len(text) <= max_chars and not force:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n... (cut to {max_chars} characters{note}) ...\n{text[len(text) - half :]}"


async def _describe_exit(process: RuntimeProcess) -> str:
    result = await process.wait(EXIT_TIMEOUT)
    if result.timed_out:
        return "the REPL closed its output"
    stderr = result.error_text.strip()[-STDERR_CHARS:]
    return f"the REPL exited with code {result.returncode}" + (f": {stderr}" if stderr else "")


def check_line_limit(runtime: Runtime) -> None:
    """Raise ConfigInvalid if the runtime returns lines that are too short for the messages of a REPL."""
    if runtime.config.max_output_bytes < MIN_LINE_BYTES:
        raise ConfigInvalid(
            f"runtime.max_output_bytes is {runtime.config.max_output_bytes}, and the harness rlm needs {MIN_LINE_BYTES}"
        )
