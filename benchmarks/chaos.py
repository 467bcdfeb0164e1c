"""Kill and stop the processes of a run and damage its files, then check that nothing was lost or counted twice.

Two runs of the same configuration: one undisturbed, one with a fault whenever a checkpoint was made since the last:

- *kill*: SIGKILL for an env worker, an env server, the engine, the trainer, the orchestrator, or the whole tree, after
  which the same command is given again.
- *stop*: SIGSTOP for one of them, and SIGCONT some seconds later, if it is still there by then.
- *damage*: the tree is killed and a file of a checkpoint, the ledger or a trace segment is changed, cut or removed. The
  same command must refuse it by a name, after which the file is brought back and the command given again. Only a
  segment may be overlooked by the run itself, which has no use for the rollouts of steps that are trained; there
  `ramify why RUN --audit` must notice.

Where there is a sandbox, a quarter of the groups come from an agent program in a sandbox, and sandboxes are killed and
stopped too. No rollout may blame its agent for that.

With `--swaps`, only the engine and the trainer are killed, each time while new weights are handed over. With
`--device cuda` the two share a GPU. Torn weights would show in the trainer's logprobs, which differ from the engine's.

At the end every damage must have been noticed, the audit must find nothing, no rollout may have ended with
`AgentFailed`, and the held-out eval must be within 0.05 of the undisturbed run.
"""

import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from _check import Row, finish, parser
from _damage import SEGMENT, TARGETS, Damage, damage

from ramify.rollout.runtime.bwrap import INIT_FILE, find_unsupported_reason
from ramify.run.reader import observe_run, read_metrics
from ramify.run.store import RunStore
from ramify.train.checkpoint_manifest import list_saved_steps

DEADLINE = 3600.0  # seconds for one run
REFUSAL_DEADLINE = 300.0  # seconds for a start to refuse a damaged file, or to make a checkpoint in spite of it
STOP_SECONDS = (2.0, 15.0)  # for how long a process stands still
APART = 0.05  # most by which the two evals may differ
MISMATCH_FACTOR = 3.0  # most by which the mismatch of the disturbed run may be larger; torn weights give far more
TREE = "the whole tree"
SANDBOX = "sandbox"
ROLES = {
    "env worker": "ramify.rollout.envserver",
    "env server": "ramify env-server",
    "engine": "ramify serve",
    "trainer": "ramify trainer",
    "orchestrator": "ramify orchestrator",
    SANDBOX: INIT_FILE,  # bwrap, or the first program in the sandbox
}
SWAPPING = ("engine", "trainer")  # who takes part in a weight swap
SWAP_SECONDS = 0.1  # within which a kill after a step falls into the handing over of its weights
FAILURE = re.compile(r"^([A-Z][A-Za-z]+): ", re.MULTILINE)
CONFIG = """
name = "run"
max_steps = {steps}
seq_len = 256

[orchestrator]
batch_size = 32
group_size = 8
max_staleness = 2
max_untrainable_groups = "None"  # the task is solved before the last fault: most groups then earn equal rewards

[checkpoint]
interval = 2

[launch]
max_restarts = 100
{placement}
[trainer.optim]
lr = 1e-4

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

AGENTS = f"""
[[train]]
name = "agents"
taskset = {{ id = "reverse-text", num_tasks = 64 }}
sampling = {{ max_tokens = 40 }}
max_turns = 1
weight = 0.34

[train.harness]
id = "program"
command = ["python3", "agent.py"]
prompt = "stdin"
copy_files = {{ "agent.py" = "{Path(__file__).parents[1] / "examples" / "reverse_text" / "agent.py"}" }}

[train.runtime]
id = "sandbox"
limits = {{ memory_mb = "None", max_processes = "None" }}  # not every user may set these limits
"""
ON_A_GPU = """gpu_placement = "colocated"

[inference]
device = "cuda"
kv_memory_fraction = 0.2

