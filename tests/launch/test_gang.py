"""The ranks of a gang are supervised as one process, and every start of a process has a token of its own."""

import json
import sys
import time

import pytest

from ramify.core.errors import ProcessDied
from ramify.launch.execution import read_earlier_processes
from ramify.launch.launcher import ProcessRole, ProcessStart
from ramify.launch.supervised_process import EarlierProcess
from ramify.launch.supervisor import RunOutcome
from ramify.run.fencing.lease import LeaseTerms
from ramify.run.fencing.token import FencingToken
from ramify.run.state import ProcessState, ProcessStatus, SupervisorState
from tests.launch.test_supervisor import supervise, waits_for
from tests.support.launchers import build_placement
from tests.support.processes import RUNS_FOREVER, build_spec, list_running, read_pids

pytestmark = pytest.mark.process

# Appends the variables of the rank to a file, once per start.
REPORTS = """
import json
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RAMIFY_GANG_TOKEN")
variables = {name: os.environ[name] for name in names}
with open(DIR + "/ranks", "a") as file: file.write(json.dumps(variables) + chr(10))
rank, token = int(variables["RANK"]), variables["RAMIFY_GANG_TOKEN"]
"""


def waits_for_lines(number: int) -> str:
    """Return code that waits until ranks have reported so often."""
    path = "DIR + '/ranks'"
    return (
        f"import time\nwhile not os.path.exists({path}) or len(open({path}).readlines()) < {number}: time.sleep(0.01)\n"
    )


def build_specs(tmp_path, code: str, leader: str, num_ranks: int = 3):
    gang = {"num_ranks": num_ranks, "placement": build_placement(num_ranks)}
    return [
        build_spec(tmp_path, "trainer", REPORTS + code, ProcessRole.FOLLOWER, **gang),
        build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER),
    ]


def read_reports(tmp_path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (tmp_path / "ranks").read_text().splitlines()]


async def test_ranks_are_told_who_they_are_and_where_rank_0_listens(tmp_path):
    seen = []
    specs = build_specs(tmp_path, RUNS_FOREVER, waits_for_lines(3))
    assert await supervise(specs, on_change=seen.append) is RunOutcome.FINISHED
    reports = sorted(read_reports(tmp_path), key=lambda report: report["RANK"])
    assert [report["RANK"] for report in reports] == [report["LOCAL_RANK"] for report in reports] == ["0", "1", "2"]
    assert {report["WORLD_SIZE"] for report in reports} == {"3"}
    assert len({(report["MASTER_ADDR"], report["MASTER_PORT"]) for report in reports}) == 1
    assert int(reports[0]["MASTER_PORT"]) > 0
    assert {statuses[0].token for statuses in seen} == {"0"}
    assert list_running(tmp_path) == []


async def test_killed_rank_stops_all_and_the_gang_restarts_with_a_new_port_and_token(tmp_path):
    lines = []
    dies = waits_for_lines(3) + "if rank == 1 and token == '0': os.kill(os.getpid(), 9)\n" + RUNS_FOREVER
    assert await supervise(build_specs(tmp_path, dies, waits_for_lines(6)), lines=lines) is RunOutcome.FINISHED
    assert lines == ["trainer was killed by SIGKILL; restarting in 0.01 s (restart 1 of 3)"]
    first, second = read_reports(tmp_path)[:3], read_reports(tmp_path)[3:]
    assert {report["RAMIFY_GANG_TOKEN"] for report in first} == {"0"}
    assert {report["RAMIFY_GANG_TOKEN"] for report in second} == {"1"}
    assert {report["MASTER_PORT"] for report in first}.isdisjoint(report["MASTER_PORT"] for report in second)
    assert len(read_pids(tmp_path, "trainer")) == 6
    assert list_running(tmp_path) == []


async def test_failure_shows_the_log_of_the_rank_that_failed(tmp_path):
    fails = "if rank == 2: print('no room', flush=True); sys.exit(5)\n" + RUNS_FOREVER
    with pytest.raises(ProcessDied, match=r"exit code 5, after 0 restarts; last lines of .*trainer-2.log:\nno room$"):
        await supervise(build_specs(tmp_path, fails, RUNS_FOREVER), restarts=0)
    assert (tmp_path / "trainer-1.log").exists()
    assert list_running(tmp_path) == []


