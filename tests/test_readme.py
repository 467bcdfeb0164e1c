"""Every command of the README works as printed, in order, in a fresh clone.

The short test runs the shell lines with stand-ins for the installed programs, which record their arguments, and then
runs `ramify` with these arguments: training as a dry run, everything else on a finished run. The full test installs
and runs everything.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from ramify.cli import main
from ramify.cli.commands import COMMANDS
from ramify.rollout.runtime.bwrap import find_unsupported_reason
from tests.support.ledgers import write_finished_run

ROOT = Path(__file__).parent.parent
PROGRAMS = ("make", "source", "ramify", "pytest")
RECORDER = '#!/bin/sh\n{ printf "%s\\t" "${0##*/}" "$@"; echo; } >> "$CALLS"\n'
BROKEN_BWRAP = "#!/bin/sh\nexit 1\n"


def read_commands(page: str) -> list[str]:
    """Return the command lines of the code blocks and tables, in order, without their comments."""
    commands: list[str] = []
    is_block = False
    for line in page.splitlines():
        if line.startswith("```"):
            is_block = not is_block
        lines = [line] if is_block else re.findall("`([^`]+)`", line) if line.startswith("|") else []
        commands += [text.partition("#")[0].strip() for text in lines if text.split(" ")[0] in PROGRAMS]
    return commands


def list_tracked_files() -> list[str]:
    """Return the files that a clone has."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a git repository")
    return [name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()]


def copy_files(names: Iterable[str], folder: Path) -> None:
    """Copy files of this tree, as they are now."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


COMMAND_LINES = read_commands((ROOT / "README.md").read_text())


def test_the_readme_shows_how_to_run_install_and_test():
    assert COMMAND_LINES[:2] == ["make rl", "source .venv/bin/activate"]
    assert {"make test", "ramify rl @ examples/reverse_text/agent.toml"} <= set(COMMAND_LINES)
    assert not [line for line in COMMAND_LINES if re.search(r"\b[A-Z]{3,}\b", line)], "something has to be replaced"
    named = re.findall(r"`ramify ([a-z-]+)", (ROOT / "README.md").read_text())
    assert set(named) <= COMMANDS.keys()


@pytest.mark.process
@pytest.mark.parametrize("has_bwrap", [True, False])
@pytest.mark.usefixtures("check_plugins_in_process")
def test_commands_of_the_readme_find_their_files_and_arguments(has_bwrap, tmp_path, monkeypatch, capsys):
    folder, calls = tmp_path / "clone", tmp_path / "calls"
    tracked_files = list_tracked_files()
    copy_files((name for name in tracked_files if "/" not in name or name.startswith("examples/")), folder)
    binaries = folder / ".venv" / "bin"
    for name in ("python", "ramify", "pytest", "ruff", "pyrefly"):
        write_program(binaries / name, RECORDER)
    (binaries / "activate").write_text(f"PATH={binaries}:$PATH\n")
    for stamp in (".installed-run", ".installed-dev"):
        (folder / ".venv" / stamp).touch()
    if not has_bwrap:
        write_program(tmp_path / "broken" / "bwrap", BROKEN_BWRAP)
        monkeypatch.setenv("PATH", f"{tmp_path / 'broken'}:{os.environ['PATH']}")
    elif find_unsupported_reason() is not None:
        pytest.skip("there is no sandbox on this machine")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.chdir(folder)
    script = "\n".join(COMMAND_LINES)
    done = subprocess.run(["bash", "-e", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

    find_unsupported_reason.cache_clear()
    try:
        for call in calls.read_text().splitlines():
            name, *arguments = call.rstrip("\t").split("\t")
            if name == "pytest":
                assert {path for path in arguments if "/" in path} <= set(tracked_files)
            if name != "ramify" or arguments[0] == "plot":  # its library takes seconds to load
                continue
            is_training = arguments[0] == "rl"
            status = main([*arguments, "--dry-run"] if is_training else arguments)
            output = capsys.readouterr()
            assert status == 0, f"{call}\n{output.out}{output.err}"
            if "examples/reverse_text/agent.toml" in arguments:
                assert ("without isolation" in output.out) == (not has_bwrap)
            if is_training:
                for plan in Path("outputs").glob("*/plan.txt"):
                    if not (plan.parent / "run.sqlite").exists():
                        write_finished_run(plan.parent)
    finally:
        find_unsupported_reason.cache_clear()


@pytest.mark.run
@pytest.mark.full("an installation, three runs and the tests: an hour; needs a package index")
@pytest.mark.timeout(7200)
def test_commands_of_the_readme_work_in_a_fresh_clone(tmp_path):
    folder = tmp_path / "clone"
    copy_files(list_tracked_files(), folder)
    variables = {name: value for name, value in os.environ.items() if name not in ("RAMIFY_FULL", "VIRTUAL_ENV")}
    done = subprocess.run(["bash", "-e", "-x", "-c", "\n".join(COMMAND_LINES)], cwd=folder, env=variables, timeout=7000)
    assert done.returncode == 0

    write_program(tmp_path / "broken" / "bwrap", BROKEN_BWRAP)
    variables["PATH"] = f"{tmp_path / 'broken'}:{folder / '.venv' / 'bin'}:{variables['PATH']}"
    agent = ["ramify", "rl", "@", "examples/reverse_text/agent.toml", "--max-steps", "2", "--fresh"]
    done = subprocess.run(agent, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "without isolation" in done.stdout, done.stdout + done.stderr
