"""Names of processes: their things are removed when they have ended, whatever the clock says."""

import os
import subprocess
import sys

import pytest

from ramify.rollout.runtime import owner
from ramify.rollout.runtime.owner import is_owner_alive, make_owner_name
from tests.rollout.runtime.conftest import make_ended_owner_name


def replace_field(name: str, index: int, value: str) -> str:
    fields = name.split("-")
    fields[index] = value
    return "-".join(fields)


def test_name_of_this_process_is_in_use():
    assert is_owner_alive(make_owner_name(0))
    assert is_owner_alive(make_owner_name("deadbeef"))


@pytest.mark.process
def test_process_that_has_ended_or_whose_id_is_in_use_again_is_not_alive():
    script = "from ramify.rollout.runtime.owner import make_owner_name; print(make_owner_name(7))"
    name = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    assert not is_owner_alive(name)
    assert not is_owner_alive(make_ended_owner_name(0))


@pytest.mark.process
def test_zombie_has_ended():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert owner._get_start(pid) is None
    finally:
        os.waitpid(pid, 0)


def test_another_boot_has_ended_and_another_machine_is_not_judged():
    assert not is_owner_alive(replace_field(make_owner_name(0), 2, "00000000"))
    assert is_owner_alive(replace_field(make_ended_owner_name(0), 3, "00000000"))


def test_adjusted_clock_changes_nothing(monkeypatch):
    name = make_owner_name(0)
    monkeypatch.setattr("psutil.boot_time", lambda: 0.0)
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert is_owner_alive(name)


def test_name_of_another_form_counts_as_in_use():
    for name in ("", "kept", "4194300-1-0", "4194300-176000000000-0-0123456789abcdef"):
        assert is_owner_alive(name)
