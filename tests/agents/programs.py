"""Installs the agent programs that the presets run, in the versions that `docs/agents.md` names."""

import shutil
import subprocess
import sys
from pathlib import Path

NPM_PACKAGES = {
    "codex": "@openai/codex@0.166.0",
    "claude-code": "@anthropic-ai/claude-code@2.1.197",
    "opencode": "opencode-ai@1.18.18",
    "pi": "@mariozechner/pi-coding-agent@0.73.1",
}
PIP_PACKAGES = {"mini-swe-agent": ["mini-swe-agent==2.4.6", "mcp"]}
PROGRAMS = (*NPM_PACKAGES, *PIP_PACKAGES)
INSTALL_DEADLINE = 1800  # seconds


def install(names: list[str], folder: Path) -> None:
    """Install programs beneath a folder, unless they are there. Raises SystemExit if that is not possible."""
    if folder.resolve().is_relative_to("/tmp"):
        raise SystemExit(f"{folder} is beneath /tmp, which is another directory in a sandbox: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [NPM_PACKAGES[name] for name in names if name in NPM_PACKAGES]
    stamp = folder / "installed.txt"
    installed = stamp.read_text().splitlines() if stamp.exists() else []
    for package in wanted:
        if package not in installed:
            _install_npm(package, folder)
            installed.append(package)
            stamp.write_text("\n".join(installed))
    for name in names:
        requirements = PIP_PACKAGES.get(name, [])
        if requirements and " ".join(requirements) not in installed:
            _install_pip(requirements, folder / "python")
            installed.append(" ".join(requirements))
            stamp.write_text("\n".join(installed))


def _install_npm(package: str, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("npm is not installed; install Node 20 or newer (apt install nodejs npm)")
    print(f"== installing {package} into {folder}", flush=True)
    _run([npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), package], folder)
    if "claude-code" in package:  # npm may block its install script, which puts the program in its place
        _run(["node", "install.cjs"], folder / "node_modules" / "@anthropic-ai" / "claude-code")


def _install_pip(requirements: list[str], folder: Path) -> None:
    print(f"== installing {', '.join(requirements)} into {folder}", flush=True)
    _run([sys.executable, "-m", "venv", str(folder)], folder.parent)
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", *requirements], folder)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, check=True, cwd=folder, timeout=INSTALL_DEADLINE)
