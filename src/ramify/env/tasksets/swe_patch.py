"""The agent's changes to a repository as a patch, without what could change how tests run.

Code under test is the agent's, but the tests, the settings of pytest and the modules that Python imports by itself come
from the image. So changes to such files are left out.
"""

import re
from collections.abc import Container
from pathlib import PurePosixPath

# names that change how pytest or Python starts, in any directory
PROTECTED_NAMES = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"}
    | {"sitecustomize.py", "usercustomize.py", "pytest.py", "run_tests.sh"}
)
PROTECTED_SUFFIXES = (".pth", ".pyc", ".egg-link")
PROTECTED_DIRECTORIES = frozenset({"pytest", "_pytest", "pluggy", "r2e_tests", ".git", ".venv"})  # at the top

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
    )
