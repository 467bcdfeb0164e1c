"""The harness `program`: a command-line agent in a runtime, which calls the policy over HTTP."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import ramify as rf
from ramify.core.config import parse
from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.infer.gateway import Gateway
from ramify.launch.run_checks import list_runtime_notes
from ramify.orchestrate.run_config import RunConfig
from ramify.rollout import Environment
from ramify.rollout.runtime.bwrap import find_unsupported_reason
from ramify.trace import Trace
from tests.rollout.runtime.conftest import build_runtime_table, skip_unless_available
from tests.support.attempts import OneTask, error_names, list_messages, load_env, run_one
from tests.support.images import make_media

pytestmark = pytest.mark.process

AGENT = (Path(__file__).parent / "script_agent.py").read_text()
RUNTIMES = ["local", "sandbox", "container"]
COMMAND = ["python3", "-S", "agent.py", "openai"]


@pytest.fixture(params=RUNTIMES)
def runtime(request) -> str:
    skip_unless_available(request.param)
    return request.param


class Files(OneTask):
    @rf.reward
    async def wrote(self, runtime: rf.Runtime, trace: rf.Trace) -> float:
        trace.info["answer"] = (await runtime.read("answer.txt")).decode()
        return 1.0


async def run_program(script, *, taskset=OneTask, runtime: str = "local", files=None, **harness: Any) -> Trace:
    table = {"id": "program", "command": COMMAND, "files": {"agent.py": AGENT, **(files or {})}, **harness}
    env = load_env(taskset, harness=table, runtime=build_runtime_table(runtime))
    async with Gateway() as gateway:
        return await run_one(env, script, gateway=gateway)


# -- a rollout --------------------------------------------------------------------------------------------------------


PROMPTS = [
    ("arg", COMMAND),
    ("arg", [*COMMAND, "{prompt}"]),
    ("stdin", [*COMMAND, "-"]),
    ("file", [*COMMAND, "@{prompt_file}"]),
]
OTHERS_IN_SANDBOX = pytest.mark.full("the runtime is tested with a file, the prompt in the local runtime")


@pytest.mark.parametrize(
    ("runtime", "prompt", "command"),
    [
        pytest.param(runtime, *case, marks=OTHERS_IN_SANDBOX if runtime == "sandbox" and case[0] != "file" else ())
        for runtime in RUNTIMES
        for case in PROMPTS
    ],
    indirect=["runtime"],
)
async def test_the_program_gets_the_prompt_and_its_call_is_recorded(runtime, prompt, command):
    trace = await run_program(["forty-two"], taskset=Files, runtime=runtime, prompt=prompt, command=command)
    assert not trace.errors
    assert list_messages(trace) == [("user", "Be brief.\n\ngo"), ("assistant", "forty-two")]
    assert trace.nodes[1].is_trainable
    assert trace.stop == "done"
    assert trace.reward == 1.0
    assert trace.info["answer"] == trace.last_reply == "forty-two"
    assert trace.info["program"]["exit_code"] == 0
    assert trace.info["program"]["stdout"] == "the model said forty-two\n"


async def test_a_title_is_not_the_last_reply_about_the_task():
    calls = "python3 -S agent.py openai 'Be brief.\n\ngo'; python3 -S agent.py openai 'Write a title.'"
    trace = await run_program(["forty-two", "A title"], command=["sh", "-c", calls], prompt="stdin")
    assert trace.last_reply == "A title"
    assert trace.info["program"]["reply"] == "forty-two"


async def test_the_program_may_use_anthropics_variables():
    trace = await run_program(["forty-two"], command=["python3", "-S", "agent.py", "anthropic"])
    assert list_messages(trace) == [("user", "Be brief.\n\ngo"), ("assistant", "forty-two")]


async def test_env_pass_env_and_files_reach_the_program(monkeypatch):
    monkeypatch.setenv("LICENSE_KEY", "passed")
    monkeypatch.setenv("HIDDEN", "secret")
    trace = await run_program(
        [],
        command=["sh", "-c", 'cat "$CONFIG"; echo "$LICENSE_KEY/$HIDDEN/$PWD"'],
        prompt="stdin",
        env={"CONFIG": "{home}/.agent/config.json"},
        pass_env=["LICENSE_KEY"],
        files={"~/.agent/config.json": '{"model": "{model}", "length": {context_length}, "other": {}}\n'},
    )
    config, values = trace.info["program"]["stdout"].splitlines()
    assert config == '{"model": "tiny", "length": 131072, "other": {}}'
    assert values.startswith("passed//")
    assert values.endswith("/work")


async def test_the_example_agent_is_copied_into_the_runtime_and_needs_only_the_standard_library(runtime):
    copy_files = {"agent.py": "examples/reverse_text/agent.py"}
    command = ["python3", "-S", "agent.py"]  # -S: without installed packages
    trace = await run_program(
        ["forty-two"],
        runtime=runtime,
        files={"agent.py": "replaced"},
        copy_files=copy_files,
        command=command,
        prompt="stdin",
    )
    assert not trace.errors
    assert list_messages(trace) == [("user", "Be brief.\n\ngo"), ("assistant", "forty-two")]
    assert trace.info["program"]["stdout"] == "forty-two\n"


@pytest.mark.parametrize(
    ("copy_files", "message"),
    [
        ({"agent.py": "examples/no_agent.py"}, "examples/no_agent.py is not a file of this machine, seen from "),
        ({"/agent.py": "README.md"}, "harness.copy_files: '/agent.py' is outside the sandbox"),
    ],
)
def test_files_that_cannot_be_copied_are_refused(copy_files, message):
    with pytest.raises(ConfigInvalid, match=re.escape(message)):
        load_env(OneTask, harness={"id": "program", "command": COMMAND, "copy_files": copy_files})


@pytest.mark.parametrize("has_bwrap", [True, False])
def test_a_sandbox_may_fall_back_to_the_local_runtime(has_bwrap, tmp_path, monkeypatch):
    if has_bwrap:
        skip_unless_available("sandbox")
    else:
        (tmp_path / "bwrap").write_text("#!/bin/sh\necho not today >&2; exit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    find_unsupported_reason.cache_clear()
    try:
        config = parse(RunConfig, ["@", "examples/reverse_text/agent.toml"])
        env = Environment.load(config.train[0].source_config)
        assert env.runtime_metadata == {"id": "sandbox" if has_bwrap else "local"}
        notes = list_runtime_notes(config)
        assert notes == [] if has_bwrap else "train.0.runtime: programs run without isolation" in notes[0]
        table = {"id": "sandbox", "fallback": "local", "limits": {"disk_mb": 10}}
        if not has_bwrap:  # a limit is enforced or refused, also there
            with pytest.raises(ConfigInvalid, match="disk_mb"):
                load_env(OneTask, runtime=table)
    finally:
        find_unsupported_reason.cache_clear()


# -- failures ---------------------------------------------------------------------------------------------------------


async def test_a_program_that_fails_before_the_first_reply_is_an_agent_exit():
    trace = await run_program([], command=["sh", "-c", "echo broken >&2; exit 3"])
    assert error_names(trace) == ["AgentFailed"]
    assert "code 3 before the first reply: broken" in trace.errors[0].message
    assert trace.info["program"]["exit_code"] == 3


async def test_an_agent_exit_begins_with_the_last_line_of_the_output():
    trace = await run_program([], command=["python3", "-c", "import no_such_module"])
    message = (
        "the program exited with code 1 before the first reply: ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert trace.errors[0].message.splitlines()[0] == message
    assert "Traceback" in trace.errors[0].message


async def test_a_program_that_is_killed_says_by_which_signal():
    trace = await run_program([], command=["sh", "-c", "kill -9 $$"])
    assert trace.errors[0].message == "the program was killed by signal 9 before the first reply"


@pytest.mark.parametrize("command", ["kill -9 $$", "(kill -9 $(exec sh -c 'echo $PPID')); exit $?"])
async def test_a_program_that_is_killed_under_a_memory_limit_names_the_limit(command):
    skip_unless_available("sandbox")
    trace = await run_program([], runtime="sandbox", command=["sh", "-c", command])
    assert "maybe because it exceeded memory_mb = 2048, before the first reply" in trace.errors[0].message


async def test_a_program_that_fails_after_a_reply_is_scored():
    trace = await run_program(["forty-two"], taskset=Files, env={"EXIT_CODE": "1"})
    assert (trace.stop, trace.errors, trace.reward) == ("exit", [], 1.0)


async def test_a_program_that_is_not_there_is_a_fault_of_the_environment(runtime):
    trace = await run_program([], runtime=runtime, command=["no-such-agent"])
    assert error_names(trace) == ["EnvironmentFault"]
    assert "no-such-agent" in trace.errors[0].message and "runtime.prepend_path" in trace.errors[0].message


async def test_a_program_that_gives_up_after_a_failed_call_is_not_blamed():
    trace = await run_program([ProviderError("no engine")])
    assert error_names(trace) == ["ProviderError"]


async def test_an_exhausted_budget_is_the_stop_reason():
    harness = {"id": "program", "command": ["sh", "-c", "python3 -S agent.py openai a && python3 -S agent.py openai b"]}
    env = load_env(OneTask, harness={**harness, "files": {"agent.py": AGENT}}, max_turns=1)
    async with Gateway() as gateway:
        trace = await run_one(env, ["one", "two"], gateway=gateway)
    assert (trace.stop, trace.num_turns, trace.errors) == ("max_turns", 1, [])


async def test_a_program_that_takes_too_long_is_killed_and_its_output_kept(runtime):
    timeout = 8.0 if runtime == "container" else 2.0  # an engine takes a second for a command
    trace = await run_program([], runtime=runtime, command=["sh", "-c", "echo started; sleep 1000"], timeout=timeout)
    assert error_names(trace) == ["BudgetExceeded"]
    assert trace.info["program"]["exit_code"] is None
    assert trace.info["program"]["stdout"] == "started\n"


async def test_output_is_bounded_in_characters():
    trace = await run_program([], command=["sh", "-c", "yes ü | tr -d '\\n' | head -c 2000"], max_output_chars=1000)
    assert trace.info["program"]["stdout"] == "ü" * 1000
    trace = await run_program([], command=["sh", "-c", "echo text"], max_output_chars=0)
    assert trace.info["program"]["stdout"] == "\n[5 characters left out]\n"


async def test_a_stop_hook_ends_the_program():
    class Stopping(OneTask):
        @rf.stop
        def enough(self, trace: rf.Trace) -> bool:
            return trace.last_reply == "two"

    command = ["sh", "-c", "for i in 1 2 3; do python3 -S agent.py openai $i; done; sleep 1000"]
    trace = await run_program(["one", "two", "three"], taskset=Stopping, command=command)
    assert (trace.stop, trace.num_turns, trace.errors) == ("enough", 2, [])


# -- tools of the taskset ---------------------------------------------------------------------------------------------


class Counting(OneTask):
    def setup(self, state) -> None:
        state.total = 0

    @rf.tool
    def add(self, amount: int, state) -> int:
        """Add to the total and return it."""
        state.total += amount
        return state.total

    @rf.tool
    def look(self) -> list[Any]:
        """Look at the picture."""
        return ["a picture", make_media(4, 4)]

    @rf.reward
    def total(self, state) -> float:
        return float(state.total)


async def test_the_program_calls_tools_from_inside_the_runtime(runtime):
    calls = """py="python3 -S"; $py agent.py openai go; $py tools.py
        $py tools.py add '{"amount": 2}'; $py tools.py add '{"amount": 3}'; $py tools.py look; ls *.png
        $py tools.py add '{"amount": "many"}' || echo failed"""
    copy_files = {"tools.py": "src/ramify/rollout/harness/tool_client.py"}
    trace = await run_program(
        ["forty-two"], taskset=Counting, runtime=runtime, command=["sh", "-c", calls], copy_files=copy_files
    )
    assert not trace.errors
    assert trace.reward == 5.0
    _, add, look, two, five, picture, image, file, problem, failed = trace.info["program"]["stdout"].splitlines()
    assert add == 'add {"amount": {"type": "integer"}}: Add to the total and return it.'
    assert (look, two, five, picture) == ("look {}: Look at the picture.", "2", "5", "a picture")
    assert image == f"[image written to {file}]"
    assert problem.startswith("error: add: argument amount")
    assert failed == "failed"
    recorded = trace.info["tool_calls"]
    assert [call["tool"] for call in recorded] == ["add", "add", "look", "add"]
    assert all(call["node"] == 1 for call in recorded)  # after the model's reply


async def test_address_and_key_of_the_tools_are_in_a_variable_and_in_a_file():
    command = ["sh", "-c", 'echo "$MCP_SERVER_URL"; cat "$0"', "{mcp_config}"]
    trace = await run_program([], taskset=Counting, command=command, env={"URL": "{mcp_url}"}, prompt="stdin")
    url, config = trace.info["program"]["stdout"].splitlines()
    assert url.startswith("http://127.0.0.1:") and url.endswith("/v1/mcp")
    server = json.loads(config)["mcpServers"]["taskset"]
    assert (server["type"], server["url"]) == ("http", url)
    assert re.fullmatch("Bearer .{43}", server["headers"]["Authorization"])


async def test_a_stop_hook_ends_the_program_after_a_tool_call():
    class Stopping(Counting):
        @rf.stop
        def enough(self, state) -> bool:
            return state.total >= 2

    calls = """python3 -S agent.py openai go; python3 -S tools.py add '{"amount": 2}'; sleep 1000"""
    copy_files = {"tools.py": "src/ramify/rollout/harness/tool_client.py"}
    trace = await run_program(["forty-two"], taskset=Stopping, command=["sh", "-c", calls], copy_files=copy_files)
    assert (trace.stop, trace.errors) == ("enough", [])


# -- refusals before the first rollout --------------------------------------------------------------------------------


def test_a_task_that_is_not_one_text_is_refused():
    env = load_env(OneTask, harness={"id": "program", "command": ["agent"]})
    for task in (rf.Task(), rf.Task(prompt=({"role": "assistant", "content": "hi"},))):
        with pytest.raises(ConfigInvalid, match="harness 'program'"):
            env.check_task(task)


@pytest.mark.parametrize(
    ("harness", "message"),
    [
        ({}, "harness.command"),
        ({"command": ["agent"], "prompt": "file"}, r"needs \{prompt_file\} in the command"),
        ({"command": ["agent", "{prompt_file}"]}, 'needs prompt = "file"'),
        ({"command": ["agent"], "pass_env": ["NOT_SET_ANYWHERE"]}, "harness.pass_env: NOT_SET_ANYWHERE"),
    ],
)
def test_an_invalid_config_is_refused(harness, message):
    with pytest.raises(ConfigInvalid, match=message):
        load_env(OneTask, harness={"id": "program", **harness})


@pytest.mark.parametrize("path", ["/etc/agent.toml", "../agent.toml"])
def test_files_outside_of_the_sandbox_are_refused_when_the_environment_is_loaded(path):
    message = f"harness.files: '{path}' is outside the sandbox; use a path relative to the work directory, or ~/..."
    with pytest.raises(ConfigInvalid, match=re.escape(message)):
        load_env(OneTask, harness={"id": "program", "command": ["agent"], "files": {path: "x"}})
