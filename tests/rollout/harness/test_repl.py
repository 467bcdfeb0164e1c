"""Messages between the host and a REPL that an interrupt or a timeout falls into."""

import asyncio
import json
import subprocess
import sys

import pytest

from ramify.env import RuntimeProcess
from ramify.rollout.harness.config import RlmHarnessConfig
from ramify.rollout.harness.repl import REPL_SCRIPT, Repl
from ramify.rollout.runtime import LocalRuntime

NUM_CHARS = 1_000_000


class SlowProcess(RuntimeProcess):
    """A REPL whose message stops after its first part until it is interrupted."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.lines = [b'={"op": "ready"}\n', b'+{"op": "done", "ou\n', b'+tput": "all of\n', b'= it"}\n']

    async def write(self, data):
        self.sent.append(json.loads(data)["op"])

    async def read_line(self, timeout):
        if self.sent[-1] == "run" and len(self.lines) == 2:
            raise TimeoutError
        return self.lines.pop(0)

    async def wait(self, timeout):
        raise NotImplementedError

    async def kill(self):
        return


class SlowRuntime(LocalRuntime):
    """A runtime whose only program is such a REPL."""

    async def spawn(self, *args, **kwargs):
        return SlowProcess()


async def test_message_that_a_timeout_divides_is_read_to_its_end():
    config = RlmHarnessConfig(run_timeout=1.0, max_restarts=0)
    repl = Repl(SlowRuntime(), config, {}, [], lambda *_: asyncio.sleep(0))
    result = await repl.run("code")
    assert result.output == "all of it\nerror: interrupted after 1 s"


@pytest.mark.process
def test_interrupt_waits_until_a_message_is_sent():
    repl = subprocess.Popen(
        [sys.executable, "-u", "-c", REPL_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )

    def send(**message):
        repl.stdin.write(json.dumps(message).encode() + b"\n")

    def receive(output):
        data, mark = bytearray(), b"+"
        while mark == b"+":
            line = output.readline()
            mark = line[:1]
            data += line[1:-1]
        return json.loads(data)

    with repl, open(repl.stdout.fileno(), "rb", closefd=False) as output:
        try:
            send(op="start", variables={}, tools=[], max_line_bytes=4096, max_output_bytes=100_000)
            assert receive(output)["op"] == "ready"
            send(op="run", code=f"llm('x' * {NUM_CHARS})")
            output.peek(1)  # the message has begun, and is larger than the pipe
            send(op="interrupt")
            call, done = receive(output), receive(output)
        finally:
            repl.kill()
    assert (call["op"], len(call["arguments"]["prompts"][0])) == ("call", NUM_CHARS)
    assert done["op"] == "done" and "KeyboardInterrupt" in done["output"]