[trainer]
device = "cuda"
"""
OVER_MEMORY = """
[weights]
transport = "ipc"
"""


def ramify(*words: str) -> list[str]:
    return [sys.executable, "-m", "ramify", *words]


class Run:
    """`ramify rl` in a folder of its own; the same command is given again after the whole tree was killed."""

    def __init__(self, home: Path, steps: int, placement: str = "", agents: str = "") -> None:
        self.home, self.path = home, home / "outputs" / "run"
        self.log = home / "output.txt"
        home.mkdir()
        (home / "rl.toml").write_text(CONFIG.format(steps=steps, placement=placement) + agents)
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self._output_start = log.tell()  # in bytes
            command = ramify("rl", "@", "rl.toml")
            self.process = subprocess.Popen(command, cwd=self.home, stdout=log, stderr=log)

    @property
    def trained(self) -> int:
        """The number of trained steps; 0 while the orchestrator does not answer."""
        observed = observe_run(self.path)
        return observed.state.orchestrator.step if observed.is_live and observed.state.orchestrator else 0

    @property
    def committed(self) -> int:
        """The step of the last checkpoint."""
        return max(list_saved_steps(self.path / "checkpoints"), default=0)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def find(self, role: str) -> list[psutil.Process]:
        """Return the processes that play this role."""
        return [process for process in self.family() if ROLES[role] in _command_line(process)]

    def kill_tree(self) -> None:
        family = self.family()
        self.process.kill()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()

    def output(self, *, since_start: bool = False) -> str:
        return self.log.read_bytes()[self._output_start if since_start else -4000 :].decode(errors="replace")

    def final_eval(self) -> float:
        """Return the last value of the held-out eval."""
        return self.read_metric("eval/held-out/avg")[-1]

    def read_metric(self, name: str) -> list[float]:
        return [metric.value for metric in read_metrics(self.path) if metric.name == name]

    def count_errors(self, source: str) -> Counter[str]:
        """Return how many rollouts of a source have each error."""
        with RunStore.open(self.path, write=False) as store:
            return Counter(name for record in store.rollouts(source=source) for name in record.summary["errors"])

    def audit(self) -> tuple[int, str]:
        command = ramify("why", str(self.path), "--audit")
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        return result.returncode, result.stdout + result.stderr


def _command_line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@dataclass(slots=True)
class Faults:
    """What is done to a run, in an order drawn from `rng` in which no kind of victim is spared."""

    rng: random.Random
    kills: int = 0
    stops: int = 0
    damages: int = 0
    during_swaps: bool = False
    """Whether only engine and trainer are killed, right after a step."""
    roles: tuple[str, ...] = tuple(ROLES)
    """Which processes there are."""
    done: Counter[str] = field(default_factory=Counter[str])
    overlooked: list[str] = field(default_factory=list[str])
    """Damages that nobody noticed."""
    _bags: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    _stopped: list[tuple[float, psutil.Process]] = field(default_factory=list[tuple[float, psutil.Process]])
    _unrepaired: list[Damage] = field(default_factory=list[Damage])

    def inflict(self, run: Run) -> bool:
        """Do one of the faults that remain; whether it could be done, which needs a victim."""
        kinds = [kind for kind in ("kill", "stop", "damage") for _ in range(getattr(self, f"{kind}s"))]
        if not kinds:
            return False
        kind = self.rng.choice(kinds)
        victims = TARGETS if kind == "damage" else (*self.roles, TREE) if kind == "kill" else self.roles
        victims = SWAPPING if self.during_swaps else victims
        bag = self._bags.setdefault(kind, [])
        if not bag:
            bag += self.rng.sample(victims, len(victims))
        at, victim = run.committed, bag[-1]
        description = getattr(self, f"_{kind}")(run, victim)
        if description is None:
            return False
        bag.pop()
        setattr(self, f"{kind}s", getattr(self, f"{kind}s") - 1)
        self.done[f"{kind} {victim}"] += 1
        print(f"fault {self.done.total()} at step {at}: {description}", flush=True)
        return True

    def resume_stopped(self, *, everything: bool = False) -> None:
        """Let processes go on whose time to stand still is over."""
        now = time.monotonic()
        for end, process in list(self._stopped):
            if everything or now >= end:
                self._stopped.remove((end, process))
                with contextlib.suppress(psutil.Error):
                    process.resume()

    def repair_all(self) -> None:
        """Bring back the segments that the run could do without."""
        for each in self._unrepaired:
            each.repair()
        self._unrepaired.clear()

    def _kill(self, run: Run, victim: str) -> str | None:
        if victim == TREE:
            run.kill_tree()
            run.start()
            return "kill the whole tree"
        return f"kill {victim}" if self._signal(run, victim, signal.SIGKILL) else None

    def _stop(self, run: Run, victim: str) -> str | None:
        process = self._signal(run, victim, signal.SIGSTOP)
        if process is None:
            return None
        seconds = self.rng.uniform(*STOP_SECONDS)
        self._stopped.append((time.monotonic() + seconds, process))
        return f"stop {victim} for {seconds:.1f} s"

    def _signal(self, run: Run, role: str, number: signal.Signals) -> psutil.Process | None:
        processes = run.find(role)
        if not processes:
            return None
        process = self.rng.choice(processes)
        try:
            process.send_signal(number)
        except psutil.Error:
            return None
        return process

    def _damage(self, run: Run, target: str) -> str | None:
        self.resume_stopped(everything=True)
        run.kill_tree()
        inflicted = damage(run.path, target, self.rng)
        if inflicted is None:
            run.start()
            return None
        code, _ = run.audit() if target == SEGMENT else (0, "")
        committed = run.committed
        run.start()
        outcome = _wait_for_outcome(run, committed)
        if outcome is not None:
            inflicted.repair()
            run.start()
            return f"{inflicted}: refused as {outcome}"
        self._unrepaired.append(inflicted)
        if code:
            return f"{inflicted}: named by the audit, the run goes on"
        self.overlooked.append(str(inflicted))
        return f"{inflicted}: NOT NOTICED"


def _wait_for_outcome(run: Run, committed: int) -> str | None:
    """Wait until the run refuses to start; return the failure's name. None if it made a checkpoint instead."""
    end = time.monotonic() + REFUSAL_DEADLINE
    while run.is_alive():
        if run.committed > committed:
            return None
        if time.monotonic() > end:
            raise TimeoutError(f"neither a refusal nor a checkpoint in {REFUSAL_DEADLINE:g} s:\n{run.output()}")
        time.sleep(0.1)
    if run.process.returncode == 0:
        return None
    names = FAILURE.findall(run.output(since_start=True))
    if not names:
        raise RuntimeError(f"the run ended with {run.process.returncode} and without a name:\n{run.output()}")
    return names[-1]


