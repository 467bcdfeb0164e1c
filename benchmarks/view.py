"""The page of `ramify view` on a large run: how fast it answers, what a live run pays, how a long rollout opens.

The run has 100,000 rollouts, written through the store. The server is a process of its own, as for a user. Times cover
whole requests. What a browser shows needs Playwright on PYTHONPATH and Chromium (`make test-view` installs Playwright
into .venvs/view/python); without them, `--check` exits with 3.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import psutil
from _check import NO_COMPETITOR, Row, finish, parser

from ramify.run.store import Ledger, RolloutRecord, RunLog, RunStore
from ramify.run.store.run_directory import IDENTITY_KEY
from ramify.trace import Message, ModelCall, Trace, VersionSpan

NUM_ROLLOUTS = 100_000
GROUP_SIZE = 16
NUM_REQUESTS = 10_000
NUM_TURNS, TOKENS_PER_TURN = 400, 500
NUM_POLLS = 100
ROLLOUTS_PER_CHANGE = 2000
READY_TIMEOUT = 600.0  # seconds
CONFIG = 'name = "large"\nmax_steps = 500\n[model]\nname = "tiny"\n[[train]]\nname = "reverse"\n'


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--chromium", default="chromium", help="the command of the browser")
    flags.add_argument(
        "--requests", type=int, default=NUM_REQUESTS, help="requests after which the memory of the server is measured"
    )
    args = flags.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        write_runs(Path(folder))
        with serve(Path(folder)) as (address, process):
            rows += measure_requests(address)
            rows += measure_memory(address, process, args.requests)
            browser_rows = measure_browser(address, args.chromium)
    rows += measure_polls()
    if browser_rows is None and args.check:
        print("what a browser shows needs Playwright on PYTHONPATH, and Chromium (--chromium)", file=sys.stderr)
        finish("the page of ramify view", rows, args)
        return NO_COMPETITOR
    return finish("the page of ramify view", [*rows, *(browser_rows or [])], args)


def write_runs(folder: Path) -> None:
    """Write a run with many rollouts, and one with a rollout of many turns."""
    started = time.monotonic()
    traces = [make_trace(attempt) for attempt in range(GROUP_SIZE)]
    with open_new_run(folder / "large") as store:
        ledger = Ledger.open(store)
        for first in range(0, NUM_ROLLOUTS, ROLLOUTS_PER_CHANGE):
            numbers = range(first, first + ROLLOUTS_PER_CHANGE)
            rollouts = [(make_record(number), [traces[number % GROUP_SIZE]]) for number in numbers]
            store.submit_change(lambda connection, numbers=numbers: add_groups(connection, numbers), rollouts).result(
                120
            )
        assert ledger.num_issued() == NUM_ROLLOUTS // GROUP_SIZE
        log = RunLog(store)
        for step in range(500):
            names = ("reward/all/mean", "reward/reverse/mean", "entropy", "mismatch_kl", "tokens_per_s", "train/loss")
            log.log_metrics(step, dict.fromkeys(names, step / 500))
        log.log_event("finished", step=500).result(60)
    with open_new_run(folder / "long") as store:
        record = RolloutRecord("long", "long", 0, "reverse", 0.5, summary={"stop": "done", "calls": NUM_TURNS})
        asyncio.run(store.add_rollout(record, [make_long_trace()]))
    print(f"wrote the runs in {time.monotonic() - started:.0f} s", file=sys.stderr)


@contextlib.contextmanager
def open_new_run(path: Path):
    path.mkdir()
    (path / "config.toml").write_text(CONFIG)
    with RunStore.open(path) as store:
        store.set_fact(IDENTITY_KEY, {"model": "tiny"})
        yield store


def make_record(number: int) -> RolloutRecord:
    group, attempt = divmod(number, GROUP_SIZE)
    summary = {
        "stop": "length" if number % 50 == 0 else "done",
        "truncated": False,
        "calls": 1 + number % 5,
        "input": 80,
        "output": number % 900,
        "rewards": {"similarity": number % 997 / 997},
        "weights": {"similarity": 1.0},
        "metrics": {"exact": 0.0},
        "errors": {"BudgetExceeded": 1} if number % 70 == 0 else {},
        "message": "",
        "timing": {"model": 0.5, "harness": 0.6, "scoring": 0.01},
    }
    return RolloutRecord(f"{group}.{attempt}", str(group), attempt, "reverse", number % 997 / 997, summary=summary)


def add_groups(connection, numbers: range) -> None:
    groups = sorted({number // GROUP_SIZE for number in numbers})
    values = [(group, "reverse", group, 0, GROUP_SIZE, 0, 0, "trained", group // 16, None, "") for group in groups]
    connection.executemany("INSERT OR IGNORE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    notes = msgspec.msgpack.encode({"advantage": 0.5})
    attempts = [divmod(number, GROUP_SIZE) for number in numbers]
    rows = [(group, at, 1, "trained", f"{group}.{at}", None, "", notes) for group, at in attempts]
    connection.executemany("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)


def make_trace(attempt: int) -> Trace:
    trace = Trace(id=f"t{attempt}", episode=f"t{attempt}", attempt=attempt, task={"prompt": "abc"})
    question = trace.graph.add_node(-1, Message("user", "abc"), list(range(40, 70)))
    call = ModelCall("c", finish_reason="stop")
    span, logprobs = (1, 9), [-0.5] * 8
    trace.graph.add_node(
        question, Message("assistant", "cba"), [attempt] * 9, sampled_span=span, logprobs=logprobs, call=call
    )
    trace.rewards = {"similarity": (0.5, 1.0)}
    return trace


def make_long_trace() -> Trace:
    """Return one conversation of NUM_TURNS turns of TOKENS_PER_TURN tokens."""
    trace, parent, count = Trace(id="long", task={"prompt": "work"}), -1, TOKENS_PER_TURN // 2
    tokens = [40 + number % 30 for number in range(count)]
    for turn in range(NUM_TURNS):
        text = f"Turn {turn}. " + "some words about the work " * 36
        parent = trace.graph.add_node(parent, Message("tool" if turn else "user", text), tokens)
        parent = trace.graph.add_node(
            parent,
            Message("assistant", text),
            tokens,
            sampled_span=(2, count),
            logprobs=[-(number % 40) / 10 for number in range(count - 2)],
            versions=[VersionSpan("tiny", 0, turn, count - 2)],
            call=ModelCall(f"c{turn}", finish_reason="stop"),
        )
    trace.rewards = {"similarity": (0.5, 1.0)}
    return trace


@contextlib.contextmanager
def serve(folder: Path):
    """Run `ramify view` and yield its address and its process."""
    command = [sys.executable, "-m", "ramify", "view", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = re.search(r"http://\S+?(?=;)", server.stdout.readline())
        assert address is not None
        yield address[0], psutil.Process(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def ask(address: str, path: str, **params) -> tuple[float, Any]:
    """Return the seconds of a request, and its answer."""
    started = time.perf_counter()
    with urllib.request.urlopen(f"{address}/api/{path}?{urlencode(params, doseq=True)}", timeout=60) as response:
        body = response.read()
    return time.perf_counter() - started, msgspec.json.decode(body)


def measure_requests(address: str) -> list[Row]:
    first_runs, _ = ask(address, "runs")
    first_run, _ = ask(address, "run", run="large")
    first_table, _ = ask(address, "rollouts", run="large")
    indexed = first_table + wait_for_index(address)
    filters = [
        {"source": "reverse", "sort": "reward", "order": "asc"},
        {"step": 100},
        {"min_reward": 0.2, "max_reward": 0.4, "sort": "tokens"},
        {"stop": "length", "sort": "seconds"},
        {"error": "BudgetExceeded"},
        {"error": "any", "sort": "reward", "page": 20},
        {"state": "trained", "sort": "calls"},
    ]
    times = [
        statistics.median(ask(address, "rollouts", run="large", **choice)[0] for _ in range(5)) for choice in filters
    ]
    texts_indexed = wait_for_index(address, text="cba")
    search = statistics.median(ask(address, "rollouts", run="large", text="cba")[0] for _ in range(5))
    return [
        Row("list of runs, first request", first_runs, None, "s", 1.0),
        Row("page of a run, first request", first_run, None, "s", 1.0),
        Row("table of 100,000 rollouts, first request", first_table, None, "s", 1.0),
        Row("until all are indexed, once per run", indexed, None, "s"),
        Row("slowest of seven filters", max(times) * 1000, None, "ms", 300.0),
        Row("until all messages are indexed, once per run", texts_indexed, None, "s"),
        Row("search for a word that all rollouts have", search * 1000, None, "ms", 300.0),
    ]


def wait_for_index(address: str, **choice: str) -> float:
    """Wait until all rollouts are indexed, or all messages if there is a text to search for; return the seconds."""
    started = time.perf_counter()
    while (answer := ask(address, "rollouts", run="large", **choice)[1])["indexed"] < 1:
        if time.perf_counter() - started > READY_TIMEOUT:
            raise SystemExit(f"{answer['indexed']:.0%} of the rollouts were indexed in {READY_TIMEOUT:g} s")
        time.sleep(0.2)
    assert answer["total"] == NUM_ROLLOUTS, answer["total"]
    return time.perf_counter() - started


def measure_memory(address: str, process: psutil.Process, count: int) -> list[Row]:
    """Return how the memory of the server grows over many requests: last against second quarter."""
    kinds = [
        ("runs", {}),
        ("run", {"run": "large"}),
        ("metrics", {"run": "large", "name": ["reward/all/mean", "entropy"]}),
        ("rollouts", {"run": "large", "sort": "reward", "order": "asc"}),
        ("excerpts", {"run": "large", "id": ["0.0", "1.0"]}),
        ("rollout", {"run": "large", "id": "5.0"}),
        ("tokens", {"run": "large", "id": "5.0", "node": [0, 1]}),
        ("group", {"run": "large", "group": 5}),
        ("forest", {"run": "large", "group": 5}),
        ("config", {"run": "large"}),
    ]
    memory: list[int] = []
    for number in range(count):
        path, params = kinds[number % len(kinds)]
        ask(address, path, **params)
        if number % 50 == 0:
            memory.append(process.memory_info().rss)
    quarter = len(memory) // 4
    second, last = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    return [
        Row(f"memory after {count:,} requests / at a quarter of them", last / second, None, "x", 1.05),
        Row("memory of the server", last / 2**20, None, "MiB"),
    ]


def measure_polls() -> list[Row]:
    """Return the CPU time of a live orchestrator for one poll of the page, in a small real run."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "rl.toml"
        config.write_text(
            'name = "live"\nmax_steps = 1000\nseq_len = 256\n[model]\nname = "tiny"\n[orchestrator]\nbatch_size = 32\n'
            'group_size = 8\n[[train]]\nname = "reverse"\ntaskset = { id = "reverse-text" }\n'
            "sampling = { max_tokens = 24 }\n"
        )
        command = [sys.executable, "-m", "ramify", "rl", "@", str(config), "-o", folder]
        with (Path(folder) / "log").open("wb") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            seconds = _measure_handlers(Path(folder) / "live")
        finally:
            run.send_signal(signal.SIGINT)  # it ends its processes, which write to the folder
            run.wait(60)
    return [Row("CPU of a live run for one poll", seconds * 1000, None, "ms", 10.0)]


