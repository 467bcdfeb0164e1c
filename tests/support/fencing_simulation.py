"""A run on several machines in simulated time, which uses the real tokens, leases and head log.

The machines have clocks of different rates. A gang of two trainer ranks loads the committed checkpoint, trains, writes
a checkpoint to shared storage, and asks the head to commit it. A schedule cuts machines off the network, pauses
processes and machines between any two actions, kills them, restarts the head, and starts a second head. Messages and
accesses to the storage that meet a cut are delayed until it is healed, so that they arrive late rather than never.

`Rules` leaves out one of the mechanisms at a time, to show that the checks notice.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ramify.core.errors import ProcessReplaced
from ramify.run.fencing.head_log import HeadLog, LogPosition
from ramify.run.fencing.lease import LeaseHolder, LeaseTerms, RoleLeases
from ramify.run.fencing.token import FencingToken, TokenGate, check_token

TERMS = LeaseTerms(duration=10.0, max_drift=0.01, slack=3.0)
KILL_DELAY = 2.0  # seconds in which a watcher kills a process tree; with the clocks' drift less than the slack
HORIZON = 240.0
NUM_RANKS = 2


@dataclass(frozen=True, slots=True)
class Rules:
    """Which mechanisms are in use; `lease` is "sent" (as it should be), "received" or "none"."""

    token: bool = True
    lease: str = "sent"
    new_head_waits: bool = True


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at `time` to a machine (0 to 3: workers, 4: the newest head), and for how long."""

    time: float
    kind: str  # cut, pause_machine, pause_process, kill_process, restart_head, new_head, lose_head
    machine: int
    duration: float


class CommitEntry(msgspec.Struct, frozen=True):
    """What a head commits: which trainer made which checkpoint, and from which one it continued."""

    step: int = 0
    trainer: int = -1
    directory: str = ""
    parent: str = ""
    head: int = 0

    @property
    def weights(self) -> str:
        """Which weights these are, whatever their directory is called."""
        return f"step {self.step} of trainer {self.trainer}"


@dataclass(slots=True)
class Machine:
    """A machine with its clock, and until when it is cut off or suspended."""

    name: str
    rate: float
    cut_until: float = 0.0
    paused_until: float = 0.0

    def clock(self, time: float) -> float:
        return 1000.0 + self.rate * time


@dataclass(eq=False, slots=True)
class Process:
    """A process on a machine; what it has scheduled happens later while it is paused, and never after its death."""

    machine: Machine
    paused_until: float = 0.0
    is_alive: bool = True

    def resumes_at(self) -> float:
        return max(self.paused_until, self.machine.paused_until)


@dataclass(slots=True)
class Storage:
    """Storage that every machine shares: names that are created once, and checkpoint directories."""

    names: dict[str, bytes] = field(default_factory=dict)
    directories: dict[str, list[int]] = field(default_factory=dict)  # who wrote them; empty while incomplete

    def create(self, name: str, data: bytes) -> bool:
        return self.names.setdefault(name, data) is data

    def read(self, name: str) -> bytes | None:
        return self.names.get(name)


