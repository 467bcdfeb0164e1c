"""The presets of the program harness, with a stand-in for each program; `make test-agents` runs the real ones."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

import ramify as rf
from ramify.infer.gateway import Gateway
from tests.support.attempts import OneTask, load_env, run_one

pytestmark = pytest.mark.process

PROGRAMS = {"codex": "codex", "claude-code": "claude", "opencode": "opencode", "pi": "pi", "mini-swe-agent": "mini"}
CONFIG_FILES = {
    "codex": ".codex/config.toml",
    "opencode": ".config/opencode/opencode.json",
    "pi": ".pi/agent/models.json",
}
STAND_IN = """#!/usr/bin/env python3
import json, os, sys, pathlib
home = pathlib.Path.home()
files = {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()}
print(json.dumps({"argv": sys.argv[1:], "stdin": sys.stdin.read(), "env": dict(os.environ), "files": files}))
"""


TOOL_FILES = {
    "codex": [".codex/config.toml"],
    "claude-code": [".claude.json"],
    "opencode": [".config/opencode/config.json"],
}


class Adding(OneTask):
    @rf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


async def run_preset(name: str, folder: Path, taskset=OneTask, **harness: Any) -> tuple[dict[str, Any], str]:
    """Run a preset with its stand-in; return what the program saw, and the URL of the gateway."""
    program = folder / PROGRAMS[name]
    program.write_text(STAND_IN)
    program.chmod(0o755)
    table = {"id": name, "max_output_chars": 100_000, **harness}
    env = load_env(taskset, harness=table, runtime={"env": {"PATH": f"{folder}:{os.environ['PATH']}"}})
    async with Gateway() as gateway:
        trace = await run_one(env, [], gateway=gateway)
        assert not trace.errors, trace.errors
        return json.loads(trace.info["program"]["stdout"]), gateway.address


@pytest.mark.parametrize("name", PROGRAMS)
async def test_the_program_gets_the_prompt_and_the_address_of_the_gateway(name, tmp_path):
    seen, address = await run_preset(name, tmp_path)
    assert [seen["stdin"], *seen["argv"]].count("Be brief.\n\ngo") == 1
    assert seen["env"]["OPENAI_BASE_URL"] == f"{address}/v1"
    assert seen["env"]["ANTHROPIC_BASE_URL"] == address
    assert list(seen["files"]) == ([CONFIG_FILES[name]] if name in CONFIG_FILES else [])
    for text in seen["files"].values():
        config = tomllib.loads(text) if name == "codex" else json.loads(text)
        assert f"{address}/v1" in json.dumps(config)
        assert "131072" in json.dumps(config)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("codex", ["resume", "--last"]),
        ("claude-code", ["--continue"]),
        ("opencode", ["--continue"]),
        ("pi", ["--continue"]),
    ],
)
def test_a_preset_continues_its_conversation_with_arguments_at_the_end(name, arguments):
    class Talk(OneTask):
        def user(self) -> None:
            return None

    assert load_env(Talk, harness={"id": name, "command": ["x"]}).harness.config.continue_args == arguments


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_taskset_with_tools_is_registered_in_the_config_or_the_prompt(name, tmp_path):
    seen, address = await run_preset(name, tmp_path, Adding)
    (prompt,) = [text for text in (seen["stdin"], *seen["argv"]) if text.startswith("Be brief.\n\ngo")]
    assert seen["env"]["MCP_SERVER_URL"] == f"{address}/v1/mcp"
    if name in TOOL_FILES:
        assert prompt == "Be brief.\n\ngo"
        for path in TOOL_FILES[name]:
            config = tomllib.loads(seen["files"][path]) if name == "codex" else json.loads(seen["files"][path])
            assert f"{address}/v1/mcp" in json.dumps(config)
    else:
        assert prompt.endswith('- add {"a": {"type": "integer"}, "b": {"type": "integer"}}: Add two numbers.')
        assert "tools.py" in seen["files"]
        assert "/tools.py NAME" in prompt


async def test_env_and_files_of_the_config_are_added_to_those_of_the_preset(tmp_path):
    seen, _ = await run_preset("codex", tmp_path, env={"MORE": "yes"}, files={"~/.codex/AGENTS.md": "Use tabs."})
    assert seen["env"]["MORE"] == "yes"
    assert sorted(seen["files"]) == [".codex/AGENTS.md", ".codex/config.toml"]
