"""The Makefile installs what its target needs, once, with visible progress, by uv or by pip.

The interpreter, `uv` and `ramify` are stand-ins that record how they are called: an installation takes minutes.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
RECORDER = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in
*"pip config list"*) echo "$PIP_SETTINGS" ;;
*compileall*) sleep "$INSTALL_SECONDS" ;;
*venv*) mkdir -p .venv/bin; for name in python ramify ruff pyrefly pytest; do cp "$0" ".venv/bin/$name"; done ;;
*install*) echo "Downloading something"; sleep "$INSTALL_SECONDS"; exit "$INSTALL_STATUS" ;;
esac
"""


class Clone:
    """A fresh clone beside a folder of stand-ins, which is the whole PATH but for the system's tools."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        self.tools = folder / "tools"
        self.calls = folder / "calls"
        self.folder.mkdir()
        self.tools.mkdir()
        for name in ("Makefile", "pyproject.toml", "requirements-dev.lock"):
            shutil.copy(ROOT / name, self.folder)
        self.add_tool("python3")

    def add_tool(self, name: str) -> None:
        (self.tools / name).write_text(RECORDER)
        (self.tools / name).chmod(0o755)

    def make(
        self, *arguments: str, pip_settings: str = "", install_status: int = 0, seconds: float = 0
    ) -> tuple[list[str], str, int]:
        """Return the recorded calls, the output and the exit status of one `make`."""
        self.calls.write_text("")
        variables = {
            "PATH": f"{self.tools}:/usr/bin:/bin",
            "CALLS": str(self.calls),
            "HOME": str(self.folder),
            "PIP_SETTINGS": pip_settings,
            "INSTALL_STATUS": str(install_status),
            "INSTALL_SECONDS": str(seconds),
            "PROGRESS_SECONDS": "0.1",
        }
        done = subprocess.run(
            ["make", *arguments], cwd=self.folder, env=variables, capture_output=True, text=True, timeout=60
        )
        return self.calls.read_text().splitlines(), done.stdout + done.stderr, done.returncode


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    if not shutil.which("make", path="/usr/bin:/bin"):
        pytest.skip("make is not installed")
    if shutil.which("uv", path="/usr/bin:/bin"):
        pytest.skip("uv is among the system's tools: its absence cannot be tried")
    return Clone(tmp_path)


def installs(calls: list[str]) -> list[str]:
    return [call for call in calls if "pip install" in call]


def test_each_target_installs_what_it_needs_once_without_its_output(clone: Clone) -> None:
    calls, output, status = clone.make("rl")
    (install,) = installs(calls)
    assert status == 0 and "[local,plot,vision]" in install and "--group" not in install
    assert "-c requirements-dev.lock" in install
    assert "Downloading something" not in output, "two hundred such lines hide what matters"
    assert [call.split()[1] for call in calls if call.startswith("ramify")] == ["rl", "plot"]

    assert installs(clone.make("rl")[0]) == []
    (install,) = installs(clone.make("test")[0])
    assert "--group dev" in install and "[local,plot,vision," in install
    assert installs(clone.make("test")[0]) == [] == installs(clone.make("rl")[0])


def test_installing_and_compiling_are_not_silent(clone: Clone) -> None:
    _, output, status = clone.make("rl", seconds=0.5)
    assert status == 0 and output.count("Downloading something") >= 2
    assert re.search(r"compiling the installed packages.*\n  compiled \d+ of \d+ files", output)


def test_a_fresh_clone_can_be_tested_with_one_install(clone: Clone) -> None:
    calls, _, status = clone.make("test")
    assert status == 0 and len(installs(calls)) == 1 and any(call.startswith("pytest") for call in calls)
    assert installs(clone.make("rl")[0]) == []


def test_an_installation_that_failed_is_tried_again(clone: Clone) -> None:
    calls, output, status = clone.make("rl", install_status=1)
    assert status != 0 and "Downloading something" in output and not any(call.startswith("ramify") for call in calls)
    assert len(installs(clone.make("rl")[0])) == 1


def test_uv_is_used_where_it_is_present(clone: Clone) -> None:
    clone.add_tool("uv")
    calls, _, status = clone.make("rl")
    (install,) = installs(calls)
    assert status == 0 and install.startswith("uv pip install") and "--python .venv/bin/python" in install
    assert "--torch-backend=auto" in install, "without it uv takes the CUDA build of torch on a machine without a GPU"


def test_pip_is_used_where_it_knows_an_index_that_uv_does_not_read(clone: Clone) -> None:
    clone.add_tool("uv")
    (install,) = installs(clone.make("rl", pip_settings="global.find-links='/wheels'")[0])
    assert install.startswith("python -m pip install")


def test_uv_can_be_switched_off_and_insisted_on(clone: Clone) -> None:
    clone.add_tool("uv")
    (install,) = installs(clone.make("rl", "UV=")[0])
    assert install.startswith("python -m pip install")
    (install,) = installs(clone.make("test", "UV=uv", pip_settings="global.find-links='/wheels'")[0])
    assert install.startswith("uv pip install")
