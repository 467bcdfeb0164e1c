"""Who may read the page, and which addresses the page asks."""

import asyncio
import platform
import socket
import time
from urllib.parse import urlsplit

import msgspec
import pytest
from starlette.testclient import TestClient

from ramify.run.state import OrchestratorState
from ramify.run.store import RunStore
from ramify.view.queries import RunQueries
from ramify.view.server import build_app, serve_page
from tests.support.sample_runs import write_rl_run
from tests.support.status import WAITS, make_state, serve_status

DEADLINE = 20.0  # seconds


async def serve_once(folder, **options):
    """Serve the page until its address is known, and return the address."""
    stop, addresses = asyncio.Event(), []

    def announce(address):
        addresses.append(address)
        stop.set()

    await asyncio.wait_for(serve_page(folder, stop, announce, **options), DEADLINE)
    return addresses[0]


@pytest.mark.parametrize(
    ("options", "needs_token"),
    [({}, False), ({"host": "0.0.0.0"}, True), ({"allowed_hosts": ["proxy.example"]}, True)],
)
async def test_a_page_that_other_machines_can_reach_needs_a_token(tmp_path, options, needs_token):
    assert ("?token=" in await serve_once(tmp_path, **options)) is needs_token


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_an_ipv6_address_can_be_opened_in_a_browser(tmp_path):
    address = urlsplit(await serve_once(tmp_path, host="::1"))
    assert address.hostname == "::1"
    assert address.port > 0


def test_two_pages_of_one_host_keep_their_tokens_apart(tmp_path):
    """Browsers send the cookies of a host to all of its ports."""
    cookies = {}
    for port, token in ((7420, "first"), (7421, "second")):
        app = build_app(RunQueries(tmp_path), token=token)
        client = TestClient(app, base_url=f"http://10.0.0.1:{port}", cookies=cookies, follow_redirects=False)
        assert client.get("/api/runs").status_code == 401
        assert client.get("/", params={"token": token}).status_code == 303
        cookies |= dict(client.cookies)
    for port, token in ((7420, "first"), (7421, "second")):
        app = build_app(RunQueries(tmp_path), token=token)
        client = TestClient(app, base_url=f"http://10.0.0.1:{port}", cookies=cookies)
        assert client.get("/api/runs").status_code == 200


def write_remote_state(path, *, age):
    """Write the state of an orchestrator on another machine."""
    make_state(path, host=f"not-{platform.node()}", time=time.time() - age).write(path)


def test_a_run_of_another_machine_is_shown_from_its_files_only(tmp_path):
    path = write_rl_run(tmp_path / "run")
    write_remote_state(path, age=5.0)
    with serve_status(path, step=11):  # an address in the run directory, which somebody else may have written
        run = RunQueries(tmp_path).get_run("run")
    assert (run["state"], run["step"], run["wait_list"]) == ("running", 7, msgspec.to_builtins(WAITS))


@pytest.mark.parametrize("age", [-3600.0, 3600.0])
def test_a_state_of_another_time_does_not_make_a_run_live(tmp_path, age):
    path = write_rl_run(tmp_path / "run")
    write_remote_state(path, age=age)
    assert RunQueries(tmp_path).get_run("run")["state"] == "finished"


@pytest.mark.parametrize("text", ["[]", '{"status": 1}', '{"time": "x", "host": 1, "pid": 1, "status": 1, "waits": 1}'])
def test_a_damaged_state_is_ignored(tmp_path, text):
    path = write_rl_run(tmp_path / "run")
    (path / OrchestratorState.FILE).write_text(text)
    with RunStore.open(path):
        assert [run["state"] for run in RunQueries(tmp_path).list_runs()] == ["starting"]
