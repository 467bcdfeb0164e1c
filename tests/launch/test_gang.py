"""The ranks of a gang are supervised as one process: they start together, and end together."""

import json

import pytest

from ramify.errors import ProcessDied
from ramify.launch.launcher import Placement
from ramify.launch.process import ProcessRole
from ramify.launch.supervisor import RunOutcome
from tests.launch.scripts import RUNS_FOREVER, alive, build_spec, pids
from tests.launch.test_supervisor import supervise

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
    return [
        build_spec(
            tmp_path, "trainer", REPORTS + code, ProcessRole.FOLLOWER, num_ranks=num_ranks, placement=Placement()
        ),
        build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER),
    ]


def read_reports(tmp_path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (tmp_path / "ranks").read_text().splitlines()]


def test_ranks_are_told_who_they_are_and_where_rank_0_listens(tmp_path):
    seen = []
    specs = build_specs(tmp_path, RUNS_FOREVER, waits_for_lines(3))
    assert supervise(specs, on_change=seen.append) is RunOutcome.FINISHED
    reports = sorted(read_reports(tmp_path), key=lambda report: report["RANK"])
    assert [report["RANK"] for report in reports] == [report["LOCAL_RANK"] for report in reports] == ["0", "1", "2"]
    assert {report["WORLD_SIZE"] for report in reports} == {"3"}
    assert len({(report["MASTER_ADDR"], report["MASTER_PORT"]) for report in reports}) == 1
    assert int(reports[0]["MASTER_PORT"]) > 0
    assert {statuses[0].token for statuses in seen} == {"0"}
    assert alive(tmp_path) == []


def test_killed_rank_stops_all_and_the_gang_restarts_with_a_new_port_and_token(tmp_path):
    lines = []
    dies = waits_for_lines(3) + "if rank == 1 and token == '0': os.kill(os.getpid(), 9)\n" + RUNS_FOREVER
    assert supervise(build_specs(tmp_path, dies, waits_for_lines(6)), lines=lines) is RunOutcome.FINISHED
    assert lines == ["trainer was killed by SIGKILL; restarting in 0.5 s (restart 1 of 3)"]
    first, second = read_reports(tmp_path)[:3], read_reports(tmp_path)[3:]
    assert {report["RAMIFY_GANG_TOKEN"] for report in first} == {"0"}
    assert {report["RAMIFY_GANG_TOKEN"] for report in second} == {"1"}
    assert {report["MASTER_PORT"] for report in first}.isdisjoint(report["MASTER_PORT"] for report in second)
    assert len(pids(tmp_path, "trainer")) == 6
    assert alive(tmp_path) == []


def test_failure_shows_the_log_of_the_rank_that_failed(tmp_path):
    fails = "if rank == 2: print('no room', flush=True); sys.exit(5)\n" + RUNS_FOREVER
    with pytest.raises(ProcessDied, match=r"exit code 5, after 0 restarts; last lines of .*trainer-2.log:\nno room$"):
        supervise(build_specs(tmp_path, fails, RUNS_FOREVER), restarts=0)
    assert (tmp_path / "trainer-1.log").exists()
    assert alive(tmp_path) == []


def test_gang_is_done_when_all_ranks_are(tmp_path):
    """Ranks that are done do not stop the others."""
    code = "import time\nif rank == 0: time.sleep(0.3); open(DIR + '/done', 'w').close()"
    leader = "import time\nwhile not os.path.exists(DIR + '/done'): time.sleep(0.01)\n"
    assert supervise(build_specs(tmp_path, code, leader)) is RunOutcome.FINISHED
    assert len(pids(tmp_path, "trainer")) == 3


def test_gang_of_a_later_head_has_its_epoch_in_the_token(tmp_path):
    specs = build_specs(tmp_path, RUNS_FOREVER, waits_for_lines(2), num_ranks=2)
    assert supervise(specs, epoch=2) is RunOutcome.FINISHED
    assert [report["RAMIFY_GANG_TOKEN"] for report in read_reports(tmp_path)] == ["2.0", "2.0"]
