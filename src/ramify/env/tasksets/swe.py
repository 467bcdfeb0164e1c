"""swe: fix an issue of a real repository, in the image that a dataset names for it.

The rows come from R2E-Gym, SWE-bench or Scale-SWE. In the agent's sandbox, the tests are removed and the history of
the repository is replaced by one commit, so that it cannot contain the fix. The agent's result is its patch. A fresh
sandbox of the same image applies it, gets the tests, and every expected test must report by its id, with a nonce, that
it passed.
"""

import fnmatch
import shlex
from collections.abc import Iterator
from functools import cached_property
from pathlib import PurePosixPath
from types import SimpleNamespace

from pydantic import Field

import ramify as rf
from ramify.core.errors import AgentFailed, ConfigInvalid, EnvironmentFault
from ramify.env.tasksets.pytest_reports import find_not_passed, run_pytest
from ramify.env.tasksets.splits import assign_split
from ramify.env.tasksets.swe_rows import RowShape, SweRow, filter_patch, is_protected, parse_row

PATCH_FILE = ".git/ramify.patch"  # the agent's changes; no file of the repository
TESTS_KEY = "tests"  # in the `info` of a trace
COMMAND_TIMEOUT = 300.0  # seconds for git, and for the commands of a row
MAX_SCORING_COMMANDS = 4  # before the tests: git lists and applies the patch, adds the tests; a command of the row
DIFF_TIMEOUT = 100.0  # seconds for the agent's patch, less than `timeouts.finalize` has by default
# As `python -m pytest`, but a module of the repository cannot take the place of one of Python or pytest.
PYTEST_PROGRAM = "import sys; sys.path.append(sys.path.pop(0)); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
PYTEST_OPTIONS = "{plugin} -p no:cacheprovider -rN"
IGNORED_FILES = (".venv", "__pycache__", "*.pyc", ".pytest_cache", "*.egg-info")  # in the agent's repository

SYSTEM = "You are in a repository with an issue. Change its code so that the issue is resolved; the tests are hidden."
# No commit, tag or packed object of the original history is left, in the repository or one inside it.
SCRUB_SCRIPT = """set -e
find . -name .git -prune -exec rm -rf {{}} +
git init -q .
printf '%s\\n' {ignored} >> .git/info/exclude
git add -A
git -c user.name=base -c user.email=base@localhost -c commit.gpgsign=false commit -q --no-verify --allow-empty -m base
git rev-parse HEAD
"""
DIFF_SCRIPT = "git add -A && git diff --cached --binary --no-color --no-ext-diff --no-textconv {base} > {patch}"


class SweConfig(rf.DataFilesConfig, rf.TasksetConfig):
    """The rows, and how their tests are run."""

    shape: RowShape | None = None
    """The shape of the rows. Default: found by their columns."""
    repositories: list[str] = ["*"]
    """Patterns of the names of the repositories to load."""
    instances: list[str] = ["*"]
    """Patterns of the instance ids to load."""
    skip_unsupported: bool = False
    """Whether rows that cannot be run, such as those whose tests are not of pytest, are left out. False: an error."""
    eval_share: float = Field(default=0.0, ge=0, le=1)
    """The share of rows, chosen by their ids, in the `eval` split. 0: `split` is ignored, for a file of one split."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Number of rows, from the start. Default: all of them."""
    image: str | None = None
    """The image of SWE-bench rows without one; {instance} is the instance id. Default: the benchmark's image."""
    activate: str | None = None
    """The shell command that activates the environment of the tests. Default: the usual one of the dataset."""
    python: str | None = None
    """The Python that runs pytest. Default: the usual one of the dataset."""
    test_timeout: float = Field(default=1800.0, gt=0)
    """Seconds for the tests. The commands before the tests have additional time."""


class SweTask(rf.Task):
    """A row: its instance id, and the digest of its tests."""

    instance: str
    repository: str
    digest: str