def _measure_handlers(path: Path) -> float:
    """Poll a running run, pausing everything else: its trainer and env servers are stopped meanwhile."""
    from ramify.run.state import SupervisorState
    from ramify.view.run_summary import observe_shown_run

    deadline = time.monotonic() + READY_TIMEOUT
    while True:
        with contextlib.suppress(Exception):
            shown = observe_shown_run(path, "rl")
            if shown.page_state == "running" and shown.state.orchestrator and shown.state.orchestrator.step >= 3:
                break
        if time.monotonic() > deadline:
            raise SystemExit(f"{path} made no three steps in time")
        time.sleep(1.0)
    state = SupervisorState.read(path)
    assert state is not None
    stopped = [psutil.Process(entry.pid) for name, entry in state.processes.items() if name != "orchestrator"]
    orchestrator = psutil.Process(state.processes["orchestrator"].pid)
    for process in stopped:
        process.suspend()
    time.sleep(2.0)  # what was on its way arrives
    try:
        idle, busy = (_measure_cpu(orchestrator, polls, path, observe_shown_run) for polls in (0, NUM_POLLS))
    finally:
        for process in stopped:
            process.resume()
    return max(0.0, busy - idle) / NUM_POLLS


def _measure_cpu(process: psutil.Process, polls: int, path: Path, observe) -> float:
    """Return the CPU time of a process in ten seconds, with this many polls."""
    before, started = sum(process.cpu_times()[:2]), time.monotonic()
    for _ in range(polls):
        assert observe(path, "rl").page_state == "running"
    time.sleep(max(0.0, 10.0 - (time.monotonic() - started)))
    return sum(process.cpu_times()[:2]) - before


