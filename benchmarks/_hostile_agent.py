"""The agent program of `hostile_agents.py`: it does what its prompt says, in a sandbox, and prints what it achieved."""

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

BASE_URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
REPLY_TIMEOUT = 120.0  # seconds
ATTACK_SECONDS = 6.0
NUM_CONNECTIONS, SLOW_BODY_BYTES = 250, 25_000_000
SEND_INTERVAL = 0.2  # seconds between two parts of a slow body: the time of the sandbox itself is not limited
TOKENIZED_CHARS = 400_000  # a text that may just fit the context of the model
CHUNK = b" " * 262144


def answer(prompt: str) -> None:
    """Ask the model once, as an honest agent does."""
    print(post("/chat/completions", json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()))


def disk(prompt: str) -> None:
    """Write to every file that a process of the sandbox has open, and print the number of bytes that were accepted."""
    written = 0
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            while stat.S_ISREG(os.fstat(fd).st_mode) and written < 1 << 30:
                written += os.write(fd, CHUNK)
    print(written)


def connections(prompt: str) -> None:
    """Open many connections, and send a large body slowly over each."""

    async def send(host: str, port: int, path: str) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            fields = [f"{name}: {value}" for name, value in HEADERS.items()]
            lines = [f"POST {path} HTTP/1.1", f"Host: {host}", *fields, f"Content-Length: {SLOW_BODY_BYTES}", "", ""]
            writer.write("\r\n".join(lines).encode())
            for _ in range(SLOW_BODY_BYTES // len(CHUNK)):
                writer.write(CHUNK)
                await writer.drain()
                await asyncio.sleep(SEND_INTERVAL)
            await reader.read()

    async def send_all() -> None:
        host, port = BASE_URL.split("/")[2].split(":")
        path = "/" + BASE_URL.split("/", 3)[3] + "/chat/completions"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTACK_SECONDS):
                await asyncio.gather(*(send(host, int(port), path) for _ in range(NUM_CONNECTIONS)))

    asyncio.run(send_all())


def tokens(prompt: str) -> None:
    """Let the gateway count the tokens of long texts."""
    deadline = time.monotonic() + ATTACK_SECONDS
    for size in (32_000_000, 3_200_000, *[TOKENIZED_CHARS] * 100):
        if time.monotonic() < deadline:
            body = {"messages": [{"role": "user", "content": "a b " * (size // 4)}]}
            print(size, post("/messages/count_tokens", json.dumps(body).encode()))


def orphans(prompt: str) -> None:
    """Leave processes without a parent, and exit."""
    for _ in range(50):
        subprocess.run(["sh", "-c", "setsid sleep 1000 &"], check=True)
    answer(prompt)


def signals(prompt: str) -> None:
    """Send signals to everything."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGKILL):
        os.kill(1, number)
    with contextlib.suppress(ProcessLookupError):  # there may be no other process
        os.kill(-1, signal.SIGKILL)
    answer(prompt)


def post(path: str, body: bytes) -> str:
    """Return the response to a request, or the status of an error."""
    request = urllib.request.Request(BASE_URL + path, body, HEADERS)
    try:
        with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT) as response:
            return response.read().decode()
    except (OSError, urllib.error.URLError) as error:
        return str(error)


if __name__ == "__main__":
    text = sys.stdin.read()
    actions = {"disk": disk, "connections": connections, "tokens": tokens, "orphans": orphans, "signals": signals}
    actions.get(text.split()[0], answer)(text)
