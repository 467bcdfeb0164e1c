"""How long the processes of a head may outlive it, recorded where the next head finds it.

    leases/<k>   for each process of head k on a node: seconds after which it is dead for certain without its head

A head writes its file before it starts a process, and removes it when it has seen all of them end. So a file that is
left is that of a head that was lost, or that still runs. A head of a later epoch counts these seconds from when it
reads the file. The old head may renew leases until it reads the new epoch, at most POLL_INTERVAL seconds later; the new
head waits that much longer.
"""

import contextlib
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import msgspec

from ramify.core.errors import StorageFailed
from ramify.core.files import write_atomically
from ramify.core.watchdog import watch_storage
from ramify.launch.head import check_newest_head
from ramify.launch.launcher import Launcher, ProcessSpec
from ramify.launch.process import EarlierProcess
from ramify.run.fencing.token import FencingToken
from ramify.run.state import ProcessState, SupervisorState
from ramify.run.store import storage_call
from ramify.run.store.head_replication import POLL_INTERVAL

LEASES_DIR = "leases"  # in the shared directory
EXITED_STATES = (ProcessState.WAITING, ProcessState.ENDED)  # of processes that do not run


@contextlib.contextmanager
def hold_leases(
    run: Path,
    shared: Path | None,
    epoch: int,
    specs: Sequence[ProcessSpec],
    launcher: Launcher,
    *,
    print_line: Callable[[str], None] = print,
) -> Generator[dict[str, EarlierProcess]]:
    """Record the leases of the processes until all have ended, and yield those of earlier supervisors that may run.

    Raises ProcessReplaced if another head has taken over.
    """
    earlier = read_earlier_processes(run)
    delays = {spec.name: spec.placement.lease.replacement_delay for spec in specs if spec.placement is not None}
    if shared is None or not launcher.can_lose_nodes:
        yield earlier
        return
    directory = shared / LEASES_DIR
    with storage_call(directory):
        earlier_heads = _record_leases(directory, epoch, delays)
    check_newest_head(run)  # after the file was written: otherwise a new head might not have seen it
    try:
        yield {**earlier_heads, **earlier}
    finally:
        state = SupervisorState.read(run)
        is_recorded = state is not None and state.pid == os.getpid()
        if is_recorded and not any(process.replacement_delay for process in read_earlier_processes(run).values()):
            try:
                _remove_leases(directory, epoch)
            except OSError as error:  # the next head waits, which does no harm
                print_line(f"the leases of this head were not removed: {error}")


def read_earlier_processes(run: Path) -> dict[str, EarlierProcess]:
    """Return the processes with a token that the last supervisor of a run has started, by name."""
    state = SupervisorState.read(run)
    rows = state.processes if state is not None else {}
    return {
        name: EarlierProcess(
            FencingToken.parse(row.token), None if row.state in EXITED_STATES else row.replacement_delay
        )
        for name, row in rows.items()
        if row.token
    }


def _record_leases(directory: Path, epoch: int, delays: Mapping[str, float]) -> dict[str, EarlierProcess]:
    """Write the file of a head, and return the processes that heads of earlier epochs may have left, by name."""
    earlier_heads = _read_earlier_heads(directory, epoch)
    directory.mkdir(exist_ok=True)
    all_delays = _merge_delays(_read_delays(directory, epoch), delays)
    write_atomically(_get_lease_file(directory, epoch), msgspec.json.encode(all_delays))
    return earlier_heads


def _remove_leases(directory: Path, epoch: int) -> None:
    """Remove the files of a head and of those before it."""
    for number in range(epoch + 1):
        with watch_storage(directory):
            _get_lease_file(directory, number).unlink(missing_ok=True)


def _read_earlier_heads(directory: Path, epoch: int) -> dict[str, EarlierProcess]:
    """Return the processes that heads of earlier epochs may have left, by name."""
    delays: dict[str, float] = {}
    for number in range(epoch):
        delays = _merge_delays(delays, _read_delays(directory, number))
    return {  # a head that still runs notices after POLL_INTERVAL that it was replaced
        name: EarlierProcess(FencingToken(epoch - 1), replacement_delay=delay + POLL_INTERVAL)
        for name, delay in delays.items()
    }


def _merge_delays(delays: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    return {name: max(delays.get(name, 0.0), others.get(name, 0.0)) for name in (*delays, *others)}


def _read_delays(directory: Path, epoch: int) -> dict[str, float]:
    path = _get_lease_file(directory, epoch)
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        advice = f"remove it when no process of epoch {epoch} runs any more"
        raise StorageFailed(f"{path} is damaged: {error}; {advice}") from error


def _get_lease_file(directory: Path, epoch: int) -> Path:
    return directory / str(epoch)
