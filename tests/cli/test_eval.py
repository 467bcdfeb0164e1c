"""`ramify eval`, and `show`, `export` and `replay` on its runs."""

import json
import os
import random
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.run.store import RunStore
from tests.rollout.evals import environments
from tests.support.engine import ScriptedEngine, fail, respond, reverse_some, run_engine
from tests.support.processes import wait_until
from tests.support.runs import FULL, command
from tests.support.source_lines import line_number

pytestmark = pytest.mark.process

ECHO = f"{environments.__file__}:Echo"
FILE = environments.__file__
UNREWARDED = f"{environments.__file__}:Unrewarded"
QUICK = ["--max_tries", "1", "--model_retries", "0"]


@pytest.fixture(scope="module")
def engine():
    with run_engine(ScriptedEngine(reverse_some)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty directory to work in."""
    monkeypatch.chdir(tmp_path)


def outcome(path: Path) -> dict[str, tuple]:
    """Return the results of a run without times."""
    with RunStore.open(path, write=False) as store:
        found = {}
        for row in store.rollouts():
            (trace,) = store.read_traces(row.id)
            ids = [node.token_ids.tolist() for node in trace.nodes]
            found[row.id] = (row.task, row.repetition, row.reward, row.failure, trace.stop, ids)
        return found


# -- finishing, continuing -------------------------------------------------------------------------------------------


def test_eval_prints_its_result_and_is_finished_on_rerun(engine, capsys):
    command = ["eval", ECHO, "-m", "tiny", "-b", engine.url, "-n", "3", "-r", "2", "-c", "4", "--name", "run"]
    assert main(command) == 0
    output = capsys.readouterr().out
    for shown in ("avg@2", "pass@1", "pass@2", "pass^2", "95 % interval", "truncated", "errors", "timing", "6 counted"):
        assert shown in output
    assert Path("outputs/run/config.toml").is_file()
    assert main(command) == 0
    assert "outputs/run is already finished (6 rollouts)" in capsys.readouterr().out
    engine.requests.clear()
    assert main([*command[:8], "-r", "3", "--name", "run"]) == 0
    assert "is already finished" not in capsys.readouterr().out
    assert len(engine.requests) == 3


def test_raising_reward_shows_file_line_and_message(engine, capsys):
    command = ["eval", ECHO, "--taskset.fault", "raise", "-m", "tiny", "-b", engine.url, "-n", "3", "-r", "1", *QUICK]
    text = 'raise RuntimeError("the judge fell asleep")'
    raised = f"environments.py:{line_number(environments, text)} in right: {text}"
    assert main([*command, "--name", "run"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"rollout task-1.0 failed: EnvironmentFault: right: RuntimeError: the judge fell asleep ({FILE}" in output
    assert output.count(raised) == 2  # in the log line and in the report
    assert main(["show", "outputs/run"]) == 0
    assert "1 × EnvironmentFault" in (shown := " ".join(capsys.readouterr().out.split()))
    assert raised in shown
    assert main(["show", "outputs/run", "task-1.0"]) == 0
    assert raised in " ".join(capsys.readouterr().out.split())


def test_taskset_without_rewards_has_no_score(engine, capsys):
    command = ["eval", UNREWARDED, "-m", "tiny", "-b", engine.url, "-n", "2", "-r", "1", "--name", "run"]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "has no reward, so its rollouts get no score; mark a method of the taskset with @rf.reward" in output
    assert "no score: the taskset has no reward" in output
    assert "0.000" not in output
    assert "length" in output
    with RunStore.open(Path("outputs/run"), write=False) as store:
        assert [row.reward for row in store.rollouts()] == [None, None]


def test_base_url_flag_replaces_the_inference_table_of_a_file(engine, capsys):
    Path("run.toml").write_text(f'[taskset]\nid = "{ECHO}"\n[inference]\nmax_running = 8\n')
    assert main(["eval", "@", "run.toml", "-b", f"{engine.url}/v1", "http://127.0.0.1:9/v1/", "--dry-run"]) == 0
    assert main(["eval", "@", "run.toml", "-b", "--dry-run"]) == 2
    assert "-b: needs the address of a server" in capsys.readouterr().err


def test_config_file_and_flags_match_short_flags(engine, capsys):
    Path("run.toml").write_text(f'name = "run"\nnum_tasks = 2\nrepetitions = 1\n[taskset]\nid = "{ECHO}"\n')
    assert main(["eval", "@", "run.toml", "-b", f"{engine.url}/v1", "--taskset.size", "1"]) == 0  # /v1 is allowed
    assert list(outcome(Path("outputs/run"))) == ["task-0.0"]
    capsys.readouterr()
    assert main(["eval", "@", "run.toml", "-b", engine.url, "--taskset.size", "2"]) == 2
    assert "taskset.size: was 1, now 2" in capsys.readouterr().err


def test_dry_run_runs_no_rollout(engine, capsys):
    engine.requests.clear()
    assert main(["eval", ECHO, "-b", engine.url, "-n", "2", "--name", "dry", "--dry-run"]) == 0
    assert "would run 8 rollouts" in capsys.readouterr().out
    assert engine.requests == []
    assert not Path("outputs/dry/run.sqlite").exists()


def test_show_prints_traces_and_keep_keeps_the_work_directory(engine, capsys):
    writing = ECHO.replace(":Echo", ":Writing")
    command = ["eval", writing, "-b", engine.url, "-n", "1", "-r", "1", "--name", "run"]
    assert main([*command, "--show-traces", "--keep-workdirs"]) == 0
    output = capsys.readouterr().out
    assert "word 0" in output
    assert "sampled" in output
    (folder,) = Path("outputs/run/work").iterdir()
    assert f"work directory {folder}" in output
    assert [path.read_text() for path in folder.rglob("note.txt")] == ["kept"]


def test_exit_1_if_every_rollout_failed(engine, capsys):
    engine.behaviour = fail
    try:
        assert main(["eval", ECHO, "-b", engine.url, "-n", "1", "-r", "2", *QUICK]) == 1
    finally:
        engine.behaviour = respond
    assert "ProviderError 2" in capsys.readouterr().out


# -- refused before the first rollout ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reverse-txt"], "did you mean 'reverse-text'"),
        (["reverse-text", "--taskset.max_char", "3"], "did you mean taskset.max_chars?"),
        ([ECHO, "--taskset.fault", "load"], "ValueError: the corpus is not there"),
        ([ECHO, "--taskset.size", "0"], "has no tasks"),
        ([ECHO, "-m", "nowhere/model"], "nowhere/model"),
        ([ECHO, "--num_task", "3"], "did you mean --num_tasks?"),
        ([], "taskset: required, but not given\n'ramify eval --help' shows the arguments"),
    ],
    ids=["taskset", "taskset key", "load", "no tasks", "model", "key", "nothing"],
)
def test_invalid_command_lines_are_exit_2(arguments, message, capsys):
    assert main(["eval", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not Path("outputs").exists()


def test_unreachable_server_is_exit_2(capsys):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert main(["eval", ECHO, "-b", url]) == 2
    message = capsys.readouterr().err
    assert f"{url} cannot be reached" in message
    assert message.count("cannot be reached") == 1


def test_port_in_use_is_exit_2(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["eval", ECHO, "-m", "tiny", "--server.port", str(port)]) == 2
    assert f"server.port: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_busy_run_is_exit_1_with_the_error_name(engine, capsys):
    with RunStore.open(Path("outputs/run")):
        assert main(["eval", ECHO, "-b", engine.url, "--name", "run"]) == 1
    assert capsys.readouterr().err.startswith("RunBusy: outputs/run is in use")


# -- killed, interrupted, out of room ---------------------------------------------------------------------------------


def started(*arguments: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*arguments), stdout=-1, stderr=-1, text=True, **options)


@pytest.mark.promise
def test_eval_killed_at_random_times_resumes_to_the_same_result():
    tasks, kills = (24, 10) if FULL else (8, 2)
    common = ["reverse-text", "-m", "tiny", "-n", str(tasks), "-r", "2", "--sampling.temperature", "0"]
    with run_engine(ScriptedEngine(reverse_some, delay=0.03)) as slow:
        command = ["eval", *common, "-b", slow.url, "--name"]
        assert main([*command, "whole"]) == 0
        expected = outcome(Path("outputs/whole"))
        assert len(expected) == 2 * tasks
        rng = random.Random(os.getpid())
        for _ in range(kills):
            slow.requests.clear()
            process = started(*command, "killed", "-c", "2")
            moment = rng.randrange(1, 6)
            wait_until(
                lambda moment=moment, process=process: len(slow.requests) >= moment or process.poll() is not None
            )
            process.kill()
            process.communicate(timeout=60)
            wait_until(lambda: not slow.connections)  # the engine has read all that it was sent
        kept = outcome(Path("outputs/killed"))
        slow.requests.clear()
        assert main([*command, "killed"]) == 0
        assert len(slow.requests) == 2 * tasks - len(kept)
        assert outcome(Path("outputs/killed")) == expected


def test_sigterm_stops_cleanly_and_prints_the_resume_command():
    """Also if SIGINT is ignored, as in a background process of a script; test_messages.py sends SIGINT."""
    with run_engine(ScriptedEngine(reverse_some, delay=0.1)) as slow:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process = started("eval", ECHO, "-b", slow.url, "-c", "1", "-r", "20", "--name", "run")
        finally:
            signal.signal(signal.SIGINT, before)
        wait_until(lambda: len(slow.requests) >= 3)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"resume with: ramify eval {ECHO} -b {slow.url} -c 1 -r 20 --name run" in err
    assert "Traceback" not in out + err
    assert len(outcome(Path("outputs/run"))) >= 2


@pytest.mark.megabytes(8)
def test_full_disk_is_exit_1_and_the_run_can_be_resumed(engine, small_disk, capsys):
    command = ["eval", "reverse-text", "-b", engine.url, "-n", "40", "-r", "2", "-c", "1", "-o", str(small_disk)]
    command += ["--name", "run"]
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(8_000_000))
    assert main(command) == 1
    output = capsys.readouterr().err
    assert output.startswith("StorageFull: ")
    assert "resume with: ramify eval reverse-text" in output
    ballast.unlink()
    kept = outcome(small_disk / "run")
    engine.requests.clear()
    assert main(command) == 0
    assert len(engine.requests) == 80 - len(kept)
    assert len(outcome(small_disk / "run")) == 80


# -- the commands around a run ----------------------------------------------------------------------------------------


def test_show_and_export_of_an_eval(engine, capsys):
    assert main(["eval", ECHO, "-b", engine.url, "-n", "2", "-r", "2", "--name", "run"]) == 0
    capsys.readouterr()
    assert main(["show", "run"]) == 0
    output = capsys.readouterr().out
    assert "task-1.1" in output
    assert "avg@2" in output
    assert main(["show", "outputs/run", "task-1.1"]) == 0
    assert "word 1" in capsys.readouterr().out
    for args in (["run", "task-1"], ["run", "other"], ["nothing"]):
        assert main(["show", *args]) == 2
    assert "no run 'nothing'" in capsys.readouterr().err
    assert main(["export", "run", "--to", "jsonl", "-o", "out.jsonl"]) == 0
    rollouts = [json.loads(line)["rollout"] for line in Path("out.jsonl").read_text().splitlines()]
    assert rollouts == ["task-0.0", "task-0.1", "task-1.0", "task-1.1"]
    assert main(["export", "run", "--to", "parquet"]) == 0
    assert Path("outputs/run/export.parquet").is_file()


def test_replay_rescores_with_the_current_rewards(engine, capsys):
    Path("changing.py").write_text(
        "from pathlib import Path\n"
        "import ramify as rf\n"
        "class Changing(rf.Taskset):\n"
        "    def load(self):\n"
        "        return [rf.Task(prompt=f'word {n}', key=f'k{n}') for n in range(3)]\n"
        "    @rf.reward\n"
        "    def score(self, task, trace):\n"
        "        return eval(Path('rule').read_text())\n"
    )
    Path("rule").write_text("0.25")
    assert main(["eval", "changing.py", "-b", engine.url, "-r", "1", "--name", "run"]) == 0
    Path("rule").write_text("float('1' in task.prompt)")
    engine.requests.clear()
    capsys.readouterr()
    assert main(["replay", "run"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["k0.0", "0.250", "0.000"] in lines
    assert ["k1.0", "0.250", "1.000"] in lines
    assert ["mean", "0.250", "0.333", "3", "rollouts"] in lines
    assert engine.requests == []
    assert outcome(Path("outputs/run"))["k1.0"][2] == 0.25  # the run is not changed


STATEFUL = """
import ramify as rf


class World:
    pass


class Stateful(rf.Taskset):
    def load(self):
        return [rf.Task(prompt=f"word {n}", key=f"k{n}") for n in range(2)]

    def setup(self, task, state):
        state.seen = {("a", 1): {3, 4}, task.key: [1.5, None, b"x"]}
        state.task = task.key

    def finalize(self, state):
        state.seen["end"] = True
        __OTHER__

    @rf.reward
    def score(self, task, state):
        assert state.seen == {("a", 1): {3, 4}, task.key: [1.5, None, b"x"], "end": True}
        return __VALUE__

    @rf.metric
    def has_workdir(self, runtime):
        return float(runtime.workdir is not None)
"""


def stateful(other: str = "", value: str = "0.25") -> None:
    Path("stateful.py").write_text(STATEFUL.replace("__OTHER__", other or "pass").replace("__VALUE__", value))


def eval_and_replay(engine, capsys, other: str = "") -> str:
    """Return the output of `replay` after the reward of an eval was edited."""
    stateful(other)
    assert main(["eval", "stateful.py", "-b", engine.url, "-r", "1", "--name", "run"]) == 0
    stateful(other, "float(state.task == 'k1')")
    capsys.readouterr()
    main(["replay", "run"])
    return "".join(capsys.readouterr())


def test_replay_passes_the_saved_state_to_rewards_and_refuses_those_that_need_the_runtime(engine, capsys):
    lines = [line.split() for line in eval_and_replay(engine, capsys).splitlines()]
    assert ["k0.0", "0.250", "0.000"] in lines and ["k1.0", "0.250", "1.000"] in lines
    text = Path("stateful.py").read_text().replace("def score(self, task, state)", "def score(self, task, runtime)")
    Path("stateful.py").write_text(text)
    assert main(["replay", "run"]) == 2
    message = "`score` cannot be rescored: it uses `runtime`, which ended with the rollout"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("state.world = World()", "state.world is a World"),
        ("state.text = 'x' * 2_000_000", "state is larger than 1,000,000 characters"),
    ],
)
def test_replay_explains_why_a_state_was_not_saved(engine, capsys, other, reason):
    output = " ".join(eval_and_replay(engine, capsys, other).split())  # the table wraps lines
    assert output.count(f"`score` uses `state`, which was not saved: {reason}") == 2 and "AttributeError" not in output


# -- the engine that comes with it ------------------------------------------------------------------------------------


def test_eval_starts_an_engine_for_the_model(capsys):
    tasks, repetitions = ("64", "4") if FULL else ("8", "1")
    command = ["eval", "reverse-text", "-m", "tiny", "-n", tasks, "-r", repetitions]
    assert main(command) == 0
    (path,) = Path("outputs").iterdir()
    found = outcome(path)
    assert len(found) == int(tasks) * int(repetitions)
    mean = sum(entry[2] for entry in found.values()) / len(found)
    assert (0.33 if FULL else 0.15) < mean < (0.63 if FULL else 0.85)  # 0.48 by `ramify model show tiny`
    assert (path / "logs" / "inference.log").is_file()
    assert main(command) == 0
    assert "is already finished" in capsys.readouterr().out


def test_changed_environment_is_refused_by_run_and_dry_run(engine, tmp_path, capsys):
    source = tmp_path / "words.py"
    code = "import ramify as rf\n\nclass Words(rf.Taskset):\n    def load(self):\n        yield rf.Task(prompt='a')\n\n"
    source.write_text(f"{code}    @rf.reward\n    def any(self, trace):\n        return 1.0\n")
    command = ["eval", str(source), "-b", engine.url, "-n", "1", "-r", "2", "--name", "changing"]
    assert main(command) == 0
    assert main([*command, "--dry-run"]) == 0
    assert "would run 0 rollouts" in capsys.readouterr().out, "both are stored"
    source.write_text(f"{code}    @rf.reward\n    def any(self, trace):\n        return 0.5\n")
    for more in ([], ["--dry-run"]):
        assert main([*command, *more]) == 2
        assert capsys.readouterr().err.startswith("EnvironmentChanged: ")
    assert main([*command, "--dry-run", "--accept-changes"]) == 0
    assert "would run 0 rollouts" in capsys.readouterr().out
    assert main([*command, "--dry-run", "--fresh"]) == 0
    assert "would run 2 rollouts" in capsys.readouterr().out
    assert main([*command, "--dry-run"]) == 2, "a dry run accepts nothing for the next one"
    assert main([*command, "--accept-changes"]) == 0
    out = capsys.readouterr().out
    assert "the change is recorded" in out
    assert "words.py has changed" in out
