"""Run third-party clients against one `ramify serve -m tiny`: `make test-clients`.

Each client gets a virtual environment of its own, because their requirements conflict with each other and with ours. An
environment is made again only when its requirements change. A check is a script that runs with that environment's
interpreter and gets the server's address; its exit status says whether it passed. The network is only used to install
packages.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
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
}
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
    interpreters = {name: make_environment(name, options.folder.resolve(), options.uv) for name in names}
    with serving(options.folder.resolve() / "server.log") as url:
        failed = [name for name in names if not run_check(name, interpreters[name], url)]
    print(f"{len(names) - len(failed)} of {len(names)} clients pass")
    return 1 if failed else 0


def make_environment(name: str, folder: Path, uv: str) -> Path:
    """Return the interpreter of a client's environment, which is made if it is missing or out of date."""
    home = folder / name
    python, stamp = home / "bin" / "python", home / "installed.txt"
    wanted = "\n".join([sys.version, *REQUIREMENTS[name]])
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"== {name}: installing {', '.join(REQUIREMENTS[name])} into {home}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    if uv:
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


def run_check(name: str, python: Path, url: str) -> bool:
    """Run a client's check and return whether it passed; its output is shown."""
    print(f"== {name}", flush=True)
    arguments = [url, str(resolve_model_path("tiny"))] if name == "verifiers" else [url]
    home = python.parents[1] / "home"
    home.mkdir(exist_ok=True)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HOME": str(home), "NO_COLOR": "1"}
    command = [str(python), str(HERE / f"check_{name}.py"), *arguments]
    start = time.monotonic()
    try:
        status = subprocess.run(command, env={**os.environ, **offline}, cwd=home, timeout=CHECK_DEADLINE).returncode
    except subprocess.TimeoutExpired:
        status = f"no end within {CHECK_DEADLINE} s"
    passed = "passed" if status == 0 else f"FAILED ({status})"
    print(f"{name} {passed} after {time.monotonic() - start:.0f} s", flush=True)
    return status == 0


if __name__ == "__main__":
    sys.exit(main())
