"""Configuration of harnesses; importable without the harnesses themselves."""

from typing import Literal

from pydantic import Field

from ramify.core.config import Config
from ramify.env.chat_client import ExternalModelConfig
from ramify.env.mcp import McpServerConfig
from ramify.infer.gateway.config import AGENT_TIMEOUT

BASH_SYSTEM_PROMPT = """\
You work on a task in a Linux environment, with tools. Look before you act, and check the result of what you did. \
When the task is done, reply without a tool call; that reply is your answer."""
RLM_SYSTEM_PROMPT = """\
You have a Python REPL: the tool `python` runs code and shows what it prints; variables stay. `context` holds the text \
of your task. The other tools are functions there too. `llm(prompt)` and `llm_batch(prompts)` ask a model that sees \
only the prompt. To finish, set `answer` in the code, or reply FINAL(your answer)."""


class HarnessConfig(Config):
    """Configuration common to all harnesses.

    - `id`: the id that selects the harness.
    - `timeout`: seconds that the agent has for a task; `task.timeout` overrides it.
    - `train`: which calls are trained on: "main" (the agent's conversations about the task) or "all".
    - `models`: other models by the names under which the agent requests them. Any other name selects the policy. Their
      calls are recorded but never trained on.
    - `mcp`: MCP servers by name. They are opened for each rollout, and their tools are added to the taskset's.
    - `tool_timeout`: seconds of one tool call, after which its result is an error. None: only `timeout` limits it.
    """

    id: str = "chat"
    timeout: float = Field(default=AGENT_TIMEOUT, gt=0)
    train: Literal["main", "all"] = "main"
    models: dict[str, ExternalModelConfig] = {}
    mcp: dict[str, McpServerConfig] = {}
    tool_timeout: float | None = Field(default=None, gt=0)


class ChatHarnessConfig(HarnessConfig):
    """Configuration of the chat harness."""

    max_malformed_replies: int = Field(default=3, ge=1)
    """Replies in a row with malformed tool calls after which the rollout ends."""
    compact_at: int | None = Field(default=None, ge=1)
    """Tokens of a conversation at which the policy summarizes it and goes on from the summary. None: never."""


class BashHarnessConfig(ChatHarnessConfig):
    """Configuration of the bash harness."""

    id: str = "bash"
    system_prompt: str = BASH_SYSTEM_PROMPT
    """The system prompt, followed by the task's system prompt. Empty: only the task's."""
    command_timeout: float = Field(default=120.0, gt=0)
    """Most seconds of one command. The model may ask for fewer."""
    max_output_chars: int = Field(default=10_000, ge=100)
    """Characters of a command's output, or of a file, that the model is shown at once."""


class RlmHarnessConfig(ChatHarnessConfig):
    """Configuration of the harness rlm."""

    id: str = "rlm"
    system_prompt: str = Field(default=RLM_SYSTEM_PROMPT, min_length=1)
    """The system prompt of all conversations of a rollout. The task's system prompt is put before its prompt."""
    max_depth: int = Field(default=1, ge=0)
    """How deep calls of `llm` may be nested: 1 lets the task's own code call it, 0 forbids it."""
    max_sub_turns: int = Field(default=10, ge=1)
    """Most replies of the model in the conversation of one call of `llm`."""
    max_concurrency: int = Field(default=16, ge=1)
    """Most prompts of one `llm_batch` that are worked on at the same time."""
    max_prompt_chars: int = Field(default=20_000, ge=100)
    """Characters of a prompt that the model is shown; `context` in the REPL holds all of it."""
    max_output_chars: int = Field(default=4_000, ge=100)
    """Characters of the output of code, or of a tool, that the model is shown."""
    max_answer_chars: int = Field(default=100_000, ge=1)
    """Most characters of the variable `answer`; a longer answer is refused, and the conversation goes on."""
    run_timeout: float = Field(default=120.0, gt=0)
    """Seconds that code may run. Time in tools counts, time in calls of `llm` does not."""
    max_restarts: int = Field(default=2, ge=0)
    """How often a REPL that exited or hung is replaced by a new one before the rollout ends."""
