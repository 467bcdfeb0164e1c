"""`python -m tests.cluster.faults`: the quickstart on three hosts, with 20 faults while it trains.

    make test-cluster-faults RAY_PYTHON=...                                  all of them, in 40 minutes on two cores
    make test-cluster-faults RAY_PYTHON=... FAULTS=kill:host2,cut:host3:5    these

    kill:HOST          every process of the host is killed with -9, and the host boots again
    cut:HOST:SECONDS   the host is off the network for SECONDS seconds
    lose:killed:HOST   the head is killed, and the command is repeated on HOST
    lose:cut:HOST      the head is cut off, and the command is repeated on HOST while the old head still runs

Ray is started again on a host that was killed, or that Ray declared dead; on all hosts if it was the head. After each
fault the run has to train and commit again within a deadline. At the end the run is finished, and the program checks
that no two copies of a process counted: by its own reading of the ledger and of the logs, and by `ramify why --audit`.
It prints a table, and exits with 1 if there is a problem.
"""

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.cluster_run import ClusterRun
from tests.cluster.fault_report import FaultReport, format_table
from tests.cluster.hosts import Host, Hosts
from tests.cluster.ledger_check import check_run
from tests.cluster.process_monitor import ProcessMonitor, compute_overlaps, read_clock
from tests.cluster.ray_cluster import RayCluster
from tests.cluster.run_events import RunEvents

CUTS = [f"cut:{host}:{seconds}" for seconds in (5, 30, 120) for host in ("host2", "host3")]
WORKER_FAULTS = ["kill:host2", "kill:host3", *CUTS]
ALL_FAULTS = [*WORKER_FAULTS, "lose:killed:host2", "lose:cut:host1", "kill:host1", *WORKER_FAULTS, "kill:host1"]
NUM_CPUS = 6  # of each host: two must do when the head is cut off
LEASE = 10.0  # seconds; engines have twice as much
RECOVERY_TIMEOUT = 420.0  # seconds after the end of a fault until the run has trained and committed again
RAY_EXIT_TIMEOUT = 20.0  # seconds in which Ray ends on a node that it declared dead, after it is reachable again
RAY_LOOK_INTERVAL = 3.0  # seconds between two looks at whether Ray still runs
RAY_DEAD_AFTER = 9.0  # seconds off the network after which Ray declares a node dead
DELAYED_LINES = 2.0  # seconds after a fault in which lines from before it may still arrive
POLL_INTERVAL = 0.1  # seconds
SETTINGS = {
    "max_steps": 1000,  # more than are trained during the faults
    "checkpoint.interval": 3,
    "orchestrator.batch_size": 64,
    "eval.0.interval": 20,
    "cluster.lease_duration": LEASE,
    "launch.max_restarts": 100,
}
LAST_STEPS = 3  # trained after the last fault, to finish the run


