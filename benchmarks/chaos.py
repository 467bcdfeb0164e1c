"""Kill -9, twenty times, whatever a run consists of; then ask whether anything was lost or counted twice.

Two runs of the same configuration: one in peace, one in which a process dies whenever a checkpoint has been made since
the last kill. Victims are, in random order, an env worker, an env server, the engine, the trainer, the orchestrator, or
the whole tree, after which the same command is given again. What has to hold in the end: `ramify why RUN --audit` finds
nothing, and the held-out eval is within 0.05 of the run in peace.
"""

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
from _check import Row, finish, parser

DEADLINE = 3600.0  # seconds for one run
APART = 0.05  # most by which the two evals may differ
TREE = "the whole tree"
ROLES = {
    "env worker": "ramify.envserver",
    "env server": "ramify env-server",
    "engine": "ramify serve",
    "trainer": "ramify trainer",
    "orchestrator": "ramify orchestrator",
}
CONFIG = """
name = "run"
max_steps = {steps}
seq_len = 256

[orchestrator]
batch_size = 32
group_size = 8
max_off_policy = 2

[trainer.optim]
lr = 1e-4

[checkpoint]
interval = 2

[launch]
restarts = 100

[[train]]
taskset = {{ id = "reverse-text", num_tasks = 64 }}
sampling = {{ max_tokens = 40 }}
max_turns = 1

[[eval]]
name = "held-out"
taskset = {{ id = "reverse-text", split = "eval" }}
sampling = {{ temperature = 0.0, max_tokens = 40 }}
num_tasks = 256
interval = 1000
max_turns = 1
"""


def ramify(*words: str) -> list[str]:
    return [sys.executable, "-m", "ramify", *words]


class Run:
    """`ramify rl` in a folder of its own; started again where it was killed."""

    def __init__(self, home: Path, steps: int) -> None:
        self.home, self.path = home, home / "outputs" / "run"
        home.mkdir()
        (home / "rl.toml").write_text(CONFIG.format(steps=steps))
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with (self.home / "said.txt").open("a") as said:
            return subprocess.Popen(ramify("rl", "@", "rl.toml"), cwd=self.home, stdout=said, stderr=said)

    @property
    def committed(self) -> int:
        """The step of the last checkpoint."""
        steps = [int(path.name[5:]) for path in (self.path / "checkpoints").glob("step_*") if path.name[5:].isdigit()]
        return max(steps, default=0)

    def alive(self) -> bool:
        return self.process.poll() is None

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def kill(self, role: str, rng: random.Random) -> bool:
        """Kill one that plays this role; whether there was one."""
        if role == TREE:
            family = self.family()
            self.process.kill()
            for one in family:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            self.process.wait()
            self.process = self._start()
            return True
        found = list(self._playing(ROLES[role]))
        if not found:
            return False
        with contextlib.suppress(psutil.Error):
            rng.choice(found).kill()
            return True
        return False

    def _playing(self, words: str) -> Iterator[psutil.Process]:
        for one in self.family():
            with contextlib.suppress(psutil.Error):
                if words in " ".join(one.cmdline()):
                    yield one

    def end(self) -> None:
        for one in self.family():
            with contextlib.suppress(psutil.Error):
                one.kill()
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return (self.home / "said.txt").read_text()[-4000:]

    def eval(self) -> float:
        """The last value of the held-out eval."""
        asked = ramify("metrics", str(self.path), "--name", "eval/held-out/avg", "--json")
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120)
        return json.loads(done.stdout)[-1]["value"]

    def audit(self) -> tuple[int, str]:
        asked = ramify("why", str(self.path), "--audit")
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr


def train(run: Run, kills: int, rng: random.Random) -> Counter[str]:
    """To its end, killing on the way; which roles were killed."""
    killed: Counter[str] = Counter()
    end, seen, bag = time.monotonic() + DEADLINE, 0, list[str]()
    try:
        while run.alive():
            if time.monotonic() > end:
                raise TimeoutError(f"the run did not end within {DEADLINE:g} s:\n{run.said()}")
            time.sleep(0.05)
            if killed.total() < kills and run.committed > seen:
                time.sleep(rng.uniform(0.0, 1.0))  # not always right behind a checkpoint
                bag = bag or rng.sample([*ROLES, TREE], len(ROLES) + 1)  # in any order, but nobody is spared
                role = bag[-1]
                if run.alive() and run.kill(role, rng):
                    seen = run.committed
                    killed[bag.pop()] += 1
                    print(f"kill {killed.total()} at step {seen}: {role}", flush=True)
        if run.process.returncode:
            raise RuntimeError(f"the run ended with {run.process.returncode}:\n{run.said()}")
    finally:
        run.end()
    return killed


def main() -> int:
    flags = parser("Kill -9, again and again; nothing may be lost, nothing may count twice")
    flags.add_argument("--kills", type=int, default=20)
    flags.add_argument("--seed", type=int, default=0, help="of the choice of victims")
    flags.add_argument("--keep", type=Path, help="leave the runs in this folder")
    args = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = args.keep or Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        rng, steps, taken = random.Random(args.seed), 3 * args.kills, []
        found: dict[str, Run] = {}
        for name, kills in (("killed", args.kills), ("peace", 0)):
            begun = time.monotonic()
            found[name] = Run(home / name, steps)
            killed = train(found[name], kills, rng)
            taken.append(time.monotonic() - begun)
            if kills:
                print(f"killed: {', '.join(f'{count} x {role}' for role, count in killed.most_common())}")
                total = killed.total()
        code, told = found["killed"].audit()
        print(told.strip())
        calm, chaos = found["peace"].eval(), found["killed"].eval()
    rows = [
        Row("kills", total, None, "", args.kills, at_least=True),
        Row("exit code of why --audit", code, None, "", 0),
        Row("final eval", chaos, calm, ""),
        Row("difference of the final evals", abs(chaos - calm), None, "", APART),
        Row("seconds", taken[0], taken[1], "s"),
    ]
    return finish("A run whose processes are killed, beside one in peace", rows, args)


if __name__ == "__main__":
    raise SystemExit(main())