def measure_browser(address: str, chromium: str) -> list[Row] | None:
    """Return what a browser needs until it shows the runs, the table and a long rollout; None without a browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if (path := shutil.which(chromium)) is None:
        return None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})

        def open_view(view: str, selector: str) -> float:
            page.goto("about:blank")
            started = time.perf_counter()
            page.goto(f"{address}/{view}")
            page.wait_for_selector(selector)
            return time.perf_counter() - started

        views = {
            "browser: list of runs": ("#/", "tbody tr", 1.0),
            "browser: page of a run": ("#/run/large", "path.series-line", 1.0),
            "browser: table of 100,000 rollouts": ("#/run/large/rollouts", "a.rollout-link", 1.0),
            "browser: rollout of 400 turns and 200k tokens": ("#/run/long/rollout/long", ".message", 2.0),
            "browser: its tokens": ("#/run/long/rollout/long?tab=tokens", ".token[data-at]", 2.0),
        }
        open_view("#/", "tbody tr")  # the browser's own start
        rows = [
            Row(name, statistics.median(open_view(view, selector) for _ in range(3)), None, "s", target)
            for name, (view, selector, target) in views.items()
        ]
        frames = page.evaluate(SCROLL_SCRIPT)
        browser.close()
    return [*rows, Row("browser: longest frame while its tokens scroll", frames, None, "ms", 250.0)]


SCROLL_SCRIPT = """async () => {
  let longest = 0, last = performance.now();
  const stop = last + 4000;
  while (performance.now() < stop) {
    window.scrollBy(0, 400);
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    longest = Math.max(longest, now - last);
    last = now;
  }
  return longest;
}"""


if __name__ == "__main__":
    sys.exit(main())
