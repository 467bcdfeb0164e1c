"""A stub of the status address of a running orchestrator."""

import contextlib
import fnmatch
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from ramify.run.state import EvalMetric, FailureEvent, OrchestratorState, RunPhase, SupervisorState, Wait

WAITS = [
    Wait("batch 8", "2 scored groups", 3.0, 1800.0, "6 of 8"),
    Wait("group 61", "inference", 12.5, None, "attempt 3"),
]
STATE = OrchestratorState(
    run="run",
    step=7,
    max_steps=20,
    state=RunPhase.RUNNING,
    committed=5,
    eta_s=65.0,
    reward=0.625,
    reward_history=[0.4, 0.5, 0.6, 0.625],
    rollouts_per_s=12.5,
    tokens_per_s=2100.0,
    staleness={"mean": 1.5, "max": 3},
    trainable=(96, 128),
    groups={"issued": 4, "scored": 2, "trained": 56},
    errors=[FailureEvent(10.0, "reverse", "ProcessDied", "exit code -9")],
    evals={"eval/held-out/avg": EvalMetric(0, 0.58), "eval/held-out/seconds": EvalMetric(0, 9.0)},
    waits=WAITS,
    dropped="37 × filtered: zero_advantage",
)
METRICS = [
    {"step": step, "name": name, "value": value + step / 100}
    for step in range(3)
    for name, value in (("reward/all/mean", 0.5), ("eval/held-out/avg", 0.4), ("train/loss", 1.0))
]


def make_state(path: Path, **changes: object) -> OrchestratorState:
    """Return the state of this process as the orchestrator of the run at `path`."""
    changes = {"run": str(path), "time": time.time(), "pid": os.getpid(), **changes}
    return msgspec.structs.replace(STATE, **changes)


@contextlib.contextmanager
def serve_status(path: Path, **changes: object) -> Iterator[str]:
    """Serve the status of a run at `path`, and write its supervisor.json; yield the address."""
    state = make_state(path, **changes)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            reply: object = state if url.path == "/status" else None
            if url.path == "/metrics":
                pattern = parse_qs(url.query)["name"][0]
                reply = [row for row in METRICS if fnmatch.fnmatchcase(row["name"], pattern)]
            body = msgspec.json.encode(reply)
            self.send_response(200 if reply is not None else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    path.mkdir(parents=True, exist_ok=True)
    SupervisorState.begin(path, address).write(path)
    try:
        yield address
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
