"""Try the page in a real browser: `make test-view`.

Playwright and axe-core are installed into a folder of their own, once; the browser is the machine's Chromium. The
network is only used to install them. The checks are `check_page.py` (views of written runs), `check_controls.py`
(mouse, keys, filters) and `check_live.py` (a real run that is watched, killed and continued).
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PLAYWRIGHT, AXE = "playwright==1.65.0", "axe-core@4"
INSTALL_DEADLINE = 900  # seconds
CHECK_DEADLINE = 1800


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--folder", type=Path, default=Path(".venvs/view"), help="where Playwright and axe-core are")
    flags.add_argument("--chromium", default="chromium", help="the browser; Debian: apt-get install chromium")
    flags.add_argument("--screenshots", type=Path, help="also write a screenshot of each view and theme to this folder")
    options, arguments = flags.parse_known_args()
    folder, browser = options.folder.resolve(), shutil.which(options.chromium)
    if browser is None:
        flags.error(f"there is no browser {options.chromium}; install Chromium, or name it with --chromium")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(install_playwright(folder)), str(HERE.parents[1])]),
        "RAMIFY_CHROMIUM": browser,
        "RAMIFY_AXE": str(install_axe(folder)),
        "RAMIFY_SCREENSHOTS": str(options.screenshots.resolve()) if options.screenshots else "",
    }
    checks = [str(HERE / name) for name in ("check_page.py", "check_controls.py", "check_live.py")]
    command = [sys.executable, "-m", "pytest", "-v", "-n", "0", "--timeout", "600", *checks, *arguments]
    return subprocess.run(command, env=environment, timeout=CHECK_DEADLINE).returncode


def install_playwright(folder: Path) -> Path:
    """Return the folder with Playwright, which is installed if it is missing."""
    packages = folder / "python"
    if not (packages / "playwright").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages), PLAYWRIGHT]
        subprocess.run(command, check=True, timeout=INSTALL_DEADLINE)
    return packages


def install_axe(folder: Path) -> Path:
    """Return the script of axe-core, which is installed if it is missing."""
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        command = ["npm", "install", "--silent", "--prefix", str(folder), AXE]
        subprocess.run(command, check=True, timeout=INSTALL_DEADLINE)
    return script


if __name__ == "__main__":
    sys.exit(main())
