"""The program that runs `case_caller` in a child process and reports its results, in the sandbox of the rewards.

It reads {"nonce", "program", "timeout", "file", "cases"}. For each line that the child wrote it writes {"nonce", "id",
"result"}. The child, in which the agent's module runs, does not get the nonce.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

MAX_REPORT_BYTES = 500_000


def main() -> None:
    """Run the child and report."""
    request = json.loads(sys.stdin.buffer.readline())
    nonce, program, timeout = (request.pop(key) for key in ("nonce", "program", "timeout"))
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdin is not None and child.stdout is not None

    def kill() -> None:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.daemon = True
    timer.start()
    with contextlib.suppress(OSError):
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.close()
    output = child.stdout.read(MAX_REPORT_BYTES)
    kill()
    for line in output.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            report = json.loads(line)
            print(json.dumps({"nonce": nonce, "id": report["id"], "result": report["result"]}), flush=True)
    timer.cancel()


if __name__ == "__main__":
    main()
