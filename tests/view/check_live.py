"""The page beside a real run: numbers move without a reload, and a killed run is shown while it is continued."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from ramify.run.store import RunStore
from ramify.run.store.run_log import RunLog
from tests.support.sample_runs import write_rl_run
from tests.support.status import make_state, serve_status
from tests.view.browser import check_accessibility, open_page, open_view, save_screenshots

CONFIG = """
name = "live"
max_steps = 24
seq_len = 256
[model]
name = "tiny"
[orchestrator]
batch_size = 32
group_size = 4
[checkpoint]
interval = 2
[[train]]
name = "reverse"
taskset = { id = "reverse-text" }
sampling = { max_tokens = 24 }
"""
RUN_DEADLINE = 240.0  # seconds until the run has made the next steps
SHIFT_SCRIPT = """
window.shift = 0;
new PerformanceObserver((list) => list.getEntries().forEach((entry) => (window.shift += entry.value)))
  .observe({type: "layout-shift", buffered: true});
"""
MAX_SHIFT = 0.02  # a page counts as stable below 0.1


def read_steps(page) -> int:
    stat = page.locator(".stat", has_text="Steps").locator(".stat-value").inner_text()
    return int(re.match(r"[\d,]+", stat)[0].replace(",", ""))


def wait_for_steps(page, steps: int) -> None:
    deadline = time.monotonic() + RUN_DEADLINE
    while read_steps(page) < steps:
        assert time.monotonic() < deadline, page.inner_text("main")
        page.wait_for_timeout(200)


def start_run(folder: Path, *arguments: str) -> subprocess.Popen:
    (folder / "rl.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "ramify", "rl", "@", str(folder / "rl.toml"), "-o", str(folder), *arguments]
    with (folder / "rl.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def test_numbers_move_without_a_reload_and_nothing_shifts(browser, tmp_path):
    path = write_rl_run(tmp_path / "run")
    with RunStore.open(path) as store, open_view(browser, tmp_path) as page:
        log = RunLog(store)
        page.evaluate("window.isSame = true")
        make_state(path).write(path)
        with serve_status(path, step=3):
            page.wait_for_selector(".pill-running")
            page.get_by_role("link", name="run", exact=True).click()
            page.wait_for_selector(".processes")
            assert "waits for 2 scored groups" in page.inner_text(".waits")
            check_accessibility(page)
            page.wait_for_timeout(500)
            page.evaluate(SHIFT_SCRIPT)
            line = page.locator("path.series-line").first
            before = line.get_attribute("d")
            log.log_metrics(3, {"reward/all/mean": 0.9, "reward/reverse/mean": 0.9, "entropy": 0.2}).result(20)
            page.wait_for_function(
                "before => document.querySelector('path.series-line').getAttribute('d') !== before", arg=before
            )
        with serve_status(path, step=4):
            wait_for_steps(page, 4)
        assert page.evaluate("window.shift") <= MAX_SHIFT
        page.wait_for_selector(".pill-unresponsive")  # it holds the run, but does not answer any more
        assert page.evaluate("window.isSame")


def test_a_run_is_watched_killed_and_continued(browser, tmp_path):
    with open_view(browser, tmp_path) as page:
        assert "No runs yet" in page.inner_text("main")
        process = start_run(tmp_path)
        try:
            page.wait_for_selector("tbody tr", timeout=RUN_DEADLINE * 1000)
            page.get_by_role("link", name="live").click()
            page.wait_for_selector(".pill-running", timeout=RUN_DEADLINE * 1000)
            wait_for_steps(page, 3)
            page.wait_for_selector(".processes")
            page.evaluate(SHIFT_SCRIPT.replace("true", "false"))  # the curves of the first steps have come
            wait_for_steps(page, 6)
            assert page.evaluate("window.shift") <= MAX_SHIFT
            check_accessibility(page)
            save_screenshots(page, "live")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        page.wait_for_selector(".pill-stopped", timeout=60_000)
        save_screenshots(page, "killed")
        stopped_at = read_steps(page)
        process = start_run(tmp_path)
        try:
            page.reload()
            page.wait_for_selector(".pill-running, .pill-finished", timeout=RUN_DEADLINE * 1000)
            wait_for_steps(page, 24)
            assert process.wait(RUN_DEADLINE) == 0, (tmp_path / "rl.log").read_text()[-2000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        page.wait_for_selector(".pill-finished", timeout=60_000)
        save_screenshots(page, "continued")
        assert stopped_at < 24
        assert page.inner_text(".events").count("started") == 2
        page.get_by_role("link", name="Worst rollouts").click()
        page.wait_for_selector("a.rollout-link")


def test_rl_view_serves_the_page_of_the_run_until_it_ends(browser, tmp_path):
    process = start_run(tmp_path, "--view", "--max_steps", "8")
    log = tmp_path / "rl.log"
    try:
        deadline = time.monotonic() + RUN_DEADLINE
        while not (address := re.search(r"http://127\S+/#/run/live", log.read_text())):
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.1)
        origin = address[0].partition("/#")[0]
        with open_page(browser, offline_origin=origin, expected=["ERR_CONNECTION_REFUSED"]) as page:
            page.goto(address[0])
            page.wait_for_selector(".pill-running", timeout=RUN_DEADLINE * 1000)
            wait_for_steps(page, 2)
            assert process.wait(RUN_DEADLINE) == 0, log.read_text()[-2000:]
            page.wait_for_selector(".offline:not([hidden])")
            assert "does not answer" in page.inner_text(".offline")
            assert read_steps(page) >= 2  # what was shown stays
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
