"""Run third-party clients against one `ramify serve -m tiny`: `make test-clients`.

Each client gets an environment of its own, because their requirements conflict with each other and with ours. An
environment is made again only when its requirements change. A check is a script that runs with that environment's
interpreter, Python or node, and gets the server's address; its exit status says whether it passed. The checks of SDKs
print a line for each feature (`features.py`), which become a table. The network is only used to install packages.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ramify.model.resolve import resolve_model_path

HERE = Path(__file__).parent
REQUIREMENTS = {
    "lm_eval": ["lm-eval[api]==0.4.13"],
    "verifiers": ["verifiers==0.4.0", "mcp==2.0.0", "openai<3"],
    "litellm": ["litellm==1.106.2", "mcp==2.3.0"],
    "inspect_ai": ["inspect_ai==0.3.285", "openai==3.49.0"],
    "openai": ["openai==3.51.0"],
    "anthropic": ["anthropic==2.9.0"],
    "langchain": ["langchain==1.4.7", "langchain-openai==1.7.3", "langgraph==1.2.22"],
    "pydantic_ai": ["pydantic-ai-slim[openai]==2.66.0"],
    "instructor": ["instructor==1.17.0"],
    "smolagents": ["smolagents[openai]==1.26.0"],
    "openai_agents": ["openai-agents==0.24.0"],
    "vercel_ai": [
        "ai@7.0.170",
        "@ai-sdk/openai@4.0.115",
        "@ai-sdk/openai-compatible@3.0.90",
        "@ai-sdk/anthropic@4.0.102",
        "zod@4.6.7",
    ],
}
NODE_CLIENTS = ("vercel_ai",)
FeatureTable = dict[str, dict[str, str]]  # by client and feature
FEATURES = ("tools", "structured output", "streaming")
INSTALL_DEADLINE = 1800  # seconds
START_DEADLINE = 180
CHECK_DEADLINE = 600


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("clients", nargs="*", help=f"which of {', '.join(REQUIREMENTS)}; all by default")
    flags.add_argument("--folder", type=Path, default=Path(".venvs"), help="where the environments are")
    flags.add_argument("--uv", default="", help="uv, to make them with; pip otherwise")
    options = flags.parse_args()
    names: list[str] = options.clients or list(REQUIREMENTS)
    if unknown := [name for name in names if name not in REQUIREMENTS]:
        flags.error(f"unknown clients: {', '.join(unknown)}; expected {', '.join(REQUIREMENTS)}")
    folder: Path = options.folder.resolve()
    interpreters = {name: make_environment(name, folder, options.uv) for name in names}
    table: FeatureTable = {}
    with serving(folder / "server.log") as url:
        failed = [name for name in names if not run_check(name, interpreters[name], url, folder, table)]
    if table:
        print(format_table(table))
    print(f"{len(names) - len(failed)} of {len(names)} clients pass")
    return 1 if failed else 0


def make_environment(name: str, folder: Path, uv: str) -> Path:
    """Return the interpreter of a client's environment, which is made if it is missing or out of date."""
    home, is_node = folder / name, name in NODE_CLIENTS
    stamp = home / "installed.txt"
    python = Path(shutil.which("node") or "node") if is_node else home / "bin" / "python"
    wanted = "\n".join([sys.version, *REQUIREMENTS[name]])
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"== {name}: installing {', '.join(REQUIREMENTS[name])} into {home}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    if is_node:
        home.mkdir(parents=True)
        (home / "package.json").write_text("{}")
        create, install = ["npm", "--version"], ["npm", "install", "--prefix", str(home), "--no-audit", "--no-fund"]
    elif uv:
        create = [uv, "venv", "--quiet", "--python", sys.executable, str(home)]
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    else:
        create = [sys.executable, "-m", "venv", str(home)]
        install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run(create, check=True, timeout=INSTALL_DEADLINE)
    subprocess.run([*install, *REQUIREMENTS[name]], check=True, timeout=INSTALL_DEADLINE)
    stamp.write_text(wanted)
    return python


@contextlib.contextmanager
def serving(log: Path) -> Iterator[str]:
    """Run a server and give its address."""
    command = [sys.executable, "-m", "ramify", "serve", "-m", "tiny", "--server.port", "0", "--inference.threads", "1"]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            yield wait_for_address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
    if "Traceback" in log.read_text():
        raise SystemExit(f"the server printed a traceback; its output:\n{log.read_text()}")


def wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address that the server prints when it is ready."""
    deadline = time.monotonic() + START_DEADLINE
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"^serving .* at (http://\S+)$", log.read_text(), re.MULTILINE):
            return found[1]
        time.sleep(0.2)
    raise SystemExit(f"the server did not answer within {START_DEADLINE} s; its output:\n{log.read_text()}")


def run_check(name: str, interpreter: Path, url: str, folder: Path, table: FeatureTable) -> bool:
    """Run a client's check and return whether it passed; its output is shown, and its features go to the table."""
    print(f"== {name}", flush=True)
    arguments = [url, str(resolve_model_path("tiny"))] if name == "verifiers" else [url]
    home = folder / name / "home"
    home.mkdir(exist_ok=True)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HOME": str(home), "NO_COLOR": "1"}
    is_node = name in NODE_CLIENTS
    command = [str(interpreter), str(HERE / f"check_{name}.{'mjs' if is_node else 'py'}"), *arguments]
    directory = home.parent if is_node else home  # node finds packages from the working directory
    start = time.monotonic()
    with subprocess.Popen(
        command, env={**os.environ, **offline}, cwd=directory, stdout=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(CHECK_DEADLINE, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("feature | "):
                _, client, feature, result = line.strip().split(" | ")
                table.setdefault(client, {})[feature] = result
        status = process.wait()
        timer.cancel()
    passed = "passed" if status == 0 else f"FAILED ({status})"
    print(f"{name} {passed} after {time.monotonic() - start:.0f} s", flush=True)
    return status == 0


def format_table(table: FeatureTable) -> str:
    """Return the features of the SDKs as a table in Markdown."""
    rows = [
        ("client", *FEATURES),
        *((client, *(row.get(name, "-") for name in FEATURES)) for client, row in table.items()),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join(f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths))} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
