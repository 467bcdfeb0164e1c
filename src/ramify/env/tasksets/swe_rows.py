"""Rows of R2E-Gym, SWE-bench and Scale-SWE, as one type.

| | R2E-Gym | SWE-bench | Scale-SWE |
|---|---|---|---|
| image | `docker_image` | `image`, else from the instance id | `image_url` |
| tests | in the image, `/r2e_tests` | `test_patch` | `f2p_patch`, `f2p_script` |
| expected | `expected_output_json` | `FAIL_TO_PASS`, `PASS_TO_PASS` | the same |
| gold | `parsed_commit_content` | `patch` | `patch` |
"""

import hashlib
import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, cast

from ramify.core.errors import ConfigInvalid

Row = dict[str, Any]

# The agent's changes to a repository as a patch, without what could change how tests run.
#
# Code under test is the agent's, but the tests, the settings of pytest and the modules that Python imports by itself
# come from the image. So changes to such files are left out.

# names that change how pytest or Python starts, in any directory
PROTECTED_NAMES = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pytest.py", "run_tests.sh"}
    | {"tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py"}
)
PROTECTED_SUFFIXES = (".pth", ".pyc", ".egg-link")
PROTECTED_DIRECTORIES = frozenset({"pytest", "_pytest", "pluggy", "r2e_tests", ".git", ".venv"})  # at the top
METADATA_SUFFIXES = (".dist-info", ".egg-info")  # pytest loads the plugins that such a directory names

_FILE_HEADER = re.compile(r"^diff --git ", re.MULTILINE)
_PATHS = re.compile(r'^diff --git "?a/(.+?)"? "?b/(.+?)"?$', re.MULTILINE)

_QUOTED_NAME = re.compile(r'^(?:diff --git|---|\+\+\+|rename from|rename to|copy from|copy to) .*"', re.MULTILINE)


def filter_patch(patch: str, protected_files: Container[str]) -> tuple[str, list[str]]:
    """Return the patch without changes to protected files, and the names of these files."""
    starts = [match.start() for match in _FILE_HEADER.finditer(patch)]
    kept: list[str] = []
    removed: list[str] = []
    for start, stop in zip(starts, [*starts[1:], len(patch)]):
        change = patch[start:stop]
        paths = _PATHS.match(change)
        names = set(paths.groups()) if paths else set[str]()
        names |= set(re.findall(r"^(?:rename|copy) (?:from|to) (.+)$", change, re.MULTILINE))
        is_quoted = _QUOTED_NAME.search(change) is not None  # `git` reads escapes in it, so it may be any name
        if names and not is_quoted and not any(is_protected(name, protected_files) for name in names):
            kept.append(change)
        else:
            removed += sorted(names) or ["a change without a name"]
    return "".join(kept), removed


def is_protected(name: str, protected_files: Container[str]) -> bool:
    """Return whether a file of the repository must stay as it is in the image."""
    path = PurePosixPath(name)
    return (
        name in protected_files
        or path.name in PROTECTED_NAMES
        or path.suffix in PROTECTED_SUFFIXES
        or path.parts[0] in PROTECTED_DIRECTORIES
        or any(part.endswith(METADATA_SUFFIXES) for part in path.parts)
    )


