"""Task folders in the format of Harbor (and Terminal-Bench 2), read and checked.

    task.toml        timeouts, resources, the environment
    instruction.md   the prompt
    environment/     what the agent starts with; a Dockerfile if it needs an image
    tests/           test.sh, which writes the reward
    solution/        solve.sh, which solves the task

What a folder asks for and Ramify does not have is refused with the name of its key.
"""

import ast
import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from ramify.core.errors import ConfigInvalid

COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml")
DEFAULT_WORKDIR = "/app"  # of an image whose Dockerfile has no WORKDIR
# environment.KEY -> the key of `task.resources`
RESOURCES = {"cpus": "cpus", "memory_mb": "memory_mb", "storage_mb": "disk_mb"}
UNSUPPORTED_ENVIRONMENT_KEYS = ("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck", "env")
SIZES_IN_MB = {"T": 1024.0**2, "G": 1024.0, "M": 1.0, "K": 1 / 1024}
DIGEST_DIGITS = 16

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?\s*", re.IGNORECASE)
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class HarborFolder:
    """One task folder. `root` is the folder that all names are relative to."""

    root: Path
    name: str

    @property
    def path(self) -> Path:
        """The folder."""
        return self.root / self.name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The content of task.toml."""
        try:
            return tomllib.loads((self.path / "task.toml").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigInvalid(f"harbor: {self.path}/task.toml cannot be read: {error}") from error

    @property
    def environment(self) -> dict[str, Any]:
        """The table [environment]."""
        return self.settings.get("environment", {})

    @property
    def verifier(self) -> dict[str, Any]:
        """The table [verifier]."""
        return self.settings.get("verifier", {})

    @cached_property
    def instruction(self) -> str:
        """The text of the prompt."""
        try:
            return (self.path / "instruction.md").read_text("utf-8").strip()
        except OSError as error:
            raise ConfigInvalid(f"harbor: {self.name} has no instruction.md: {error}") from error

    @property
    def test_script(self) -> Path:
        """The script that writes the reward."""
        return self.path / "tests" / "test.sh"

    @property
    def solution_script(self) -> Path:
        """The script that solves the task."""
        return self.path / "solution" / "solve.sh"

    @cached_property
    def digest(self) -> str:
        """The digest of all files, so that a changed folder is another task."""
        content = hashlib.sha256()
        for file in sorted(_iter_files(self.path)):
            content.update(f"{file.relative_to(self.path)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
        return content.hexdigest()[:DIGEST_DIGITS]

    @cached_property
    def resources(self) -> dict[str, float]:
        """The limits of the task."""
        limits: dict[str, float] = {}
        for key, name in RESOURCES.items():
            if (value := self.environment.get(key)) is not None:
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise ConfigInvalid(f"harbor: {self.name}: environment.{key} = {value!r}; expected a number")
                limits[name] = float(value)
        for key, name in (("memory", "memory_mb"), ("storage", "disk_mb")):  # older folders: "2G"
            if (value := self.environment.get(key)) is not None:
                match = _SIZE.fullmatch(str(value))
                if match is None:
                    raise ConfigInvalid(
                        f"harbor: {self.name}: environment.{key} = {value!r}; expected a size such as 512M or 2GiB"
                    )
                limits[name] = float(match[1]) * SIZES_IN_MB[match[2].upper()]
        return limits

    @property
    def has_dockerfile(self) -> bool:
        """Whether the environment must be built."""
        return (self.path / "environment" / "Dockerfile").is_file()

    def get_image(self, template: str) -> str | None:
        """Return the image of the environment; None if it needs none. `template` names the one of a Dockerfile."""
        if image := self.environment.get("docker_image"):
            return image
        return template.format(name=PurePosixPath(self.name).name) if self.has_dockerfile else None

    def get_image_workdir(self) -> str:
        """Return the work directory of the image, from task.toml or else the last WORKDIR of the Dockerfile."""
        if workdir := self.environment.get("workdir"):
            return workdir
        dockerfile = self.path / "environment" / "Dockerfile"
        workdirs = _WORKDIR.findall(dockerfile.read_text("utf-8")) if dockerfile.is_file() else []
        return workdirs[-1] if workdirs else DEFAULT_WORKDIR

    def check(self) -> None:
        """Raise ConfigInvalid for what Ramify does not support."""
        problems = [
            f"environment.{key}"
            for key in UNSUPPORTED_ENVIRONMENT_KEYS
            if self.environment.get(key) not in (None, 0, {}, [])
        ]
        if self.settings.get("steps"):
            problems.append("steps")
        if str(self.environment.get("os", "linux")).lower() != "linux":
            problems.append(f"environment.os = {self.environment['os']!r}")
        if self.environment.get("network_mode") == "allowlist":
            problems.append('environment.network_mode = "allowlist"')
        if self.verifier.get("environment") or self.verifier.get("collect"):
            problems.append("verifier.environment" if self.verifier.get("environment") else "verifier.collect")
        problems += [f"environment/{name}" for name in COMPOSE_FILES if (self.path / "environment" / name).exists()]
        if problems:
            raise ConfigInvalid(f"harbor: {self.name} uses {', '.join(problems)}, which Ramify does not support")

    def find_pytest_ids(self) -> list[str]:
        """Return the ids of the test functions in tests/, without parameters, as pytest names them there."""
        return [
            f"{file.relative_to(self.path / 'tests').as_posix()}::{name}"
            for pattern in ("test_*.py", "*_test.py")
            for file in sorted((self.path / "tests").rglob(pattern))
            for name in _find_test_names(ast.parse(file.read_text("utf-8")))
        ]


def find_folders(root: Path) -> list[HarborFolder]:
    """Return the task folders at or below a directory, sorted. Raises ConfigInvalid if there are none."""
    if (root / "task.toml").is_file():
        return [HarborFolder(root.parent, root.name)]
    names = sorted(file.parent.relative_to(root).as_posix() for file in root.rglob("task.toml"))
    if not names:
        older = next(root.rglob("task.yaml"), None)
        hint = (
            "folders with task.yaml are converted by `harbor task migrate`" if older else "expected a folder of tasks"
        )
        problem = "has no folder with a task.toml" if root.exists() else "does not exist"
        raise ConfigInvalid(f"taskset.path: {root} {problem}; {hint}")
    return [HarborFolder(root, name) for name in names]


def resolve_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with ${NAME} and ${NAME:-default} replaced from this process's environment."""

    def resolve(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name not in os.environ and default is None:
            raise ConfigInvalid(f"harbor: the environment variable {name} is not set, and a task needs it")
        return os.environ.get(name, default or "")

    return {name: _VARIABLE.sub(resolve, value) for name, value in env.items()}


def _iter_files(directory: Path) -> Iterator[Path]:
    return (file for file in directory.rglob("*") if file.is_file() and not file.is_symlink())


def _find_test_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name.startswith("test"):
                    yield f"{node.name}::{member.name}"
