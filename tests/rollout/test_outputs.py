"""Rewards of a task with `outputs` run in a fresh runtime that holds only these files of the agent."""

import pytest
from pydantic import ValidationError

import ramify as rf
from tests.rollout.runtime.conftest import skip_unless_available
from tests.support.attempts import OneTask, error_names, load_env, run_one, tool_call

pytestmark = pytest.mark.process

COMMANDS = {
    "writes": "echo solution > answer.txt; chmod +x answer.txt; mkdir -p pkg/deep; echo part > pkg/deep/part.txt; "
    "echo x > other.txt",
    "links": "ln -s /etc/passwd answer.txt; mkdir pkg; ln -s /etc pkg/etc; mkfifo pkg/pipe",
    "poisons the sandbox": "mkdir -p $HOME/bin; echo evil > $HOME/.profile; echo evil > $TMPDIR/x; sleep 1000 &",
}


class SandboxTaskset(OneTask):
    """The agent runs commands; the reward records what it finds in its own runtime."""

    def tools(self, runtime: rf.Runtime):
        async def shell(command: str) -> str:
            """Run a command."""
            return (await runtime.run(command, timeout=10)).text

        return [shell]

    @rf.reward
    async def sees(self, runtime: rf.Runtime, trace: rf.Trace) -> float:
        listing = await runtime.run("find . -type f -o -type l -o -type p | sort; ls -A $HOME $TMPDIR", timeout=10)
        trace.info["seen"] = listing.text.split()
        trace.info["is_executable"] = (await runtime.run("test -x answer.txt", timeout=10)).returncode == 0
        return 1.0


@pytest.mark.parametrize("runtime", ["local", "sandbox"])
@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("writes", ["./answer.txt", "./pkg/deep/part.txt"]),
        ("links", []),
        ("poisons the sandbox", []),
    ],
)
async def test_rewards_see_only_the_outputs(runtime, command, files):
    skip_unless_available(runtime)
    env = load_env(SandboxTaskset, runtime={"id": runtime})
    task = rf.Task(prompt="go", outputs=("answer.txt", "pkg"))
    trace = await run_one(env, [tool_call("shell", command=COMMANDS[command]), "done"], task)
    assert error_names(trace) == [] and trace.rewards["sees"] == (1.0, 1.0)
    seen = [entry for entry in trace.info["seen"] if entry.startswith("./")]
    assert seen == files
    assert trace.info["is_executable"] == (command == "writes")
    assert not {"bin", ".profile", "x"} & set(trace.info["seen"])
    assert set(trace.info["outputs"]) == ({"answer.txt", "pkg"} - {"pkg"} if command == "links" else set()) | (
        {"answer.txt", "pkg"} if command == "poisons the sandbox" else set()
    )


async def test_without_outputs_rewards_see_the_agents_runtime():
    env = load_env(SandboxTaskset)
    trace = await run_one(env, [tool_call("shell", command="echo x > other.txt"), "done"], rf.Task(prompt="go"))
    assert "./other.txt" in trace.info["seen"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ""])
def test_outputs_outside_of_the_work_directory_are_refused(path):
    with pytest.raises(ValidationError, match="not a path in the work directory"):
        rf.Task(prompt="go", outputs=(path,))


@pytest.mark.parametrize(
    "runtime", ["local", pytest.param("sandbox", marks=pytest.mark.full("both runtimes copy with `SandboxFiles`"))]
)
@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p pkg/$(printf 'd/%.0s' $(seq 1500))",
        "mkdir pkg; cd pkg; for i in 1 2 3 4 5; do : > empty$i; done",
    ],
    ids=["a deep directory", "many empty files"],
)
async def test_outputs_that_cannot_be_copied_are_missing_and_scored(runtime, command, monkeypatch):
    skip_unless_available(runtime)
    monkeypatch.setattr("ramify.rollout.runtime.sandbox_files.MAX_FILES", 4)
    env = load_env(SandboxTaskset, runtime={"id": runtime})
    task = rf.Task(prompt="go", outputs=("pkg",))
    trace = await run_one(env, [tool_call("shell", command=command), "done"], task)
    assert error_names(trace) == [] and trace.rewards["sees"] == (1.0, 1.0)
    assert trace.info["outputs"]["pkg"].startswith("ValueError: ")
    assert [entry for entry in trace.info["seen"] if entry.startswith("./")] == []


async def test_failure_to_move_the_outputs_is_named(monkeypatch):
    async def fail(*_):
        raise LookupError("no such thing")

    monkeypatch.setattr("ramify.rollout.attempt.collect_outputs", fail)
    trace = await run_one(load_env(SandboxTaskset), ["done"], rf.Task(prompt="go", outputs=("pkg",)))
    assert error_names(trace) == ["EnvironmentFault"] and trace.rewards["sees"] is None