class FaultInjector:
    """Injects faults into a run, one after another."""

    def __init__(self, hosts: Hosts, monitor: ProcessMonitor, events: RunEvents) -> None:
        self.hosts = {hosts[number].name: hosts[number] for number in range(len(hosts))}
        self.cluster, self.monitor, self.events = RayCluster(hosts, num_cpus=NUM_CPUS), monitor, events
        self.run = ClusterRun(self.cluster, "faults", **SETTINGS)
        self.reports: list[FaultReport] = []
        self.nodes = list(self.hosts.values())  # of the Ray cluster, its head first
        self._next_look_at = 0.0

    def start(self) -> None:
        """Start Ray and the run, and wait until it has committed."""
        self.cluster.start()
        self.run.start()
        self.events.follow(self.run.path)
        self._wait_for_commit(read_clock())

    def inject(self, fault: str) -> None:
        """Inject a fault, and wait until the run has committed again."""
        kind, *arguments = fault.split(":")
        hit = self.run.head.name if kind == "lose" else arguments[0]
        started_at = read_clock()
        report = FaultReport(fault, self.monitor.list_live(hit), started_at)
        print(f"{time.strftime('%T')} {fault} hits {', '.join(report.roles) or 'nothing'}", flush=True)
        {"kill": self._kill, "cut": self._cut, "lose": self._lose_head}[kind](report, *arguments)
        self._wait_for_commit(started_at + DELAYED_LINES)
        report.record_events(self.events, started_at + DELAYED_LINES)
        report.record_overlaps(compute_overlaps(self.monitor.copies, now=read_clock()))
        self.reports.append(report)
        print(f"{time.strftime('%T')} {report}", flush=True)

    def finish(self) -> list[str]:
        """Finish the run a few steps later, and return all problems of its ledger and logs."""
        self.run.stop()
        self.events.poll()
        last_version = self.events.commits[-1][1]
        self.run.start(max_steps=last_version + LAST_STEPS)
        self.run.finish()
        print("mean rewards of the evals:", *(f"{mean:.3f}" for mean in self.run.read_eval_means()))
        runs = list(self.cluster.hosts.directory.glob(f"disk-of-*/{self.run.name}*/"))  # of all heads
        return check_run(self.run.path, self.run.shared / self.run.name, runs)

    # -- faults ----------------------------------------------------------------------------------------------------

    def _kill(self, report: FaultReport, name: str) -> None:
        host = self.hosts[name]
        host.kill()
        host.start()
        if host is self.run.head:
            self.run.process.wait(60)
            self._repeat_command(report, host, [other for other in self.hosts.values() if other is not host])
        else:
            self.cluster.start_node(host)

    def _cut(self, _: FaultReport, name: str, seconds: str) -> None:
        host = self.hosts[name]
        host.cut()
        time.sleep(float(seconds))
        host.heal()
        if float(seconds) > RAY_DEAD_AFTER:
            self._wait_until(lambda: not self.cluster.is_running(host), RAY_EXIT_TIMEOUT)
            self._restart_ray(host)

    def _lose_head(self, report: FaultReport, how: str, name: str) -> None:
        new_head, old_head = self.hosts[name], self.run.head
        others = [host for host in self.hosts.values() if host not in (new_head, old_head)]
        old_process, old_output = self.run.process, self.run.output
        if how == "killed":
            old_head.kill()
            old_head.start()
            old_process.wait(60)
            self._repeat_command(report, new_head, [*others, old_head])
            return
        old_head.cut()
        self._repeat_command(report, new_head, [new_head, *others])
        self._wait_for_commit(read_clock())
        old_head.heal()
        assert self._wait_until(lambda: old_process.poll() is not None, RECOVERY_TIMEOUT), "the old head still runs"
        assert "ProcessReplaced" in old_output.read_text(), "the old head ended for another reason"
        self._restart_ray(old_head)
        self.nodes.append(old_head)

    def _repeat_command(self, report: FaultReport, head: Host, trainer_hosts: Sequence[Host]) -> None:
        """Start Ray anew on the hosts that can be reached, with this head, and repeat the command there."""
        self.nodes = list(dict.fromkeys([head, *trainer_hosts]))
        for host in self.nodes:
            self.cluster.stop_node(host)
        self.cluster.start_nodes(self.nodes)
        self.run.place(head, trainer_hosts, len(self.nodes))
        report.repeated = read_clock() - report.started_at
        self.run.start()
        self.events.follow(self.run.path)

    def _restart_ray(self, host: Host) -> None:
        self.cluster.stop_node(host)
        self.cluster.start_node(host)

    # -- waits -----------------------------------------------------------------------------------------------------

    def _wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Wait until the condition holds; return whether it does within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not (holds := condition()) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        return holds

    def _keep_ray_running(self) -> None:
        """Start Ray again where it has ended: its head may declare a node dead again that has just come back."""
        if time.monotonic() >= self._next_look_at:
            for host in self.nodes[1:]:
                if not self.cluster.is_running(host):
                    print(f"{time.strftime('%T')} Ray has ended on {host.name} and is started again", flush=True)
                    self._restart_ray(host)
            self._next_look_at = time.monotonic() + RAY_LOOK_INTERVAL

    def _wait_for_commit(self, after: float) -> None:
        """Wait until a step was trained after this time, then a version committed, and all processes are ready.

        Another step has then been trained, so that the next fault finds one that is not committed.
        """

        def has_committed() -> bool:
            self._keep_ray_running()
            assert self.run.process.poll() is None, f"the run has ended:\n{self.run.output.read_text()[-3000:]}"
            step_at = self.events.find_step(after)
            commit_at = None if step_at is None else self.events.find_commit(step_at)
            return commit_at is not None and self.events.find_step(commit_at) is not None and self._are_ready()

        is_committed = self._wait_until(has_committed, RECOVERY_TIMEOUT)
        assert is_committed, f"no commit within {RECOVERY_TIMEOUT:g} s:\n{self.run.output.read_text()[-3000:]}"

    def _are_ready(self) -> bool:
        processes = self.run.read_record().get("processes", {})
        return bool(processes) and all(process["state"] == "ready" for process in processes.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=",".join(ALL_FAULTS), help="comma-separated, in this order")
    parser.add_argument("--keep", type=Path, help="folder that gets a copy of the run directories and the shared one")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are removed
    problems: list[str] = []
    with Hosts(3) as hosts, ProcessMonitor(hosts) as monitor, RunEvents() as events:
        injector = FaultInjector(hosts, monitor, events)
        try:
            injector.start()
            for fault in args.faults.split(","):
                injector.inject(fault)
            problems += injector.finish()
        except AssertionError as error:
            problems.append(str(error))
        finally:
            print(format_table(injector.reports), flush=True)
            if args.keep is not None:
                for path in [*hosts.directory.glob("disk-of-*"), injector.run.shared]:
                    shutil.copytree(path, args.keep / path.name, symlinks=True, dirs_exist_ok=True)
    problems += [problem for report in injector.reports for problem in report.list_problems()]
    for problem in problems:
        print(problem)
    print(f"{len(injector.reports)} faults, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
