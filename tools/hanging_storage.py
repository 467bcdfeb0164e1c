"""What each role does when its storage hangs: a table of calls and outcomes, on a file system that really hangs.

Each row is a process. It prepares its files on a file system of its own (`stoppable_storage`), whose server is then
stopped, and makes one call. `run` is the run's own directory, `shared` the directory that all nodes reach. With
`--scale 30` the limits are 30 times shorter than in a run. Root and /dev/fuse are needed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.stoppable_storage import StoppableStorage

if TYPE_CHECKING:
    from ramify.launch.supervised_process import ProcessSpec
    from ramify.orchestrate.run_config import RunConfig
    from ramify.run.store.head_replication import HeadReplicator
    from ramify.train.distributed import Ranks
    from ramify.train.trainer import Trainer

Steps = Generator[None]  # yields when all is prepared; what follows is the call on storage that hangs
PF_EXITING = 4  # flag of the kernel for a task that is ending
MAX_WAIT = 60.0  # seconds after which a call that has not ended hangs for good
TINY = Path(__file__).parent.parent / "src/ramify/model/bundled/tiny"
TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}


class Probe(NamedTuple):
    """One row of the table."""

    role: str
    call: str
    storage: str
    steps: Callable[[Path, Path], Steps]
    """Called with a directory on the storage that hangs, and with a local one."""


def _prepare_new_head(hanging: Path, local: Path) -> Steps:
    from ramify.launch.head import prepare_head

    config = _build_config(local, hanging)
    yield
    prepare_head(config)


def _check_for_newer_head(hanging: Path, local: Path) -> Steps:
    from ramify.launch.head import check_newest_head, prepare_head

    config = _build_config(local, hanging)
    prepare_head(config)
    yield
    check_newest_head(config.path)


def _prepare_run(hanging: Path, local: Path) -> Steps:
    from ramify.launch.run_directory import prepare_run_directory

    config = _build_config(hanging, None)
    prepare_run_directory(config)
    yield
    prepare_run_directory(config)


def _build_launcher() -> Any:
    """Return a launcher whose nodes may be lost, so that leases are recorded."""
    from ramify.launch.local_launcher import LocalLauncher

    class LauncherOfLosableNodes(LocalLauncher):
        can_lose_nodes = True

    return LauncherOfLosableNodes()


def _record_leases(hanging: Path, local: Path) -> Steps:
    from ramify.launch.execution import hold_leases
    from ramify.launch.head import prepare_head

    config = _build_config(local, hanging)
    prepare_head(config)
    yield
    with hold_leases(config.path, config.shared_path, 0, [_build_leased_spec(local)], _build_launcher()):
        pass


def _remove_leases(hanging: Path, local: Path) -> Steps:
    from ramify.launch.execution import hold_leases
    from ramify.launch.head import prepare_head
    from ramify.run.state import ProcessState, ProcessStatus, SupervisorState

    config = _build_config(local, hanging)
    prepare_head(config)
    with hold_leases(config.path, config.shared_path, 0, [_build_leased_spec(local)], _build_launcher()):
        ended = ProcessStatus("engine", ProcessState.ENDED, 1, 0, 0.0, token="0.0")
        SupervisorState.begin(config.path, "").with_processes([ended]).write(config.path)
        yield


def _record_start(hanging: Path, local: Path) -> Steps:
    yield
    _supervise(hanging, local, "import time; time.sleep(0.1)")


def _record_end_of_a_process(hanging: Path, local: Path) -> Steps:
    marker = local / "stopped"
    code = f"import os, time\nprint('ready', flush=True)\nwhile not os.path.exists({str(marker)!r}): time.sleep(0.05)"
    thread = ThreadPoolExecutor(1)
    future = thread.submit(_supervise, hanging, local, code)
    while not (hanging / "supervisor.json").exists():
        time.sleep(0.05)
    yield
    marker.touch()
    future.result()


def _record_failure(hanging: Path, local: Path) -> Steps:
    from ramify.launch import execution
    from ramify.run.store import RunStore

    RunStore.open(hanging / "run").close()
    yield
    execution._record_end(hanging / "run", "failed", name="ProcessDied", message="a test")


def _remove_served_weights(hanging: Path, local: Path) -> Steps:
    from ramify.launch.published_weights import hold_weights_directory

    config = _build_config(local, hanging)
    config.weights_directory.mkdir(parents=True)
    with hold_weights_directory(config):
        yield


def _save_last_weights(hanging: Path, local: Path) -> Steps:
    from ramify.launch.published_weights import save_final_weights

    config = _build_config(local, hanging, weights={"transport": "shm"})
    _publish(config.weights_directory)
    (hanging / "run").mkdir()
    yield
    save_final_weights(config)


def _mark_run_finished(hanging: Path, local: Path) -> Steps:
    from ramify.launch.run_directory import mark_finished, prepare_run_directory

    config = _build_config(hanging, None)
    prepare_run_directory(config)
    yield
    mark_finished(config)


def _replicate_end(hanging: Path, local: Path) -> Steps:
    from ramify.launch.head import prepare_head
    from ramify.launch.run_directory import mark_finished
    from ramify.run.store import open_run

    config = _build_config(local, hanging)
    prepare_head(config)
    open_run(config.path, config.identity).close()
    yield
    mark_finished(config)


def _measure_disk(hanging: Path, local: Path) -> Steps:
    from ramify.launch.machine import describe_machine
    from ramify.launch.memory import estimate_disk

    config, machine = _build_config(local, hanging), describe_machine()
    yield
    estimate_disk(config, [machine])


def _commit_to_ledger(hanging: Path, local: Path) -> Steps:
    from ramify.run.store import RunStore

    async def commit(store: RunStore) -> None:
        await asyncio.wrap_future(store.submit_change(lambda connection: None))

    store = RunStore.open(hanging / "run")
    yield
    asyncio.run(commit(store))


def _store_fact(hanging: Path, local: Path) -> Steps:
    from ramify.run.store import RunStore

    store = RunStore.open(hanging / "run")
    yield
    store.set_fact("key", 1)


def _close_store(hanging: Path, local: Path) -> Steps:
    from ramify.run.store import RunStore

    store = RunStore.open(hanging / "run")
    yield
    store.close()


def _open_store(hanging: Path, local: Path) -> Steps:
    from ramify.run.store import RunStore

    RunStore.open(hanging / "run").close()
    yield
    RunStore.open(hanging / "run")


def _read_addresses(hanging: Path, local: Path) -> Steps:
    from ramify.orchestrate.address_book import AddressBook

    async def read() -> None:
        await AddressBook(hanging).start()

    yield
    asyncio.run(read())


def _poll_addresses(hanging: Path, local: Path) -> Steps:
    from ramify.orchestrate.address_book import AddressBook

    with asyncio.Runner() as runner:
        book = runner.run(AddressBook(hanging).start())
        yield
        runner.run(book.wait_failed())


def _open_replicator(hanging: Path, local: Path) -> HeadReplicator:
    from ramify.launch.head import prepare_head
    from ramify.run.fencing.head_log import DirectoryStore
    from ramify.run.store import open_run
    from ramify.run.store.head_replication import HeadReplicator

    config = _build_config(local, hanging)
    prepare_head(config)
    store = open_run(config.path, config.identity)
    assert config.shared_path is not None
    return HeadReplicator(store, DirectoryStore(config.shared_path))


def _replicate_commit(hanging: Path, local: Path) -> Steps:
    replicator = _open_replicator(hanging, local)
    yield
    asyncio.run(replicator.replicate())


def _watch_for_newer_head(hanging: Path, local: Path) -> Steps:
    replicator = _open_replicator(hanging, local)
    yield
    asyncio.run(replicator.watch_for_newer_head())


def _save_checkpoint(hanging: Path, local: Path) -> Steps:
    from ramify.train.checkpoint import CheckpointManager

    manager = CheckpointManager(hanging / "checkpoints", _get_ranks())
    trainer = _build_trainer()
    yield
    manager.save(trainer, 1)


def _load_checkpoint(hanging: Path, local: Path) -> Steps:
    from ramify.train.checkpoint import CheckpointManager

    manager = CheckpointManager(hanging / "checkpoints", _get_ranks())
    trainer = _build_trainer()
    manager.save(trainer, 1)
    yield
    manager.load(trainer, 1)


def _publish_version(hanging: Path, local: Path) -> Steps:
    import torch

    from ramify.train.publisher import WeightPublisher

    trainer = _build_trainer()
    publisher = WeightPublisher(hanging, _get_ranks(), policy="p", base_model=TINY, dtype=torch.float32)
    yield
    publisher.publish(trainer, 0, 1)


def _upload_version(hanging: Path, local: Path) -> Steps:
    from ramify.model.remote_weights import upload_weights

    weights, target = _publish(local), hanging / "uploaded"
    target.mkdir()
    upload_weights(weights, f"file://{target}")
    yield
    upload_weights(weights, f"file://{target}")


def _verify_version(hanging: Path, local: Path) -> Steps:
    from ramify.model.weights_manifest import verify_weights

    weights = _publish(hanging)
    yield
    verify_weights(weights)


def _fetch_version(hanging: Path, local: Path) -> Steps:
    from ramify.model.remote_weights import fetch_weights, upload_weights

    weights, target = _publish(local), hanging / "uploaded"
    target.mkdir()
    upload_weights(weights, f"file://{target}")
    yield
    fetch_weights(weights.name, f"file://{target}")


def _run_command(*arguments: str) -> Callable[[Path, Path], Steps]:
    """Return the steps of a command on a finished run; `RUN` stands for its directory."""

    def steps(hanging: Path, local: Path) -> Steps:
        from ramify.cli import main

        config = _build_config(hanging, None)
        _finish_run(config.path)
        yield
        code = main([argument.replace("RUN", str(config.path)) for argument in arguments])
        sys.stdout.flush()
        os._exit(code)

    return steps


PROBES = [
    Probe("supervisor", "prepare the head", "shared", _prepare_new_head),
    Probe("supervisor", "look for a newer head", "shared", _check_for_newer_head),
    Probe("supervisor", "prepare the run directory", "run", _prepare_run),
    Probe("supervisor", "record leases", "shared", _record_leases),
    Probe("supervisor", "remove leases at the end", "shared", _remove_leases),
    Probe("supervisor", "record the start of a process", "run", _record_start),
    Probe("supervisor", "record the end of a process", "run", _record_end_of_a_process),
    Probe("supervisor", "record the failure of the run", "run", _record_failure),
    Probe("supervisor", "remove served weights at the end", "shared", _remove_served_weights),
    Probe("supervisor", "save the last weights", "shared", _save_last_weights),
    Probe("supervisor", "mark the run finished", "run", _mark_run_finished),
    Probe("supervisor", "replicate the end", "shared", _replicate_end),
    Probe("supervisor", "estimate disk space", "shared", _measure_disk),
    Probe("orchestrator", "open the store", "run", _open_store),
    Probe("orchestrator", "commit to the ledger", "run", _commit_to_ledger),
    Probe("orchestrator", "store a fact", "run", _store_fact),
    Probe("orchestrator", "close the store", "run", _close_store),
    Probe("orchestrator", "read the address book at the start", "run", _read_addresses),
    Probe("orchestrator", "poll the address book", "run", _poll_addresses),
    Probe("orchestrator", "replicate a commit", "shared", _replicate_commit),
    Probe("orchestrator", "watch for a newer head", "shared", _watch_for_newer_head),
    Probe("trainer", "save a checkpoint", "shared", _save_checkpoint),
    Probe("trainer", "load a checkpoint", "shared", _load_checkpoint),
    Probe("trainer", "publish weights", "shared", _publish_version),
    Probe("trainer", "upload weights", "shared", _upload_version),
    Probe("engine", "verify weights", "shared", _verify_version),
    Probe("engine", "fetch weights", "shared", _fetch_version),
    Probe("command", "rollback", "run", _run_command("rollback", "RUN", "1")),
    Probe("command", "why", "run", _run_command("why", "RUN")),
    Probe("command", "metrics", "run", _run_command("metrics", "RUN")),
]


def _build_config(output: Path, shared: Path | None, **more: Any) -> RunConfig:
    from ramify.orchestrate.run_config import RunConfig

    cluster = {} if shared is None else {"shared_directory": shared}
    return RunConfig.model_validate({"name": "run", "output": output, "train": [TRAIN], "cluster": cluster, **more})


def _build_leased_spec(local: Path) -> ProcessSpec:
    from ramify.launch.launcher import PlacementRequest
    from ramify.launch.supervised_process import ProcessSpec
    from ramify.run.fencing.lease import LeaseTerms

    return ProcessSpec("engine", ("true",), local / "engine.log", placement=PlacementRequest(lease=LeaseTerms(60.0)))


def _supervise(run: Path, local: Path, code: str) -> None:
    """Supervise a leader whose log is local, while its status is recorded in `run`."""
    from ramify.launch.supervised_process import ProcessRole, ProcessSpec
    from ramify.launch.supervisor import Supervisor
    from ramify.run.state import ProcessStatus, SupervisorState

    spec = ProcessSpec("leader", (sys.executable, "-c", code), local / "leader.log", ProcessRole.LEADER)
    state = SupervisorState.begin(run, "")

    def record_statuses(processes: Sequence[ProcessStatus]) -> None:
        state.with_processes(processes).write(run)

    supervisor = partial(Supervisor, [spec], max_restarts=1, grace_period=1.0, on_change=record_statuses)

    async def supervise() -> None:
        print("outcome", (await supervisor().run()).name)

    asyncio.run(supervise())


def _publish(directory: Path) -> Path:
    import torch

    from ramify.model import publish_weights
    from ramify.trace import PolicyVersion

    return publish_weights(directory / "0.0-000001", {"weight": torch.zeros(1000)}, PolicyVersion("tiny", 0, 1))


def _get_ranks() -> Ranks:
    import torch

    from ramify.train.distributed import Ranks

    return Ranks(torch.device("cpu"))


def _build_trainer() -> Trainer:
    from ramify.train.build import build_trainer
    from ramify.train.config import TrainerConfig

    return build_trainer(TINY, TrainerConfig(pack_tokens=128), _get_ranks())


def _finish_run(path: Path) -> None:
    """Make a run with one checkpoint."""
    from ramify.run.store import RunStore

    with RunStore.open(path) as store:
        store.set_fact("finished", 1)


def _run_probe(index: int, hanging: Path, local: Path, scale: float) -> None:
    """Prepare a probe, say so, wait for the storage to be stopped, and make the call."""
    from ramify.core.watchdog import WATCHDOG, WatchdogSettings

    limits = WatchdogSettings()
    WATCHDOG.settings = replace(limits, storage_limit=limits.storage_limit / scale)
    steps = PROBES[index].steps(hanging, local)
    next(steps)
    print("prepared", flush=True)
    sys.stdin.readline()
    try:
        for _ in steps:
            raise AssertionError("a probe has one call")
    except Exception as error:  # noqa: BLE001 - it is the outcome
        print(f"raised {type(error).__name__}: {str(getattr(error, 'message', error)).splitlines()[0]}", flush=True)
        os._exit(1)
    print("returned", flush=True)
    os._exit(0)


def _measure(index: int, scale: float) -> tuple[str, float]:
    """Return the outcome of a probe, and the seconds until it was known."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, StoppableStorage(Path(folder)) as storage:
        local = Path(folder) / "local"
        local.mkdir()
        arguments = ["--probe", str(index), str(storage.path), str(local), "--scale", str(scale)]
        command = [sys.executable, "-m", "tools.hanging_storage", *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line == "prepared\n":
                break
        else:
            return f"could not be prepared: {' '.join(lines[-1:])}", 0.0
        storage.stop()
        started = time.monotonic()
        process.stdin.write("go\n")
        process.stdin.flush()
        while _is_running(process.pid) and time.monotonic() < started + MAX_WAIT:
            time.sleep(0.1)
        seconds, hangs = time.monotonic() - started, _is_running(process.pid)
        process.kill()
        storage.resume()
        output, _ = process.communicate()
    return _describe(process.returncode, hangs, output), seconds


def _is_running(pid: int) -> bool:
    """Return whether a process runs. One that is ending may wait in the kernel until its storage answers."""
    state, *_ = fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state != "Z" and not int(fields[6]) & PF_EXITING


def _describe(code: int, hangs: bool, output: str) -> str:
    result, *earlier = output.strip().splitlines()[::-1] or [""]
    if hangs:
        return f"{result}; then hangs" if result else "hangs"
    if result == "returned" and earlier:
        result = f"returned; printed: {earlier[0]}"
    return f"{result} (exit code {code})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=30.0, help="divides the limits of a run")
    parser.add_argument("--jobs", type=int, default=4, help="rows that are measured at once")
    parser.add_argument("--only", default="", help="part of the calls to measure")
    parser.add_argument("--probe", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        _run_probe(int(options.probe[0]), Path(options.probe[1]), Path(options.probe[2]), options.scale)
    indices = [index for index, probe in enumerate(PROBES) if options.only in f"{probe.role} {probe.call}"]
    print("| role | call | storage | s | outcome |\n|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(options.jobs) as executor:
        for index, (outcome, seconds) in zip(indices, executor.map(partial(_measure, scale=options.scale), indices)):
            role, call, storage, _ = PROBES[index]
            print(f"| {role} | {call} | {storage} | {seconds:.1f} | {outcome} |", flush=True)


if __name__ == "__main__":
    main()
