"""Run five agent programs, unmodified, on a coding task, and train on their rollouts: `make test-agents`.

Each program is installed once beneath a folder, which the sandbox shows read-only. It works against the native engine
with a small random model that is made to say a script (`scripted_server`). First one rollout is compared, token by
token, with what the engine saw. Then `ramify rl` trains two steps. A program that cannot be installed or run is a
failure, not a skip.
"""

import argparse
import asyncio
import time
import traceback
from pathlib import Path

from ramify.rollout.runtime.bwrap import find_unsupported_reason
from tests.agents.model import write_model
from tests.agents.programs import PROGRAMS, install
from tests.agents.rollouts import build_source, check_trace, run_rollout, serve_script
from tests.agents.training import MAX_TOKEN_RATIO, train

ROLLOUT_DEADLINE = 1000  # seconds


def main() -> int:
    """Check the programs named on the command line, by default all; return 1 if one fails."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("programs", nargs="*", help=f"which of {', '.join(PROGRAMS)}; all by default")
    flags.add_argument("--folder", type=Path, default=Path("~/.cache/ramify/agents"), help="where they are installed")
    flags.add_argument("--output", type=Path, default=Path("outputs/agents"), help="logs and runs")
    flags.add_argument("--no-training", action="store_true", help="only check a rollout")
    options = flags.parse_args()
    names: list[str] = options.programs or list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        flags.error(f"unknown programs: {', '.join(unknown)}; expected {', '.join(PROGRAMS)}")
    if reason := find_unsupported_reason():
        raise SystemExit(f"no sandbox here, nothing was tested: {reason}")
    folder, output = options.folder.expanduser().resolve(), options.output.resolve() / time.strftime("%Y%m%d-%H%M%S")
    output.mkdir(parents=True)
    install(names, folder)
    model = write_model(folder / "model")
    failed = [name for name in names if not check(name, folder, model, output, training=not options.no_training)]
    print(f"{len(names) - len(failed)} of {len(names)} agent programs pass; logs in {output}")
    return 1 if failed else 0


def check(name: str, programs: Path, model: Path, output: Path, *, training: bool) -> bool:
    """Check one program and return whether it passed; the result is shown."""
    start = time.monotonic()
    try:
        with serve_script(name, model, output) as server:
            rollout = run_rollout(build_source(name, programs), server.url, model)
            trace = asyncio.run(asyncio.wait_for(rollout, ROLLOUT_DEADLINE))
            check_trace(name, trace, server.calls)
            seconds = time.monotonic() - start
            print(f"== {name}: {trace.num_turns} calls, {trace.total_tokens} tokens exact, {seconds:.0f} s", flush=True)
            for step in train(name, programs, server.url, model, output) if training else []:
                needed = f"{step.unique_context} context + {step.replies} sampled"
                print(f"   trained {step.packed} tokens for {needed}: {step.ratio:.3f} times", flush=True)
                assert step.ratio <= MAX_TOKEN_RATIO, step
    except Exception:  # noqa: BLE001 - the other programs are still checked
        traceback.print_exc()
        print(f"== {name}: failed; logs in {output}", flush=True)
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
