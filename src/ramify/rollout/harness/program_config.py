"""Configuration of the harness `program`, and the placeholders of its texts."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ramify.rollout.harness.config import HarnessConfig

PLACEHOLDERS = (
    "prompt",
    "prompt_file",
    "openai_base_url",
    "anthropic_base_url",
    "api_key",
    "model",
    "context_length",
    "workdir",
    "home",
)
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")


class ProgramHarnessConfig(HarnessConfig):
    """Configuration of the program harness.

    The texts of `command`, `env` and `files` may contain placeholders: `{prompt}`, `{prompt_file}`,
    `{openai_base_url}`, `{anthropic_base_url}`, `{api_key}`, `{model}`, `{context_length}`, `{workdir}` and `{home}`.
    Other braces are kept.
    """

    id: str = "program"
    command: list[str] = Field(min_length=1)
    """The program and its arguments."""
    prompt: Literal["arg", "stdin", "file"] = "arg"
    """How the program gets the task: as its last argument (or where `{prompt}` is), on its standard input, or in the
    file `{prompt_file}`."""
    env: dict[str, str] = {}
    """Environment variables of the program."""
    pass_env: list[str] = []
    """Names of environment variables that the program gets from the worker process."""
    files: dict[str, str] = {}
    """Files that are written before the program starts: text by path. A path is relative to the work directory, or
    begins with `~/`."""
    copy_files: dict[str, str] = {}
    """Files of this machine that are copied into the runtime before the program starts: the path of the file by its
    path in the runtime, which is relative to the work directory or begins with `~/`."""
    max_output_chars: int = Field(default=10_000, ge=0)
    """Characters that the trace keeps of the program's standard output, and of its standard error: the first and the
    last half."""

    @field_validator("copy_files")
    @classmethod
    def _copied_files_exist(cls, files: dict[str, str]) -> dict[str, str]:
        for source in files.values():
            if not Path(source).is_file():
                raise ValueError(f"{source} is not a file of this machine, seen from {Path.cwd()}")
        return files

    @model_validator(mode="after")
    def _placeholders_match_prompt(self) -> "ProgramHarnessConfig":
        used = find_placeholders([*self.command, *self.env.values(), *self.files.values()])
        if self.prompt == "file" and "prompt_file" not in used:
            raise ValueError('prompt = "file" needs {prompt_file} in the command, such as ["agent", "{prompt_file}"]')
        if self.prompt != "file" and "prompt_file" in used:
            raise ValueError('{prompt_file} needs prompt = "file"')
        return self


def find_placeholders(texts: Iterable[str]) -> set[str]:
    """Return the names of the placeholders in the texts."""
    return {name for text in texts for name in _PLACEHOLDER.findall(text)}


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Return the text with the values of its placeholders."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)