def train(run: Run, faults: Faults) -> None:
    """Train to the end, with faults on the way."""
    end, last = time.monotonic() + DEADLINE, 0
    try:
        while run.is_alive():
            if time.monotonic() > end:
                raise TimeoutError(f"the run did not end within {DEADLINE:g} s:\n{run.output()}")
            time.sleep(0.05)
            faults.resume_stopped()
            if run.committed > last:
                if faults.during_swaps:
                    _wait_for_step(run)
                    time.sleep(faults.rng.uniform(0.0, SWAP_SECONDS))
                else:
                    time.sleep(faults.rng.uniform(0.0, 1.0))  # not always right behind a checkpoint
                if run.is_alive() and faults.inflict(run):
                    last = run.committed
        if run.process.returncode:
            raise RuntimeError(f"the run ended with {run.process.returncode}:\n{run.output()}")
    finally:
        faults.resume_stopped(everything=True)
        run.kill_tree()
    faults.repair_all()


def _wait_for_step(run: Run) -> None:
    """Wait until a step ends, whose weights are then handed over."""
    before, end = run.trained, time.monotonic() + REFUSAL_DEADLINE
    while run.is_alive() and run.trained <= before:
        if time.monotonic() > end:
            raise TimeoutError(f"no step in {REFUSAL_DEADLINE:g} s:\n{run.output()}")
        time.sleep(0.005)


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--kills", type=int, default=20, help="processes to kill")
    flags.add_argument("--stops", type=int, default=5, help="processes to stop for some seconds")
    flags.add_argument("--damages", type=int, default=6, help="files to damage")
    flags.add_argument("--swaps", action="store_true", help="kill only engine and trainer, while weights are swapped")
    flags.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of engine and trainer")
    flags.add_argument("--seed", type=int, default=0, help="seed of the choice of processes and files")
    flags.add_argument("--keep", type=Path, help="leave the runs in this folder")
    args = flags.parse_args()
    if args.swaps:
        args.stops = args.damages = 0
    placement = (ON_A_GPU if args.device == "cuda" else "") + (OVER_MEMORY if args.swaps else "")
    total = args.kills + args.stops + args.damages
    reason = "only engine and trainer are killed" if args.swaps else find_unsupported_reason()
    if reason is not None:
        print(f"no agents in sandboxes: {reason}")
    agents, roles = (AGENTS, tuple(ROLES)) if reason is None else ("", tuple(role for role in ROLES if role != SANDBOX))
    with _folder(args.keep) as home:
        seconds: dict[str, float] = {}
        runs: dict[str, Run] = {}
        disturbed = Faults(random.Random(args.seed), args.kills, args.stops, args.damages, args.swaps, roles)
        for name, faults in (("disturbed", disturbed), ("undisturbed", Faults(random.Random(args.seed)))):
            begun = time.monotonic()
            runs[name] = Run(home / name, 3 * total, placement, agents)
            train(runs[name], faults)
            seconds[name] = time.monotonic() - begun
        print(", ".join(f"{count} x {fault}" for fault, count in sorted(disturbed.done.items())))
        code, report = runs["disturbed"].audit()
        print(report.strip())
        reference, value = runs["undisturbed"].final_eval(), runs["disturbed"].final_eval()
        errors = runs["disturbed"].count_errors("agents")
        largest = {name: max(run.read_metric("mismatch_kl")) for name, run in runs.items()}
    rows = [
        Row("faults", disturbed.done.total(), None, "", total, at_least=True),
        Row("damages that nobody noticed", len(disturbed.overlooked), None, "", 0),
        Row("exit code of why --audit", code, None, "", 0),
        Row("rollouts that blame their agent", errors["AgentFailed"], None, "", 0),
        Row("final eval", value, reference, ""),
        Row("difference of the final evals", abs(value - reference), None, "", APART),
        Row(
            "largest mismatch KL of a step",
            largest["disturbed"],
            largest["undisturbed"],
            "",
            MISMATCH_FACTOR * largest["undisturbed"],
        ),
        Row("seconds", seconds["disturbed"], seconds["undisturbed"], "s"),
    ]
    return finish(
        "A run whose processes are killed and stopped and whose files are damaged, beside one undisturbed", rows, args
    )


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


if __name__ == "__main__":
    raise SystemExit(main())