class Simulation:
    """One schedule. `run` returns after HORIZON simulated seconds; then the check methods can be called."""

    def __init__(self, faults: list[Fault], rates: list[float], seed: int, rules: Rules) -> None:
        self.rules, self.random = rules, random.Random(seed)
        self.now, self._queue, self._order = 0.0, [], itertools.count()
        self.storage, self.storage_machine = Storage(), Machine("storage", 1.0)
        self.log = HeadLog(self.storage)
        self.workers = [Machine(f"worker{index}", rate) for index, rate in enumerate(rates[:4])]
        self.head_machines = [Machine(f"head{index}", rate) for index, rate in enumerate(rates[4:])]
        self.engine_gate, self.engine_updates = TokenGate("trainer"), []
        self.engine = Process(Machine("engine", 1.0))
        self.lifetimes: list[Lifetime] = []
        self.missing_checkpoints: list[str] = []
        self.heads: list[Head] = []
        self.start_head()
        for fault in faults:
            self.schedule(fault.time, None, lambda fault=fault: self.inject(fault))

    def run(self) -> None:
        while self._queue and self._queue[0][0] <= HORIZON:
            self.now, _, process, action = heapq.heappop(self._queue)
            if process is None:
                action()
            elif process.is_alive and process.resumes_at() > self.now:
                self.schedule(process.resumes_at(), process, action)
            elif process.is_alive:
                action()
        self.now = HORIZON
        for lifetime in self.lifetimes:
            lifetime.end(HORIZON)

    def schedule(self, time: float, process: Process | None, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), process, action))

    def after(self, process: Process, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` when `seconds` have passed on the process's clock."""
        self.schedule(self.now + seconds / process.machine.rate, process, action)

    def send(self, source: Machine, target: Process, action: Callable[[], None]) -> None:
        """Deliver a message after a delay, which is seldom long, and after both machines are reachable."""
        delay = self.random.uniform(0.0, 0.2) if self.random.random() < 0.85 else self.random.uniform(0.2, 9.5)
        arrives_at = max(self.now + delay, source.cut_until, target.machine.cut_until)
        self.schedule(arrives_at, target, action)

    def access_storage(self, process: Process, action: Callable[[], None]) -> None:
        """Do something on the shared storage, which happens later if the machine is cut off, even after its death."""
        self.schedule(max(self.now + self.random.uniform(0.0, 1.0), process.machine.cut_until), None, action)

    def start_head(self) -> None:
        machine = self.head_machines[len(self.heads) % len(self.head_machines)]
        self.heads.append(Head(self, machine))

    def inject(self, fault: Fault) -> None:
        machines, until = [*self.workers, self.heads[-1].process.machine], self.now + fault.duration
        machine = machines[fault.machine]
        running = [lifetime for lifetime in self.lifetimes if lifetime.is_open and lifetime.process.machine is machine]
        if fault.kind == "cut":
            machine.cut_until = until
        elif fault.kind == "pause_machine":
            machine.paused_until = until
            for lifetime in running:
                lifetime.pauses.append((self.now, until))
        elif fault.kind == "pause_process":
            for lifetime in running:
                lifetime.process.paused_until = until
        elif fault.kind == "kill_process":
            for lifetime in running:
                lifetime.watcher.kill()
        elif fault.kind == "restart_head":
            self.heads[-1].restart()
        elif fault.kind in ("new_head", "lose_head") and len(self.heads) < 4:
            if fault.kind == "lose_head":
                self.heads[-1].lose()
            self.start_head()

    # -- checks --------------------------------------------------------------------------------------------------

    def check_history(self) -> int:
        """Raise AssertionError unless the committed history is one line of descent; return its length."""
        last = CommitEntry()
        entries = [msgspec.json.decode(data, type=CommitEntry) for _, data in self.log.iter_entries()]
        for entry in entries:
            assert entry.parent == last.weights, f"{entry} does not continue {last}"
            assert entry.trainer >= last.trainer, f"{entry} was counted after {last}"
            assert entry.step > last.step
            writers = self.storage.directories.get(entry.directory, [entry.trainer])  # it may be removed by now
            assert writers == [entry.trainer], f"{entry} was written by {writers}"
            last = entry
        assert not entries or self.storage.directories.get(last.directory), f"the checkpoint of {last} was removed"
        assert not self.missing_checkpoints, "a committed checkpoint was removed before its trainer loaded it"
        assert self.engine_updates == sorted(self.engine_updates), "an engine went back to an older trainer"
        return len(entries)

    def measure_overlap(self) -> float:
        """Return the longest time during which two copies of the trainer ran, of one head or after a head was lost."""
        overlaps = [0.0]
        for pair in itertools.combinations(self.lifetimes, 2):
            first, second = sorted(pair, key=lambda lifetime: lifetime.token)
            has_one_head = first.token.term == second.token.term or self.heads[first.token.term].is_lost
            if first.token != second.token and has_one_head:
                overlaps.append(first.measure_overlap(second))
        return max(overlaps)


class Head:
    """The head of a run: starts the trainer, grants its leases, and commits its checkpoints to ledger and head log."""

    def __init__(self, simulation: Simulation, machine: Machine) -> None:
        self.simulation, self.process = simulation, Process(machine)
        self.token, base = simulation.log.claim_term()
        entries = dict(simulation.log.iter_entries())
        self.committed = msgspec.json.decode(entries[base], type=CommitEntry) if base else CommitEntry()
        self.num_entries, self.pending_append = 0, None
        self.is_replaced = self.is_lost = False
        self.leases = RoleLeases("trainer", self.token, TERMS, num_ranks=NUM_RANKS, now=self.clock())
        if not self.token.term or not simulation.rules.new_head_waits:
            self.start_trainer()  # a later head takes the leases of the old one as just granted, and waits
        self.poll()

    def clock(self) -> float:
        return self.process.machine.clock(self.simulation.now)

    def restart(self) -> None:
        """The head's process is restarted: what it has not written to the ledger is forgotten."""
        self.process.is_alive = False
        self.process = Process(self.process.machine)
        self.leases = RoleLeases("trainer", self.leases.token, TERMS, num_ranks=NUM_RANKS, now=self.clock())
        if self.pending_append is not None:
            self.append(*self.pending_append)
        self.poll()

    def lose(self) -> None:
        """The head's machine is lost for good."""
        self.process.is_alive, self.is_lost = False, True

    def poll(self) -> None:
        if self.is_replaced:
            return
        self.leases.end_if_lapsed(self.clock())
        if self.leases.is_ending and self.clock() >= self.leases.replaceable_at:
            self.leases.replace(self.clock())
            self.start_trainer()
        self.simulation.after(self.process, 1.0, self.poll)

    def start_trainer(self) -> None:
        simulation, token = self.simulation, self.leases.token
        for rank, machine in enumerate(simulation.random.sample(simulation.workers, NUM_RANKS)):
            watcher = ProcessWatcher(simulation, self, machine, token, rank)
            simulation.send(self.process.machine, watcher.process, watcher.renew)

    def handle_renewal(self, watcher: "ProcessWatcher", number: int) -> None:
        try:
            self.leases.grant(watcher.token, watcher.rank, self.clock())
        except ProcessReplaced:
            self.simulation.send(self.process.machine, watcher.process, watcher.kill)
        else:
            reply = lambda: watcher.handle_grant(number)  # noqa: E731
            self.simulation.send(self.process.machine, watcher.process, reply)

    def handle_exit(self, watcher: "ProcessWatcher") -> None:
        self.leases.record_exit(watcher.token, watcher.rank)

    def handle_hello(self, trainer: "Trainer") -> None:
        if self.is_allowed(trainer):
            committed = self.committed
            self.simulation.send(self.process.machine, trainer.process, lambda: trainer.load(committed))

    def handle_published(self, trainer: "Trainer", step: int) -> None:
        if self.is_allowed(trainer):
            action = lambda: self.update_engine(trainer.token, step)  # noqa: E731
            self.simulation.send(self.process.machine, self.simulation.engine, action)

    def update_engine(self, token: FencingToken, step: int) -> None:
        simulation = self.simulation
        if simulation.rules.token:
            try:
                simulation.engine_gate.check(token)
            except ProcessReplaced:
                return
        simulation.engine_updates.append(token.number)

    def handle_commit(self, trainer: "Trainer", step: int, directory: str) -> None:
        """Commit in the ledger, in one transaction with the check of the token; then in the head log."""
        if not self.is_allowed(trainer) or self.pending_append is not None:
            return
        if step == self.committed.step:  # the reply to the first request was lost
            committed = self.committed
            self.simulation.send(self.process.machine, trainer.process, lambda: trainer.handle_committed(committed))
        elif step > self.committed.step:
            entry = CommitEntry(step, trainer.token.number, directory, trainer.parent, self.token.term)
            self.committed = entry
            self.pending_append = (LogPosition(self.token.term, self.num_entries), entry, trainer)
            self.num_entries += 1
            self.append(*self.pending_append)

    def append(self, position: LogPosition, entry: CommitEntry, trainer: "Trainer") -> None:
        def act() -> None:
            try:
                self.simulation.log.append(position, msgspec.json.encode(entry))
            except ProcessReplaced:
                self.is_replaced = True
                return
            if self.pending_append is not None and self.pending_append[0] == position:
                self.pending_append = None
                acknowledge = lambda: trainer.handle_committed(entry)  # noqa: E731
                self.simulation.send(self.process.machine, trainer.process, acknowledge)

        self.simulation.access_storage(self.process, act)

    def is_allowed(self, trainer: "Trainer") -> bool:
        if self.simulation.rules.token:
            try:
                check_token("trainer", trainer.token, self.leases.token)
            except ProcessReplaced:
                return False
        return not self.is_replaced


class ProcessWatcher:
    """The watcher of one rank on its machine. It starts the rank after the first grant, and kills it at the end."""

    def __init__(self, simulation: Simulation, head: Head, machine: Machine, token: FencingToken, rank: int) -> None:
        self.simulation, self.head, self.token, self.rank = simulation, head, token, rank
        self.process = Process(machine)
        self.lease = LeaseHolder(TERMS)
        self.lifetime: Lifetime | None = None
        self.is_done = False

    def clock(self) -> float:
        return self.process.machine.clock(self.simulation.now)

    def renew(self) -> None:
        if not self.is_done:
            number = self.lease.send_renewal(self.clock())
            head = self.head
            self.simulation.send(self.process.machine, head.process, lambda: head.handle_renewal(self, number))
            self.simulation.after(self.process, TERMS.duration / 4, self.renew)

    def handle_grant(self, number: int) -> None:
        self.lease.record_grant(number)
        if self.simulation.rules.lease == "received":
            self.lease.expires_at = self.clock() + TERMS.duration
        if self.lifetime is None and not self.is_done and not self.lease.is_expired(self.clock()):
            self.lifetime = Lifetime(self.token, Process(self.process.machine), self, self.simulation.now)
            self.simulation.lifetimes.append(self.lifetime)
            if self.rank == 0:
                Trainer(self.simulation, self.head, self.lifetime.process, self.token)
            if self.simulation.rules.lease != "none":
                self.check_lease()

    def check_lease(self) -> None:
        if self.is_done or self.lease.expires_at is None:
            return
        if self.lease.is_expired(self.clock()):
            self.kill()
        else:
            self.simulation.after(self.process, self.lease.expires_at - self.clock(), self.check_lease)

    def kill(self) -> None:
        """Kill the process tree, which takes a while, and report its end."""
        if not self.is_done:
            self.is_done = True
            self.simulation.after(self.process, self.simulation.random.uniform(0.0, KILL_DELAY), self.report_exit)

    def report_exit(self) -> None:
        if self.lifetime is not None:
            self.lifetime.end(self.simulation.now)
        head = self.head
        self.simulation.send(self.process.machine, head.process, lambda: head.handle_exit(self))


@dataclass(slots=True)
class Lifetime:
    """When a rank ran, and when its machine was suspended."""

    token: FencingToken
    process: Process
    watcher: ProcessWatcher
    started_at: float
    ended_at: float = float("inf")
    pauses: list[tuple[float, float]] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.ended_at == float("inf")

    def end(self, now: float) -> None:
        self.process.is_alive = False
        self.ended_at = min(self.ended_at, now)

    def measure_overlap(self, other: "Lifetime") -> float:
        """Return how long both ran, without the time in which the machine of one was suspended."""
        start, stop = max(self.started_at, other.started_at), min(self.ended_at, other.ended_at)
        paused = sum(max(0.0, min(stop, end) - max(start, begin)) for begin, end in self.pauses + other.pauses)
        return max(0.0, stop - start - paused)


class Trainer:
    """The first rank of a trainer: loads, trains, writes a checkpoint, commits it, removes those before it."""

    def __init__(self, simulation: Simulation, head: Head, process: Process, token: FencingToken) -> None:
        self.simulation, self.head, self.process, self.token = simulation, head, process, token
        self.step, self.parent = 0, ""
        self.hello()

    def hello(self) -> None:
        head = self.head
        self.simulation.send(self.process.machine, head.process, lambda: head.handle_hello(self))
        self.simulation.after(self.process, 5.0, lambda: self.step or self.hello())

    def load(self, committed: CommitEntry) -> None:
        if self.step:
            return  # the reply to a repeated request
        if committed.directory and not self.simulation.storage.directories.get(committed.directory):
            if self.token == self.simulation.heads[-1].leases.token:
                self.simulation.missing_checkpoints.append(f"{self.token}: {committed.directory}")
            return  # a newer trainer removed it
        self.step, self.parent = committed.step + 1, committed.weights
        self.remove([name for name in self.list_removable() if parse_step(name) > committed.step])
        self.train()

    def train(self) -> None:
        self.simulation.after(self.process, self.simulation.random.uniform(1.0, 4.0), self.save)

    def save(self) -> None:
        head, step = self.head, self.step
        self.simulation.send(self.process.machine, head.process, lambda: head.handle_published(self, step))
        directories, number = self.simulation.storage.directories, self.token.number
        name = f"{step}@{number}" if self.simulation.rules.token else f"{step}"

        def write() -> None:
            if not directories.get(name):  # a complete one is taken for its own, as without tokens
                directories[name] = [number]

        self.simulation.access_storage(self.process, write)
        self.simulation.after(self.process, 1.5, lambda: self.commit(name))

    def commit(self, name: str) -> None:
        head, step = self.head, self.step
        if step == parse_step(name):
            if self.simulation.storage.directories.get(name):  # otherwise it is still being written
                self.simulation.send(self.process.machine, head.process, lambda: head.handle_commit(self, step, name))
            self.simulation.after(self.process, 5.0, lambda: self.commit(name))

    def handle_committed(self, entry: CommitEntry) -> None:
        if entry.step == self.step:
            removable = [name for name in self.list_removable() if parse_step(name) < entry.step]
            self.step, self.parent = entry.step + 1, CommitEntry(entry.step, self.token.number).weights
            self.simulation.after(self.process, 0.5, lambda: self.remove(removable))
            self.train()

    def list_removable(self) -> list[str]:
        """List the checkpoints of this trainer and of earlier ones: a newer trainer's are never removed."""
        names = list(self.simulation.storage.directories)
        if not self.simulation.rules.token:
            return names
        return [name for name in names if int(name.partition("@")[2]) <= self.token.number]

    def remove(self, names: list[str]) -> None:
        for name in names:
            action = lambda name=name: self.simulation.storage.directories.pop(name, None)  # noqa: E731
            self.simulation.access_storage(self.process, action)


def parse_step(name: str) -> int:
    """Return the step of a checkpoint directory."""
    return int(name.partition("@")[0])
