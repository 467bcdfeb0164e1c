"""Displays of a run: a dashboard in a terminal, lines elsewhere."""

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from ramify.core.display import LiveDisplay, LogDisplay
from ramify.launch.dashboard import RunContent, render_dashboard
from ramify.launch.status_line import format_status_line
from ramify.run.state import OrchestratorState, ProcessState, ProcessStatus, RunPhase, RunState, SupervisorState, Wait
from tests.support.status import STATE

PROCESSES = [
    ProcessStatus("inference", ProcessState.READY, 11, 0, 5.0),
    ProcessStatus("trainer", ProcessState.WAITING, 0, 2, 1.0),
]


SUPERVISOR = SupervisorState().with_processes(PROCESSES)
STARTING = OrchestratorState(run="run", step=0, max_steps=1, state=RunPhase.STARTING)


def render(status, processes=PROCESSES) -> str:
    file = io.StringIO()
    state = RunState(SupervisorState().with_processes(processes), status)
    Console(file=file, width=120, force_terminal=False).print(render_dashboard(state))
    return file.getvalue()


def test_dashboard_shows_progress_processes_and_errors():
    page = render(STATE)
    for shown in ("step 7/20", "1m05s left", "0.625", "12.5", "2,100", "1.5 mean, 3 max", "96/128", "0.580"):
        assert shown in page
    for shown in (
        "56 trained",
        "inference",
        "ready",
        "waits for 2 scored groups",
        "waits for inference",
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
    assert "starting" in render(STARTING, PROCESSES[:1])
    assert "none yet" in render(replace(STARTING, state=RunPhase.RUNNING))


def test_status_line_has_fields():
    fields = dict(field.split("=") for field in format_status_line(STATE).split())
    assert fields["step"] == "7/20"
    assert fields["reward"] == "0.625"
    assert fields["trainable"] == "96/128"
    assert fields["eval/held-out"] == "0.580"
    assert fields["left"] == "1m05s"


def test_reward_of_a_teacher_is_labelled():
    status = replace(STATE, is_teacher_reward=True)
    assert "reward(teacher)=0.625" in format_status_line(status).split()
    assert "reward(teacher)" in render(status)


def test_log_display_prints_each_step_and_error_once(capsys):
    display = LogDisplay(RunContent())
    with display:
        display.refresh(RunState(SUPERVISOR))
        display.refresh(RunState(SUPERVISOR))
        for step in (7, 7, 8):
            display.refresh(RunState(SUPERVISOR, replace(STATE, step=step)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "inference ready, trainer waiting"
    assert [line.split()[0] for line in lines[1:]] == ["ProcessDied:", "step=7/20", "step=8/20"]


def test_wait_of_a_starting_orchestrator_is_printed_once(capsys):
    wait = Wait("orchestrator", "models.teacher at http://h:1", 5.0, 600.0)
    text = "the orchestrator waits for models.teacher at http://h:1, up to 600 s"
    display = LogDisplay(RunContent())
    with display:
        for _ in range(2):
            display.refresh(RunState(SUPERVISOR, replace(STARTING, waits=[wait])))
    assert capsys.readouterr().out.splitlines() == ["inference ready, trainer waiting", text]


def test_live_display_draws_on_a_terminal():
    file = io.StringIO()
    display = LiveDisplay(RunContent(), Console(file=file, width=100, force_terminal=True))
    with display:
        display.refresh(RunState(SUPERVISOR, STATE))
        display.print_line("trainer was killed by SIGKILL")
    assert "step 7/20" in file.getvalue()
    assert "SIGKILL" in file.getvalue()


@pytest.mark.parametrize(("reward", "text"), [(0.87499999, "0.875"), (8.75e24, "8.75e+24"), (-1234.5, "-1234.500")])
def test_rewards_of_any_size_are_short(reward: float, text: str):
    assert f" reward={text} " in format_status_line(replace(STATE, reward=reward))