async def test_gang_is_done_when_all_ranks_are(tmp_path):
    """Ranks that are done do not stop the others."""
    code = "import time\nif rank == 0: time.sleep(0.3); open(DIR + '/done', 'w').close()"
    leader = waits_for("done")
    assert await supervise(build_specs(tmp_path, code, leader)) is RunOutcome.FINISHED
    assert len(read_pids(tmp_path, "trainer")) == 3


async def test_trainer_with_one_rank_has_a_token_and_a_process_on_the_head_has_none(tmp_path):
    path = "DIR + '/trainer.token'"
    code = f"open({path}, 'w').write(os.environ['RAMIFY_GANG_TOKEN'])\n{RUNS_FOREVER}"
    trainer = build_spec(tmp_path, "trainer", code, ProcessRole.FOLLOWER, placement=build_placement())
    waits = f"import time\nwhile not os.path.exists({path}) or not os.path.getsize({path}): time.sleep(0.01)\n"
    leader = waits + "sys.exit('RAMIFY_GANG_TOKEN' in os.environ)"
    specs = [trainer, build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER)]
    assert await supervise(specs, restarts=0, term=1) is RunOutcome.FINISHED
    assert (tmp_path / "trainer.token").read_text() == "1.0"


@pytest.mark.parametrize(
    ("term", "tokens"), [(1, ["1.5", "1.7", ""]), (2, ["2.0", "2.0", ""])], ids=["same head", "another head"]
)
async def test_restarted_supervisor_continues_the_tokens_of_its_term_and_waits_for_leases(tmp_path, term, tokens):
    """An earlier process was seen to end, another was not: it may run until its lease has ended.

    Its lease is the one that it was started with.
    """
    lines = []
    lease = LeaseTerms(duration=60.0, slack=0.4)
    specs = [
        build_spec(tmp_path, name, RUNS_FOREVER, placement=build_placement(lease=lease))
        for name in ("inference", "env")
    ]
    earlier = {
        "inference": EarlierProcess(FencingToken(1, 4)),
        "env": EarlierProcess(FencingToken(1, 6), replacement_delay=1.4),
    }
    seen = []
    specs.append(build_spec(tmp_path, "orchestrator", waits_for("env.pids"), ProcessRole.LEADER))
    started_at = time.monotonic()
    await supervise(specs, lines=lines, on_change=seen.append, earlier_processes=earlier, term=term)
    assert time.monotonic() - started_at > 1.4
    assert lines == ["env may still run on a node that is not reachable; starting in 1 s"]
    assert (seen[0][1].state, seen[0][1].token) == (ProcessState.SILENT, "1.6")
    assert [status.token for status in seen[-1]] == tokens


def test_record_of_a_run_says_which_processes_may_still_run(tmp_path):
    statuses = [
        ProcessStatus("inference", ProcessState.READY, 1, 0, 0.0, node="host2", token="3", replacement_delay=70.0),
        ProcessStatus("env", ProcessState.SILENT, 1, 0, 0.0, node="host2", token="4", replacement_delay=80.0),
        ProcessStatus("trainer", ProcessState.ENDED, 0, 0, 0.0, node="host3", token="0.1"),
        ProcessStatus("orchestrator", ProcessState.READY, 2, 0, 0.0),
    ]
    SupervisorState.begin(tmp_path, "http://127.0.0.1:1").with_processes(statuses).write(tmp_path)
    assert read_earlier_processes(tmp_path) == {
        "inference": EarlierProcess(FencingToken(0, 3), replacement_delay=70.0),
        "env": EarlierProcess(FencingToken(0, 4), replacement_delay=80.0),
        "trainer": EarlierProcess(FencingToken(0, 1)),
    }
    assert read_earlier_processes(tmp_path / "new") == {}


async def test_process_is_configured_when_those_that_it_starts_after_have_a_place(tmp_path):
    places = []

    def build_start(name):
        def build(slot):
            places.append(name)
            return ProcessStart((sys.executable, "-S", "-c", RUNS_FOREVER))

        return build

    names = {"env": ("inference",), "inference": ()}
    specs = [
        build_spec(tmp_path, name, "", placement=build_placement(), start_after=after, build_start=build_start(name))
        for name, after in names.items()
    ]
    leader = build_spec(tmp_path, "orchestrator", "", ProcessRole.LEADER, start_after=("env",))
    assert await supervise([leader, *specs]) is RunOutcome.FINISHED
    assert places == ["inference", "env"]
