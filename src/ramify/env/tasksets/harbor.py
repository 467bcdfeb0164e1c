"""harbor: task folders in the format of Harbor and Terminal-Bench 2.

The agent works in its sandbox, which has the files of `environment/`. The tests run in a fresh sandbox, which gets the
work directory that the agent left. What the agent changed elsewhere, its processes and installed packages are not
there.

In a sandbox of an image, `/tests`, `/solution` and `/logs` are those directories. A sandbox without an image may not
have directories at the root of the file system: there they lie beside the work directory, and the paths in the scripts
are replaced.
"""

import fnmatch
import json
import math
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import Field

import ramify as rf
from ramify.core.errors import AgentFailed, ConfigInvalid, EnvironmentFault
from ramify.env.tasksets.harbor_folder import HarborFolder, find_folders, resolve_variables
from ramify.env.tasksets.pytest_reports import PYTEST_PROGRAM, find_not_passed, run_pytest

DIRECTORIES = ("tests", "logs", "solution")  # at the root of an image
REWARD_FILES = ("reward.json", "reward.txt")  # in this order, as the format says
VERIFIER_KEY = "verifier"  # in the `info` of a trace
OUTPUT_CHARS = 2000  # of the tests' output that a trace keeps
DEFAULT_TIMEOUT = 600.0
COPY_TIMEOUT = 300.0  # seconds to copy the tests into the sandbox, besides the time of the tests
PYTEST_OPTIONS = "{plugin} -p no:cacheprovider -c /dev/null"

_ROOT_PATH = re.compile(r"(?<![\w./-])/(" + "|".join(DIRECTORIES) + r")(?![\w-])")


class HarborConfig(rf.TasksetConfig):
    """The folders, and how their tests give a reward."""

    path: Path
    """A task folder, or a directory of task folders."""
    names: list[str] = ["*"]
    """Patterns of the names of the folders to load."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Number of tasks, from the start. Default: all of them."""
    verify: Literal["auto", "script", "pytest"] = "auto"
    """`script`: run tests/test.sh and read the reward that it writes. `pytest`: run the test functions in tests/; each
    must report that it passed. `auto`: the script if there is one."""
    image: str = "harbor/{name}"
    """The image of a task that has a Dockerfile and no `docker_image`; {name} is the name of its folder."""
    apply_resources: bool = True
    """Whether the resources of a task are limits, which the runtime must enforce. False: the runtime's limits apply."""
    python: str = "python3"
    """The Python that runs pytest."""


class HarborTask(rf.Task):
    """A task folder: its name in `taskset.path`, and the digest of its files."""

    resource_source_keys = {"disk_mb": "storage_mb of task.toml"}

    name: str
    digest: str
    verifier_timeout: float = DEFAULT_TIMEOUT


class Harbor(rf.Taskset):
    """Task folders whose tests run in a fresh sandbox."""

    config: HarborConfig
    task_type = HarborTask

    def load(self) -> Iterator[HarborTask]:
        """Yield one task per folder, sorted by name."""
        folders = [
            folder
            for folder in find_folders(self.config.path.expanduser())
            if any(fnmatch.fnmatch(folder.name, pattern) for pattern in self.config.names)
        ]
        if not folders:
            raise ConfigInvalid(f"harbor: no folder of {self.config.path} matches names = {self.config.names}")
        for folder in folders[: self.config.num_tasks]:
            yield self._build_task(folder)

    async def setup(self, task: HarborTask, runtime: rf.Runtime) -> None:
        """Write the files of `environment/`. An image already holds them."""
        source = self._get_folder(task).path / "environment"
        if task.image is None and source.is_dir():
            await runtime.upload(source, ".")

    @rf.reward
    async def verified(self, task: HarborTask, trace: rf.Trace, runtime: rf.Runtime) -> float:
        """The reward that the tests give."""
        folder = self._get_folder(task)
        if self._uses_pytest(folder):
            return await self._run_pytest(task, trace, runtime, folder)
        return await self._run_script(task, trace, runtime, folder)

    async def gold(self, task: HarborTask, runtime: rf.Runtime) -> str | None:
        """Run the solution in the agent's sandbox; None if there is none."""
        folder = self._get_folder(task)
        if not folder.solution_script.is_file():
            return None
        root = _get_root(task, runtime)
        await _upload(runtime, folder.path / "solution", root / "solution", root)
        script = root / "solution" / "solve.sh"
        env = resolve_variables(folder.settings.get("solution", {}).get("env", {}))
        result = await runtime.run(_build_command(script), env=env, timeout=task.timeout or DEFAULT_TIMEOUT)
        if result.returncode:
            raise EnvironmentFault(
                f"solve.sh exited with {result.returncode}: {result.stderr.decode(errors='replace')[-500:]}"
            )
        return "Done."

    def _build_task(self, folder: HarborFolder) -> HarborTask:
        folder.check()
        if not folder.test_script.is_file() and not folder.find_pytest_ids():
            raise ConfigInvalid(f"harbor: {folder.name} has neither tests/test.sh nor test functions in tests/")
        image = folder.get_image(self.config.image)
        is_private = (
            folder.environment.get("network_mode") == "no-network" or folder.environment.get("allow_internet") is False
        )
        verifier_timeout = folder.verifier.get("timeout_sec", DEFAULT_TIMEOUT)
        return HarborTask(
            prompt=folder.instruction,
            key=folder.name,
            name=folder.name,
            digest=folder.digest,
            image=image,
            workdir=None if image is None else folder.get_image_workdir(),
            resources=folder.resources if self.config.apply_resources else {},
            requires=("private_network",) if is_private else (),
            outputs=(".",),
            timeout=folder.settings.get("agent", {}).get("timeout_sec"),
            verifier_timeout=verifier_timeout,
            scoring_timeout=verifier_timeout + COPY_TIMEOUT,
        )

    def _get_folder(self, task: HarborTask) -> HarborFolder:
        root = self.config.path.expanduser()
        return HarborFolder(root.parent if (root / "task.toml").is_file() else root, task.name)

    def _uses_pytest(self, folder: HarborFolder) -> bool:
        return self.config.verify == "pytest" or (self.config.verify == "auto" and not folder.test_script.is_file())

    async def _run_pytest(self, task: HarborTask, trace: rf.Trace, runtime: rf.Runtime, folder: HarborFolder) -> float:
        """Return 1 if every test function reports that it passed, else 0."""
        root = _get_root(task, runtime)
        await _upload(runtime, folder.path / "tests", root / "tests", root)
        expected = folder.find_pytest_ids()
        tests = shlex.quote(str(root / "tests"))
        program = f"{shlex.quote(self.config.python)} -c {shlex.quote(PYTEST_PROGRAM)}"
        command = f"{program} {PYTEST_OPTIONS} --rootdir {tests} --confcutdir {tests} {tests}"
        env = resolve_variables(folder.verifier.get("env", {}))
        plugin_dir = root / "logs" / "verifier"
        outcomes = await run_pytest(runtime, command, plugin_dir=plugin_dir, timeout=task.verifier_timeout, env=env)
        unpassed = find_not_passed(expected, outcomes)
        trace.info[VERIFIER_KEY] = {"unpassed": unpassed, "count": len(expected)}
        return float(bool(expected) and not unpassed)

    async def _run_script(self, task: HarborTask, trace: rf.Trace, runtime: rf.Runtime, folder: HarborFolder) -> float:
        """Run tests/test.sh and return the reward that it wrote; 0 if it wrote none, whatever its exit status."""
        root = _get_root(task, runtime)
        logs = root / "logs" / "verifier"
        await _upload(runtime, folder.path / "tests", root / "tests", root)
        await runtime.write(logs / ".created", "")
        command = _build_command(root / "tests" / "test.sh")
        env = resolve_variables(folder.verifier.get("env", {}))
        try:
            result = await runtime.run(f"{command} 2>&1", env=env, timeout=task.verifier_timeout)
            rewards = await _read_rewards(runtime, logs, _find_reward_files(folder))
        except AgentFailed as error:
            trace.info[VERIFIER_KEY] = {"ended": error.message}
            return 0.0
        trace.info[VERIFIER_KEY] = {
            "exit_code": result.returncode,
            "timed_out": result.timed_out,
            "output": result.text[-OUTPUT_CHARS:],
            "rewards": rewards,
        }
        if not rewards:
            return 0.0
        return rewards["reward"] if "reward" in rewards else sum(rewards.values()) / len(rewards)


