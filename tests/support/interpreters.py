"""Interpreters of other virtual environments for tests, made without a network."""

import subprocess
import sys
import sysconfig
from pathlib import Path

TASKSET = """
import sys
import ramify as rf

class Where(rf.Taskset):
    def load(self):
        yield rf.Task(prompt="where?")

    @rf.reward
    def in_other(self, trace) -> float:
        return float(sys.prefix.endswith("other"))

    def gold(self):
        return "here"
"""


def make_interpreter(home: Path, *, with_packages: bool = True) -> Path:
    """Make a virtual environment of this Python; it sees the packages of this environment, or none."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=60)
    if with_packages:
        paths = [path for path in sys.path if path.endswith("src")] + [sysconfig.get_path("purelib")]
        packages = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (packages / "borrowed.pth").write_text("\n".join([*paths, ""]))
    return home / "bin" / "python"
