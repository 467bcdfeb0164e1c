"""A stub of the status address of a running orchestrator."""

import contextlib
import fnmatch
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

STATUS = {
    "run": "run",
    "step": 7,
    "max_steps": 20,
    "committed": 5,
    "incarnation": 0,
    "state": "training",
    "eta_s": 65.0,
    "reward": 0.625,
    "reward_history": [0.4, 0.5, 0.6, 0.625],
    "rollouts_per_s": 12.5,
    "tokens_per_s": 2100.0,
    "staleness": {"mean": 1.5, "max": 3},
    "trainable": [96, 128],
    "groups": {"issued": 4, "scored": 2, "trained": 56},
    "processes": {"trainer": "waits for the batch of step 8", "sampling": "waits for 64 attempts"},
    "errors": [{"time": 10.0, "where": "reverse", "name": "ProcessDied", "message": "exit code -9"}],
    "evals": {"eval/held-out/avg": {"step": 0, "value": 0.58}, "eval/held-out/seconds": {"step": 0, "value": 9.0}},
}
WAITS = [
    {"who": "batch 8", "waits_for": "2 scored groups", "since_s": 3.0, "deadline_s": 1800.0, "detail": "6 of 8"},
    {"who": "group 61", "waits_for": "inference", "since_s": 12.5, "deadline_s": None, "detail": "attempt 3"},
]
DROPS = "37 × filtered: zero_advantage"
METRICS = [
    {"step": step, "name": name, "value": value + step / 100}
    for step in range(3)
    for name, value in (("reward/all/mean", 0.5), ("eval/held-out/avg", 0.4), ("train/loss", 1.0))
]


@contextlib.contextmanager
def serve_status(path: Path, **changes: object) -> Iterator[str]:
    """Serve the status of a run at `path`, and write its run.json; yield the address."""
    status = {**STATUS, "run": str(path), **changes}
    replies = {"/status": status, "/why": WAITS, "/dropped": DROPS, "/metrics": METRICS}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            reply = replies.get(url.path)
            if url.path == "/metrics":
                pattern = parse_qs(url.query)["name"][0]
                reply = [row for row in METRICS if fnmatch.fnmatchcase(row["name"], pattern)]
            body = json.dumps(reply).encode()
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
    (path / "run.json").write_text(json.dumps({"name": path.name, "status": address, "processes": {}}))
    try:
        yield address
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