def _get_root(task: HarborTask, runtime: rf.Runtime) -> PurePosixPath:
    """Return the parent of tests, logs and solution: `/` in an image, else the parent of the work directory."""
    return PurePosixPath("/") if task.image is not None else PurePosixPath(runtime.workdir.parent)


def _build_command(script: PurePosixPath) -> str:
    """Return the shell command that runs a script with the interpreter that its first line names."""
    quoted = shlex.quote(str(script))
    return f"chmod +x {quoted} && {quoted}"


async def _upload(runtime: rf.Runtime, source: Path, target: PurePosixPath, root: PurePosixPath) -> None:
    """Copy a directory into the sandbox. If its root is not `/`, replace the paths in its text files."""
    if root == PurePosixPath("/"):
        await runtime.upload(source, target)
        return
    with tempfile.TemporaryDirectory(prefix="ramify-harbor-") as directory:
        for file in sorted(file for file in source.rglob("*") if file.is_file() and not file.is_symlink()):
            copy = Path(directory) / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(_replace_paths(file.read_bytes(), root))
            copy.chmod(file.stat().st_mode & 0o777)
        await runtime.upload(Path(directory), target)


def _replace_paths(content: bytes, root: PurePosixPath) -> bytes:
    """Return a text with /tests, /logs and /solution below another root; binary content is returned unchanged."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content
    return _ROOT_PATH.sub(lambda match: str(root / match[1]), text).encode()


def _find_reward_files(folder: HarborFolder) -> tuple[str, ...]:
    """Return the reward files that the tests write, so that a program of the agent cannot add the other one."""
    text = b"".join(file.read_bytes() for file in (folder.path / "tests").rglob("*") if file.is_file())
    return tuple(name for name in REWARD_FILES if name.encode() in text) or REWARD_FILES


async def _read_rewards(runtime: rf.Runtime, logs: PurePosixPath, names: tuple[str, ...]) -> dict[str, float]:
    """Return the rewards of the first file that exists; {} if there is none.

    Raises EnvironmentFault if its content is not a reward.
    """
    for name in names:
        try:
            content = await runtime.read(logs / name)
        except (OSError, ValueError):
            continue
        try:
            return _parse_rewards(name, content.decode())
        except ValueError as error:
            raise EnvironmentFault(f"the tests wrote a {name} that is not a reward: {content[:200]!r}") from error
    return {}


def _parse_rewards(name: str, text: str) -> dict[str, float]:
    parsed: Any = json.loads(text) if name.endswith(".json") else float(text)
    rewards: dict[str, Any] = parsed if isinstance(parsed, dict) else {"reward": parsed}
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in rewards.values()):
        raise ValueError("a reward is not a number")
    if not rewards or not all(math.isfinite(value) for value in rewards.values()):
        raise ValueError("a reward is not finite")
    return {key: float(value) for key, value in rewards.items()}
