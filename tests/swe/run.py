"""SWE tasks in real containers: `make test-swe`.

An image with a real repository and a real bug is made from Debian packages and releases on PyPI (`image`). Rows of
three datasets describe the bug (`rows`). Empty patch, gold patch and cheats are scored (`scores`), three harnesses
solve the tasks with a scripted model, and `ramify rl` trains on one dataset and evaluates on another (`rollouts`).
"""

import argparse
import asyncio
import shlex
import time
from pathlib import Path
from typing import Any

from tests.agents.model import write_model
from tests.agents.programs import install
from tests.swe.image import main as make_image
from tests.swe.rollouts import check_rollouts, serve_script, train
from tests.swe.rows import write_rows
from tests.swe.scores import build_source, check_scores

HARNESSES = ("bash", "rlm", "codex")
PARTS = ("scores", *HARNESSES, "training")


def main() -> None:
    """Check the parts named on the command line, by default all."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("parts", nargs="*", help=f"which of {', '.join(PARTS)}; all by default")
    flags.add_argument("--engine", default="podman", help="docker or podman")
    flags.add_argument("--engine-args", default="", help="arguments of its command `run`")
    flags.add_argument("--debian", help="the mirror of Debian; by default debootstrap's")
    flags.add_argument("--folder", type=Path, default=Path("~/.cache/ramify/swe"), help="repository, rows and programs")
    flags.add_argument("--output", type=Path, default=Path("outputs/swe"), help="logs and runs")
    options = flags.parse_args()
    parts: list[str] = options.parts or list(PARTS)
    if unknown := [name for name in parts if name not in PARTS]:
        flags.error(f"unknown parts: {', '.join(unknown)}; expected {', '.join(PARTS)}")
    folder, output = options.folder.expanduser().resolve(), options.output.resolve() / time.strftime("%Y%m%d-%H%M%S")
    output.mkdir(parents=True)
    engine_args = shlex.split(options.engine_args)
    start = time.monotonic()
    repository = make_image(options.engine, folder, options.debian)
    rows = write_rows(options.engine, engine_args, repository, output)
    print(f"== image and rows: {time.monotonic() - start:.0f} s", flush=True)
    runtime = {"id": "container", "engine": options.engine, "engine_args": engine_args, "pull": "never"}
    for shape, path in rows.items() if "scores" in parts else ():
        asyncio.run(check_scores(shape, build_source(path, runtime)))
    model = write_model(folder / "model")
    for harness in HARNESSES:
        if harness in parts:
            table = {**runtime, **(show_codex(folder) if harness == "codex" else {})}
            with serve_script(harness, model, output) as server:
                asyncio.run(check_rollouts(harness, rows, table, server, model))
    if "training" in parts:
        with serve_script("bash", model, output) as server:
            train(rows, runtime, server.url, model, output)
    print(f"all of {', '.join(parts)} pass; logs in {output}")


def show_codex(folder: Path) -> dict[str, Any]:
    """Install Codex; return the keys of a runtime that show its program, which needs nothing else, to containers."""
    install(["codex"], folder)
    (program,) = folder.glob("node_modules/@openai/codex-*/vendor/*/bin/codex")
    return {"read_only": [f"{program.parent}:/opt/codex"], "prepend_path": ["/opt/codex"]}


if __name__ == "__main__":
    main()