RowShape = Literal["r2e-gym", "swe-bench", "scale-swe"]
SWE_BENCH_IMAGE = "swebench/sweb.eval.x86_64.{instance}:latest"
TESTBED = "/testbed"  # where images of R2E-Gym and SWE-bench have the repository
R2E_TESTS = "/r2e_tests"
R2E_FILES = (  # in the repository; they hold tests, or the fix
    "r2e_tests",
    "run_tests.sh",
    "parsed_commit.json",
    "execution_result.json",
    "expected_test_output.json",
    "syn_issue.json",
    "modified_files.json",
    "modified_entities.json",
)
F2P_SCRIPT = "test_fail_to_pass.py"  # the name under which the tests of Scale-SWE expect `f2p_script`
DIGEST_DIGITS = 16

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_CHANGED_FILE = re.compile(r"^\+\+\+ b/(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SweRow:
    """One problem: a repository in an image, and the tests that must pass.

    - `expected_tests`: ids of the tests that must pass; `other_tests`: those that must report, with any outcome.
    - `test_paths`: what pytest runs.
    - `setup_commands`: shell commands that both sandboxes run first.
    - `hidden_paths`: what the image has of the tests; it is removed from the agent's sandbox.
    - `test_commands`: shell commands that the sandbox of the rewards runs before the tests.
    """

    instance: str
    shape: RowShape
    repository: str
    problem: str
    image: str
    workdir: str
    expected_tests: tuple[str, ...]
    other_tests: tuple[str, ...] = ()
    test_paths: tuple[str, ...] = ()
    test_patch: str = ""
    test_files: Mapping[str, str] = field(default_factory=dict[str, str])
    gold_patch: str = ""
    setup_commands: tuple[str, ...] = ()
    hidden_paths: tuple[str, ...] = ()
    test_commands: tuple[str, ...] = ()
    activate: str = ""
    python: str = "python"

    @property
    def protected_files(self) -> frozenset[str]:
        """The files of the repository that the tests bring, which the agent's changes must not touch."""
        return frozenset({*find_changed_files(self.test_patch), *self.test_files})

    @property
    def digest(self) -> str:
        """The digest of what the reward depends on, so that a changed row is another task."""
        content = [self.image, self.expected_tests, self.other_tests, self.test_patch, dict(self.test_files)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:DIGEST_DIGITS]

    def name_test(self, pytest_id: str) -> str:
        """Return the name of a test in this row. R2E-Gym leaves out the file and writes Class.test."""
        return pytest_id.partition("::")[2].replace("::", ".") if self.shape == "r2e-gym" else pytest_id


def parse_row(row: Row, shape: RowShape | None = None, image_template: str | None = None) -> SweRow:
    """Return a row of any shape. Raises ConfigInvalid, which names the row and what is missing or unsupported."""
    shape = shape or find_shape(row)
    name = str(row.get("instance_id") or row.get("commit_hash") or "a row")
    try:
        parsed = PARSERS[shape](row, image_template)
    except KeyError as error:
        raise ConfigInvalid(f"swe: {name} has no column {error.args[0]!r}, which rows of {shape} have") from error
    except ValueError as error:
        raise ConfigInvalid(f"swe: {name}: {error}") from error
    if not parsed.expected_tests:
        raise ConfigInvalid(f"swe: {name} has no tests that must pass")
    if shape != "r2e-gym" and (other := [id for id in parsed.expected_tests if "::" not in id]):
        raise ConfigInvalid(f"swe: {name}: {other[0]!r} is not a test of pytest, and others cannot report by their ids")
    return parsed


def find_shape(row: Row) -> RowShape:
    """Return the shape of a row by its columns."""
    if "docker_image" in row and "expected_output_json" in row:
        return "r2e-gym"
    if "image_url" in row:
        return "scale-swe"
    if "FAIL_TO_PASS" in row and "test_patch" in row:
        return "swe-bench"
    raise ConfigInvalid(f"swe: a row with the columns {', '.join(row)} is not of R2E-Gym, SWE-bench or Scale-SWE")


def find_changed_files(patch: str) -> list[str]:
    """Return the files that a patch writes."""
    return [file for file in _CHANGED_FILE.findall(patch) if file != "/dev/null"]


def _parse_r2e_gym(row: Row, image_template: str | None) -> SweRow:
    outcomes = cast(dict[str, str], _parse_json(row["expected_output_json"]))
    names = {
        _COLOR.sub("", name).split(" - ")[0].strip(): outcome for name, outcome in outcomes.items() if name.strip()
    }
    return SweRow(
        instance=f"{row['repo_name']}-{row['commit_hash']}",
        shape="r2e-gym",
        repository=row["repo_name"],
        problem=_strip_issue_tags(row["problem_statement"]),
        image=row["docker_image"],
        workdir=TESTBED,
        expected_tests=tuple(name for name, outcome in names.items() if outcome == "PASSED"),
        other_tests=tuple(name for name, outcome in names.items() if outcome != "PASSED"),
        test_paths=("r2e_tests",),
        gold_patch=_build_commit_patch(row.get("parsed_commit_content")),
        hidden_paths=(R2E_TESTS, *R2E_FILES),
        test_commands=(f"[ -e r2e_tests ] || ln -s {R2E_TESTS} r2e_tests",),
        python=".venv/bin/python",
    )


def _parse_swe_bench(row: Row, image_template: str | None) -> SweRow:
    instance = row["instance_id"]
    image = (image_template or SWE_BENCH_IMAGE).format(instance=instance.lower().replace("__", "_1776_"))
    expected = (*_parse_ids(row["FAIL_TO_PASS"]), *_parse_ids(row["PASS_TO_PASS"]))
    return SweRow(
        instance=instance,
        shape="swe-bench",
        repository=row["repo"],
        problem=row["problem_statement"],
        image=row.get("image") or row.get("image_name") or image,
        workdir=TESTBED,
        expected_tests=expected,
        test_paths=tuple(file for file in find_changed_files(row["test_patch"]) if file.endswith(".py")),
        test_patch=row["test_patch"],
        gold_patch=row["patch"],
        activate=". /opt/miniconda3/bin/activate testbed",
    )


def _parse_scale_swe(row: Row, image_template: str | None) -> SweRow:
    expected = (*_parse_ids(row["FAIL_TO_PASS"]), *_parse_ids(row["PASS_TO_PASS"]))
    commands = row.get("pre_commands") or ()
    return SweRow(
        instance=row["instance_id"],
        shape="scale-swe",
        repository=f"{row['user']}/{row['repo']}" if row.get("user") else row["repo"],
        problem=row["problem_statement"],
        image=row["image_url"],
        workdir=row["workdir"],
        expected_tests=expected,
        test_paths=tuple(dict.fromkeys(id.partition("::")[0] for id in expected)),
        test_patch=row.get("f2p_patch") or "",
        test_files={F2P_SCRIPT: row["f2p_script"]} if row.get("f2p_script") else {},
        gold_patch=row["patch"],
        setup_commands=(commands,) if isinstance(commands, str) else tuple(commands),
    )


PARSERS: dict[RowShape, Callable[[Row, str | None], SweRow]] = {
    "r2e-gym": _parse_r2e_gym,
    "swe-bench": _parse_swe_bench,
    "scale-swe": _parse_scale_swe,
}


LINE_MARKS = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}  # in a commit of R2E-Gym