class Swe(rf.Taskset):
    """Issues of real repositories, whose tests run in a fresh sandbox."""

    config: SweConfig
    task_type = SweTask

    def load(self) -> Iterator[SweTask]:
        """Yield one task per row, in the order of the file."""
        if not self._rows:
            raise ConfigInvalid(f"swe: no row of {self.config.path} matches the config")
        for row in self._rows.values():
            yield SweTask(
                prompt=f"{row.problem}\n\nThe repository {row.repository} is in the work directory.",
                system=SYSTEM,
                instance=row.instance,
                repository=row.repository,
                digest=row.digest,
                image=row.image,
                workdir=row.workdir,
                setup=row.setup_commands,
                outputs=(PATCH_FILE,),
                scoring_timeout=self.config.test_timeout + MAX_SCORING_COMMANDS * COMMAND_TIMEOUT,
            )

    async def setup(self, task: SweTask, runtime: rf.Runtime, state: SimpleNamespace) -> None:
        """Remove the tests and the history from the agent's sandbox."""
        row = self._rows[task.instance]
        if row.hidden_paths:
            await _run_all(runtime, [f"rm -rf -- {shlex.join(row.hidden_paths)}"])
        output = await _run_all(runtime, [SCRUB_SCRIPT.format(ignored=shlex.join(IGNORED_FILES))])
        state.base = output.split()[-1]

    async def finalize(self, runtime: rf.Runtime, state: SimpleNamespace) -> None:
        """Write the agent's changes as a patch, unless what the agent did to its sandbox prevents it."""
        command: str = DIFF_SCRIPT.format(base=state.base, patch=PATCH_FILE)
        try:
            await runtime.run(command, timeout=DIFF_TIMEOUT)
        except AgentFailed:
            return

    @rf.reward
    async def resolved(self, task: SweTask, trace: rf.Trace, runtime: rf.Runtime) -> float:
        """1 if every expected test reports that it passed, else 0."""
        row = self._rows[task.instance]
        try:
            patch, removed = filter_patch(
                (await runtime.read(PATCH_FILE)).decode("utf-8", "replace"), row.protected_files
            )
        except (OSError, ValueError) as error:
            trace.info[TESTS_KEY] = {"problem": f"there is no patch: {error}"}
            return 0.0
        if not patch:
            trace.info[TESTS_KEY] = {"problem": "there is no change", "removed": removed}
            return 0.0
        if disguised := await _list_protected_files(runtime, patch, row):
            trace.info[TESTS_KEY] = {"problem": f"the patch changes {', '.join(disguised)} under another name"}
            return 0.0
        if problem := await _apply_patch(runtime, patch):
            trace.info[TESTS_KEY] = {"problem": f"the patch cannot be applied: {problem}", "removed": removed}
            return 0.0
        unpassed = await self._run_tests(row, runtime)
        trace.info[TESTS_KEY] = {"unpassed": unpassed, "count": len(row.expected_tests), "removed": removed}
        return float(not unpassed)

    async def gold(self, task: SweTask, runtime: rf.Runtime) -> str | None:
        """Apply the patch of the row; None if it has none."""
        row = self._rows[task.instance]
        if not row.gold_patch:
            return None
        if problem := await _apply_patch(runtime, row.gold_patch):
            raise EnvironmentFault(f"the gold patch cannot be applied: {problem}")
        return "Done."

    @cached_property
    def _rows(self) -> dict[str, SweRow]:
        """The rows of the config by instance id."""
        config = self.config
        rows: dict[str, SweRow] = {}
        for data in rf.read_rows(config):
            if config.num_tasks is not None and len(rows) == config.num_tasks:
                break
            try:
                row = parse_row(data, config.shape, config.image)
            except ConfigInvalid:
                if config.skip_unsupported:
                    continue
                raise
            is_selected = _matches(row.repository, config.repositories) and _matches(row.instance, config.instances)
            if is_selected and (not config.eval_share or assign_split(row.instance, config.eval_share) == config.split):
                rows[row.instance] = row
        return rows

    async def _run_tests(self, row: SweRow, runtime: rf.Runtime) -> dict[str, str]:
        """Add the tests to the sandbox and run them; return the expected tests that did not pass, with the reason."""
        if row.test_patch and (problem := await _apply_patch(runtime, row.test_patch)):
            raise EnvironmentFault(f"the tests of {row.instance} cannot be added: {problem}")
        for path, text in row.test_files.items():
            await runtime.write(path, text)
        await _run_all(runtime, row.test_commands)
        activate = row.activate if self.config.activate is None else self.config.activate
        program = f"{self.config.python or row.python} -c {shlex.quote(PYTEST_PROGRAM)}"
        pytest = f"{program} {PYTEST_OPTIONS} {shlex.join(row.test_paths)}"
        outcomes = await run_pytest(
            runtime,
            shlex.join(["bash", "-c", f"{activate} && {pytest}" if activate else pytest]),
            plugin_dir=PurePosixPath(runtime.workdir).parent / "ramify-test-reports",
            timeout=self.config.test_timeout,
        )
        named = {row.name_test(id): outcome for id, outcome in outcomes.items()}
        unreported = {id: "not reported" for id in row.other_tests if id not in named}
        return find_not_passed(row.expected_tests, named) | unreported


async def _list_protected_files(runtime: rf.Runtime, patch: str, row: SweRow) -> list[str]:
    """Return the protected files that `git apply` would change: it reads other headers than `filter_patch` does."""
    result = await runtime.run("git apply --numstat -z -", stdin=patch.encode(), timeout=COMMAND_TIMEOUT)
    names = (line.split("\t", 2)[-1] for line in result.text.split("\0") if line)
    return sorted(name for name in names if is_protected(name, row.protected_files))


async def _apply_patch(runtime: rf.Runtime, patch: str) -> str | None:
    """Apply a patch to the work directory; return why it cannot be applied, or None."""
    text = patch if patch.endswith("\n") else f"{patch}\n"
    result = await runtime.run("git apply --whitespace=nowarn -", stdin=text.encode(), timeout=COMMAND_TIMEOUT)
    return result.stderr.decode("utf-8", "replace")[-500:] or "git failed" if result.returncode else None


async def _run_all(runtime: rf.Runtime, commands: tuple[str, ...] | list[str]) -> str:
    """Run shell commands in the work directory and return their output. Raises EnvironmentFault if one fails."""
    output = ""
    for command in commands:
        result = await runtime.run(command, timeout=COMMAND_TIMEOUT)
        if result.returncode:
            reason = result.stderr.decode("utf-8", "replace")[-500:]
            raise EnvironmentFault(f"{command!r:.200} exited with {result.returncode}: {reason}")
        output += result.text
    return output


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
