"""`task.setup` prepares the runtimes of the agent and of the rewards, `task.pre_run` only the agent's."""

import pytest

import ramify as rf
from tests.support.attempts import OneTask, error_names, load_env, run_one

pytestmark = pytest.mark.process


class CommandTaskset(OneTask):
    async def setup(self, runtime: rf.Runtime) -> None:
        await runtime.run("echo hook >> order", timeout=10)

    async def finalize(self, runtime: rf.Runtime, trace: rf.Trace) -> None:
        trace.info["agent"] = (await runtime.read("order")).decode().split()

    @rf.reward
    async def sees(self, runtime: rf.Runtime, trace: rf.Trace) -> float:
        trace.info["rewards"] = (await runtime.read("order")).decode().split()
        return 1.0


async def test_commands_run_in_order_before_the_agent_and_setup_also_for_the_rewards():
    task = rf.Task(prompt="go", setup=("echo setup >> order",), pre_run=("echo first >> order", "echo second >> order"))
    trace = await run_one(load_env(CommandTaskset), ["done"], task.model_copy(update={"outputs": ()}))
    assert error_names(trace) == []
    assert trace.info["agent"] == ["setup", "hook", "first", "second"]
    assert trace.info["rewards"] == ["setup"]


async def test_failed_command_ends_the_attempt_and_is_named():
    task = rf.Task(prompt="go", setup=("true", "echo no such package; exit 7"))
    trace = await run_one(load_env(CommandTaskset), ["done"], task)
    assert error_names(trace) == ["EnvironmentFault"]
    first_line, output = trace.errors[0].message.split("\n")
    assert "task.setup[1] exited with 7" in first_line and "; correct task.setup, or add" in first_line
    assert output == "no such package"


async def test_command_that_does_not_end_is_stopped():
    env = load_env(CommandTaskset, timeouts={"setup": 0.5})
    trace = await run_one(env, ["done"], rf.Task(prompt="go", pre_run=("sleep 100",)))
    assert error_names(trace) in (["EnvironmentFault"], ["DeadlineExceeded"])


async def test_commands_of_the_runtime_follow_those_of_the_task_and_their_output_is_logged(caplog):
    commands = {"setup": ["echo all >> order; echo installed"], "pre_run": ["echo last >> order; echo to stderr >&2"]}
    env = load_env(CommandTaskset, runtime={"id": "local", **commands})
    task = rf.Task(prompt="go", setup=("echo setup >> order",), pre_run=("echo first >> order",), outputs=())
    with caplog.at_level("INFO", "ramify.runtimes"):
        trace = await run_one(env, ["done"], task)
    assert error_names(trace) == []
    assert trace.info["agent"] == ["setup", "all", "hook", "first", "last"]
    assert trace.info["rewards"] == ["setup", "all"]
    logged = [record.message for record in caplog.records if record.message.startswith("command ended id=r1 ")]
    keys = ["task.setup[0]", "runtime.setup[0]", "task.pre_run[0]", "runtime.pre_run[0]"]
    assert [line.split("key=")[1].split()[0] for line in logged] == [*keys, *keys[:2]]
    assert logged[1].endswith("output=installed") and logged[3].endswith('output="to stderr"')


async def test_failed_command_of_the_runtime_is_named():
    env = load_env(CommandTaskset, runtime={"id": "local", "pre_run": ["exit 3"]})
    trace = await run_one(env, ["done"], rf.Task(prompt="go"))
    assert error_names(trace) == ["EnvironmentFault"] and "runtime.pre_run[0] exited with 3" in trace.errors[0].message