def _build_commit_patch(content: Any) -> str:
    """Return the changes of a commit of R2E-Gym to Python files, without tests; "" if the row has no commit."""
    commit = cast(dict[str, Any], _parse_json(content)) if content else {"file_diffs": []}
    changes = [change for change in commit["file_diffs"] if _is_code(PurePosixPath(change["header"]["file"]["path"]))]
    return "".join(_format_change(change) for change in changes if change.get("hunks"))


def _is_code(path: PurePosixPath) -> bool:
    """Return whether a file is Python code and not a test, as R2E-Gym decides it."""
    is_test_name = path.name.startswith("test_") or path.stem.endswith("_test")
    return path.suffix == ".py" and not is_test_name and not {"test", "tests"} & {part.lower() for part in path.parts}


def _format_change(change: dict[str, Any]) -> str:
    """Return one file's change as a part of a patch."""
    header, path = change["header"], change["header"]["file"]["path"]
    lines = [f"diff --git a/{path} b/{path}", *([header["misc_line"]] if header.get("misc_line") else [])]
    lines += [f"--- {change['minus_file']['path']}", f"+++ {change['plus_file']['path']}"]
    for hunk in change["hunks"]:
        old, new = (hunk["descriptor"][name] for name in ("old_range", "new_range"))
        lines.append(f"@@ -{_format_range(old)} +{_format_range(new)} @@")
        lines += [LINE_MARKS[line["type"]] + line["content"] for line in hunk["line_group"]["all_lines"]]
    return "\n".join(lines) + "\n"


def _format_range(range: dict[str, Any]) -> str:
    return str(range["start"]) if range.get("length") is None else f"{range['start']},{range['length']}"


def _parse_ids(value: Any) -> tuple[str, ...]:
    """Return test ids that are a list, or a list as JSON."""
    ids = _parse_json(value)
    if not isinstance(ids, list):
        raise ValueError(f"expected a list of test ids, found {value!r:.80}")
    return tuple(map(str, cast(list[Any], ids)))


def _parse_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _strip_issue_tags(text: str) -> str:
    return re.sub(r"\[/?ISSUE\]", "", text).strip()
