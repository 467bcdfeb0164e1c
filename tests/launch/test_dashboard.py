"""Displays of a run: a dashboard in a terminal, lines elsewhere."""

import io

import pytest
from rich.console import Console

from ramify.core.display import LiveDisplay, LogDisplay
from ramify.core.errors import ProviderError
from ramify.launch.dashboard import RunContent, RunState, format_status_line, render_dashboard
from ramify.launch.process import ProcessState
from ramify.launch.run_queries import connect_if_running
from ramify.launch.status_client import StatusClient
from ramify.launch.supervisor import ProcessStatus
from tests.support.status import STATUS, serve_status

PROCESSES = [
    ProcessStatus("inference", ProcessState.READY, 11, 0, 5.0),
    ProcessStatus("trainer", ProcessState.WAITING, 0, 2, 1.0),
]


def render(status, processes=PROCESSES) -> str:
    file = io.StringIO()
    Console(file=file, width=120, force_terminal=False).print(render_dashboard(status, processes))
    return file.getvalue()


def test_dashboard_shows_progress_processes_and_errors():
    page = render(STATUS)
    for shown in ("step 7/20", "1m05s left", "0.625", "12.5", "2,100", "1.5 mean, 3 max", "96/128", "0.580"):
        assert shown in page
    for shown in (
        "56 trained",
        "inference",
        "ready",
        "waits for the batch of step 8",
        "waits for 64 attempts",
        "trainer",
        "waiting",
        "ProcessDied",
        "exit code -9",
    ):
        assert shown in page
    assert "▁" in page
    assert "█" in page


def test_dashboard_of_a_starting_run():
    assert "starting" in render(None, PROCESSES[:1])
    assert "waiting for the orchestrator" in render(None)
    assert "none yet" in render({"run": "run"})


def test_status_line_has_fields():
    fields = dict(field.split("=") for field in format_status_line(STATUS).split())
    assert fields["step"] == "7/20"
    assert fields["reward"] == "0.625"
    assert fields["trainable"] == "96/128"
    assert fields["eval/held-out"] == "0.580"
    assert fields["left"] == "1m05s"


def test_reward_of_a_teacher_is_labelled():
    status = {**STATUS, "is_teacher_reward": True}
    assert "reward(teacher)=0.625" in format_status_line(status).split()
    assert "reward(teacher)" in render(status)


def test_log_display_prints_each_step_and_error_once(capsys):
    display = LogDisplay(RunContent())
    with display:
        display.refresh(RunState(None, PROCESSES))
        display.refresh(RunState(None, PROCESSES))
        for step in (7, 7, 8):
            display.refresh(RunState({**STATUS, "step": step}, PROCESSES))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "inference ready, trainer waiting"
    assert [line.split()[0] for line in lines[1:]] == ["ProcessDied:", "step=7/20", "step=8/20"]


def test_wait_of_a_starting_orchestrator_is_printed_once(capsys):
    text = "the orchestrator waits for models.teacher at http://h:1, up to 600 s"
    display = LogDisplay(RunContent())
    with display:
        for _ in range(2):
            display.refresh(RunState(None, PROCESSES, text))
    assert capsys.readouterr().out.splitlines() == ["inference ready, trainer waiting", text]


def test_live_display_draws_on_a_terminal():
    file = io.StringIO()
    display = LiveDisplay(RunContent(), Console(file=file, width=100, force_terminal=True))
    with display:
        display.refresh(RunState(STATUS, PROCESSES))
        display.print_line("trainer was killed by SIGKILL")
    assert "step 7/20" in file.getvalue()
    assert "SIGKILL" in file.getvalue()


def test_status_client_connects_only_to_its_own_run(tmp_path):
    assert connect_if_running(tmp_path / "nowhere") is None
    with serve_status(tmp_path / "run") as address:
        client = connect_if_running(tmp_path / "run")
        assert client is not None
        assert client.get("/status")["step"] == 7
        with pytest.raises(ProviderError, match="/nothing does not respond"):
            StatusClient(address).get("/nothing")
    assert connect_if_running(tmp_path / "run") is None
    with serve_status(tmp_path / "run", run="another"):
        assert connect_if_running(tmp_path / "run") is None


@pytest.mark.parametrize(("reward", "text"), [(0.87499999, "0.875"), (8.75e24, "8.75e+24"), (-1234.5, "-1234.500")])
def test_rewards_of_any_size_are_short(reward: float, text: str):
    assert f" reward={text} " in format_status_line({"reward": reward})
