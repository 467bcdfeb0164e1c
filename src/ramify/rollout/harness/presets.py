"""Presets of the program harness: known agent programs, each tested in the version that its docstring names.

A preset is a command line, environment variables that switch off what needs the internet, and the configuration file
that names the gateway. The program itself is installed once, in a directory that a sandbox shows read-only (see
`docs/agents.md`). The programs call the policy by the name `policy`: the gateway serves every name, and the name of a
model that is a path would confuse them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from ramify.rollout.harness.program import MCP_CONFIG, ProgramHarness, ProgramHarnessConfig

CODEX_CONFIG = """\
model = "policy"
model_provider = "gateway"
model_context_window = {context_length}

[model_providers.gateway]
name = "gateway"
base_url = "{openai_base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
stream_idle_timeout_ms = 3600000
"""
CODEX_TOOLS = """
[mcp_servers.taskset]
url = "{mcp_url}"
bearer_token_env_var = "OPENAI_API_KEY"
required = true
tool_timeout_sec = 3600
"""
OPENCODE_CONFIG = """\
{
  "model": "gateway/policy",
  "small_model": "gateway/policy",
  "autoupdate": false,
  "share": "disabled",
  "permission": {"*": "allow"},
  "provider": {
    "gateway": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "{openai_base_url}", "apiKey": "{api_key}"},
      "models": {"policy": {"tool_call": true, "limit": {"context": {context_length}, "output": 32000}}}
    }
  }
}
"""
OPENCODE_TOOLS = """\
{
  "mcp": {
    "taskset": {
      "type": "remote",
      "url": "{mcp_url}",
      "headers": {"Authorization": "Bearer {api_key}"},
      "oauth": false,
      "timeout": 3600000
    }
  }
}
"""
PI_CONFIG = """\
{
  "providers": {
    "gateway": {
      "baseUrl": "{openai_base_url}",
      "api": "openai-completions",
      "apiKey": "{api_key}",
      "models": [{"id": "policy", "contextWindow": {context_length}}]
    }
  }
}
"""
TOOL_CLIENT_FILES = {"~/tools.py": Path(__file__).with_name("tool_client.py").read_text()}
TOOL_CLIENT_PROMPT = """\
The task has these tools, which you call in the shell, as in `python3 {home}/tools.py NAME '{"key": 1}'`:"""


class CodexHarnessConfig(ProgramHarnessConfig):
    """Configuration of the preset `codex`."""

    id: str = "codex"
    command: list[str] = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    prompt: Literal["arg", "stdin", "file"] = "stdin"
    continue_args: list[str] = ["resume", "--last"]


class CodexHarness(ProgramHarness):
    """Codex 0.166: `npm install --prefix DIR @openai/codex@0.166.0`."""

    config: CodexHarnessConfig
    program_files: ClassVar[Mapping[str, str]] = {"~/.codex/config.toml": CODEX_CONFIG}
    tool_files: ClassVar[Mapping[str, str]] = {"~/.codex/config.toml": CODEX_CONFIG + CODEX_TOOLS}


class ClaudeCodeHarnessConfig(ProgramHarnessConfig):
    """Configuration of the preset `claude-code`."""

    id: str = "claude-code"
    command: list[str] = ["claude", "--print", "--permission-mode", "bypassPermissions"]
    prompt: Literal["arg", "stdin", "file"] = "stdin"
    continue_args: list[str] = ["--continue"]


class ClaudeCodeHarness(ProgramHarness):
    """Claude Code 2.1.197: `npm install --prefix DIR @anthropic-ai/claude-code@2.1.197`."""

    config: ClaudeCodeHarnessConfig
    program_env: ClassVar[Mapping[str, str]] = {
        "ANTHROPIC_MODEL": "policy",
        "ANTHROPIC_SMALL_FAST_MODEL": "policy",
        "API_TIMEOUT_MS": "3600000",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "ENABLE_TOOL_SEARCH": "0",  # the tools of MCP servers are offered from the first call on, as all others
        "MCP_CONNECTION_NONBLOCKING": "0",
    }
    tool_files: ClassVar[Mapping[str, str]] = {"~/.claude.json": MCP_CONFIG}


class OpencodeHarnessConfig(ProgramHarnessConfig):
    """Configuration of the preset `opencode`."""

    id: str = "opencode"
    command: list[str] = ["opencode", "run"]
    prompt: Literal["arg", "stdin", "file"] = "stdin"
    continue_args: list[str] = ["--continue"]


class OpencodeHarness(ProgramHarness):
    """opencode 1.18.18: `npm install --prefix DIR opencode-ai@1.18.18`."""

    config: OpencodeHarnessConfig
    program_env: ClassVar[Mapping[str, str]] = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    program_files: ClassVar[Mapping[str, str]] = {"~/.config/opencode/opencode.json": OPENCODE_CONFIG}
    tool_files: ClassVar[Mapping[str, str]] = {"~/.config/opencode/config.json": OPENCODE_TOOLS}


class PiHarnessConfig(ProgramHarnessConfig):
    """Configuration of the preset `pi`."""

    id: str = "pi"
    command: list[str] = ["pi", "--print", "--offline", "--provider", "gateway", "--model", "policy"]
    prompt: Literal["arg", "stdin", "file"] = "stdin"
    continue_args: list[str] = ["--continue"]


class PiHarness(ProgramHarness):
    """pi 0.73.1: `npm install --prefix DIR @mariozechner/pi-coding-agent@0.73.1`."""

    config: PiHarnessConfig
    program_files: ClassVar[Mapping[str, str]] = {"~/.pi/agent/models.json": PI_CONFIG}
    tool_files: ClassVar[Mapping[str, str]] = TOOL_CLIENT_FILES
    tool_prompt: ClassVar[str] = TOOL_CLIENT_PROMPT


class MiniSweAgentHarnessConfig(ProgramHarnessConfig):
    """Configuration of the preset `mini-swe-agent`."""

    id: str = "mini-swe-agent"
    command: list[str] = ["mini", "--yolo", "--exit-immediately", "--model", "openai/policy", "--task", "{prompt}"]


class MiniSweAgentHarness(ProgramHarness):
    """mini-swe-agent 2.4.6: `python3 -m venv DIR/python && DIR/python/bin/pip install mini-swe-agent==2.4.6 mcp`."""

    config: MiniSweAgentHarnessConfig
    program_env: ClassVar[Mapping[str, str]] = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    tool_files: ClassVar[Mapping[str, str]] = TOOL_CLIENT_FILES
    tool_prompt: ClassVar[str] = TOOL_CLIENT_PROMPT
