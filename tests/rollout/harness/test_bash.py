"""The bash harness: its tools in every runtime, bounded results, its system prompt."""

from typing import Any

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid
from ramify.rollout.harness.config import BASH_SYSTEM_PROMPT
from tests.rollout.runtime.conftest import RUNTIMES, skip_unless_available
from tests.support.attempts import TASK, OneTask, error_names, list_messages, load_env, run_one, tool_call

pytestmark = pytest.mark.process


@pytest.fixture(params=["local", "sandbox"])
def runtime(request) -> dict[str, str]:
    assert request.param in RUNTIMES
    skip_unless_available(request.param)
    return {"id": request.param}


async def run_tools(runtime: dict[str, str], *calls: str, **harness: Any) -> list[str]:
    """Run tool calls one by one and return their results."""
    env = load_env(OneTask, harness={"id": "bash", **harness}, runtime=runtime)
    trace = await run_one(env, [*calls, "done"])
    assert trace.stop == "done", trace.errors
    return [text for role, text in list_messages(trace) if role == "tool"]


def bash(command: str, **arguments: Any) -> str:
    return tool_call("bash", command=command, **arguments)


async def test_commands_and_files_share_the_runtime_of_the_rollout(runtime):
    results = await run_tools(
        runtime,
        tool_call("write_file", path="src/hello.py", content="print('hello')\n"),
        bash("python3 src/hello.py && pwd"),
        tool_call("edit_file", path="src/hello.py", old="hello", new="bye"),
        bash("python3 src/hello.py > out.txt"),
        tool_call("read_file", path="out.txt"),
    )
    assert results[0] == "wrote src/hello.py"
    assert results[1].startswith("hello\n/")
    assert results[2:] == ["edited src/hello.py", "[exit code 0]", "bye\n"]


async def test_output_has_both_streams_in_order_and_the_exit_code(runtime):
    (result,) = await run_tools(runtime, bash("echo one; echo two >&2; echo three; exit 3"))
    assert result == "one\ntwo\nthree\n[exit code 3]"


async def test_commands_run_in_bash_and_in_a_new_shell_each(runtime):
    results = await run_tools(runtime, bash("cd /; x=1; [[ -n $BASH_VERSION ]] && echo bash"), bash('echo "x=$x"; pwd'))
    assert results[0] == "bash\n"
    assert results[1].startswith("x=\n") and results[1] != "x=\n/\n"


@pytest.mark.parametrize("arguments", [{"timeout": 2}, {}, {"timeout": 60}])
async def test_a_command_is_killed_at_the_smaller_of_its_timeout_and_the_configured_one(arguments):
    (result,) = await run_tools({"id": "local"}, bash("echo started; sleep 30", **arguments), command_timeout=2)
    assert result == "started\n[killed after 2 s]"


async def test_long_output_keeps_its_beginning_and_end(runtime):
    (result,) = await run_tools(runtime, bash("echo first; seq 100000; echo last"), max_output_chars=200)
    assert result.startswith("first\n1\n") and result.endswith("\nlast\n")
    assert "characters left out" in result and len(result) < 300


async def test_long_file_is_read_in_parts_that_together_are_the_file(runtime):
    content = "".join(f"line {number} of the file\n" for number in range(1, 41))
    write = tool_call("write_file", path="long.txt", content=content)
    first, second = (
        await run_tools(
            runtime,
            write,
            tool_call("read_file", path="long.txt"),
            tool_call("read_file", path="long.txt", first_line=24),
            max_output_chars=460,
        )
    )[1:]
    *shown, note = first.splitlines()
    assert note == "[lines 24 to 40 left out; read on with first_line=24]"
    assert "\n".join(shown) + "\n" + second == content


async def test_mistakes_of_the_model_are_shown_to_it(runtime):
    results = await run_tools(
        runtime,
        tool_call("write_file", path="a.txt", content="x x"),
        tool_call("edit_file", path="a.txt", old="x", new="y"),
        tool_call("edit_file", path="a.txt", old="", new="y"),
        tool_call("read_file", path="b.txt"),
        tool_call("read_file", path="a.txt", first_line=5),
        tool_call("read_file", path="../../../../etc/passwd"),
        bash("true", timeout=-1),
        bash("no-such-program"),
    )
    assert "old must occur exactly once in a.txt; it occurs 2 times" in results[1]
    assert "it occurs 0 times" in results[2]
    assert results[3].startswith("error: FileNotFoundError")
    assert "has 1 lines; there is no line 5" in results[4]
    assert results[5].startswith("error:")
    assert "argument timeout" in results[6]
    assert "[exit code 127]" in results[7]


async def test_an_agent_that_ends_its_sandbox_ends_the_rollout_and_is_scored():
    skip_unless_available("sandbox")

    class Scored(OneTask):
        @rf.reward
        def fixed(self) -> float:
            return 0.5

    env = load_env(Scored, harness={"id": "bash"}, runtime={"id": "sandbox"})
    trace = await run_one(env, [bash("kill -9 -1; kill -9 1"), bash("echo still here"), "done"])
    assert error_names(trace) in ([], ["AgentFailed"])
    assert trace.reward == 0.5


@pytest.mark.parametrize("prompt", [None, "", "Use the shell."])
async def test_system_prompt_precedes_that_of_the_task(prompt):
    harness = {"id": "bash"} | ({} if prompt is None else {"system_prompt": prompt})
    (role, text), *_ = list_messages(await run_one(load_env(OneTask, harness=harness), ["done"]))
    expected = BASH_SYSTEM_PROMPT if prompt is None else prompt
    assert role == "system"
    assert text == (f"{expected}\n\n{TASK.system}" if expected else TASK.system)


async def test_system_prompt_joins_the_system_message_of_a_prompt_of_messages():
    prompt = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "go"})
    trace = await run_one(
        load_env(OneTask, harness={"id": "bash", "system_prompt": "Work."}), ["done"], rf.Task(prompt=prompt)
    )
    assert list_messages(trace)[:2] == [("system", "Work.\n\nBe kind."), ("user", "go")]


class WithTools(OneTask):
    @rf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


async def test_tools_of_the_taskset_are_offered_too():
    trace = await run_one(
        load_env(WithTools, harness={"id": "bash"}), [tool_call("add", a=1, b=2) + bash("echo 4"), "done"]
    )
    assert [text for role, text in list_messages(trace) if role == "tool"] == ["3", "4\n"]


def test_a_tool_of_the_taskset_with_the_name_of_a_built_in_one_is_refused():
    class Clashing(OneTask):
        @rf.tool
        def bash(self, command: str) -> str:
            """Pretend."""
            return command

    with pytest.raises(ConfigInvalid, match="tool named bash"):
        load_env(Clashing, harness={"id": "bash"})
