"""The ranks of a gang find each other within a deadline, and ranks of another gang are refused by name."""

import os

import pytest
import torch
import torch.distributed as dist

from ramify.core.errors import ConfigInvalid, DeadlineExceeded, PeerLost, ProcessReplaced
from ramify.train.config import TrainerConfig
from ramify.train.distributed import GangMember, find_interface, init_distributed, join_gang
from tests.support.processes import find_free_port
from tests.support.trainer import TIMEOUT, context

PATIENCE = 50.0  # seconds; no test waits as long


@pytest.fixture
def port() -> int:
    return find_free_port()


def build_environment(rank: int, world_size: int, token: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RAMIFY_GANG_TOKEN": token,
    }


def _join(environment: dict[str, str], timeout: float, results, is_joining, until) -> None:
    os.environ |= environment
    is_joining.set()
    try:
        member = GangMember.from_environment()
        store = join_gang(member, timeout=timeout)
        store.set(f"value/{member.rank}", str(member.token))
        values = [store.get(f"value/{rank}").decode() for rank in range(member.world_size)]
        results.send(values)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        results.send(error)
    until.wait(TIMEOUT)


class GangRank:
    """A process that joins a gang, keeps its store until the end of the test, and sends what it got."""

    def __init__(self, rank: int, token: str, port: int, *, world_size: int = 2, timeout: float = PATIENCE) -> None:
        self.is_joining, self.until = context.Event(), context.Event()
        self._results, results = context.Pipe(duplex=False)
        environment = build_environment(rank, world_size, token, port)
        arguments = (environment, timeout, results, self.is_joining, self.until)
        self.process = context.Process(target=_join, args=arguments, daemon=True)
        self.process.start()
        results.close()

    def result(self):
        assert self._results.poll(TIMEOUT), "timed out"
        return self._results.recv()


@pytest.fixture
def start_rank():
    ranks = []

    def start(*args, **options) -> GangRank:
        ranks.append(GangRank(*args, **options))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.process.kill()
        rank.process.join()


@pytest.mark.process
def test_a_rank_of_an_older_gang_is_refused_by_name_and_the_newer_gang_forms(port, start_rank):
    first = start_rank(0, "1.4", port)
    stale = start_rank(1, "1.3", port).result()
    assert isinstance(stale, ProcessReplaced)
    assert "rank 1 of gang 1.3 may not join: gang 1.4 has replaced it" in stale.message
    second = start_rank(1, "1.4", port)
    assert first.result() == second.result() == ["1.4", "1.4"]


@pytest.mark.process
def test_a_rank_of_a_newer_gang_waits_until_the_older_one_has_left_the_address(port, start_rank):
    old = start_rank(0, "3", port)
    new = [start_rank(1, "4", port)]
    refused = start_rank(1, "2", port).result()  # the old store is being served now
    assert isinstance(refused, ProcessReplaced)
    old.process.kill()
    old.process.join()
    new.append(start_rank(0, "4", port))
    assert [rank.result() for rank in new] == [["4", "4"]] * 2


@pytest.mark.process
def test_the_deadline_names_the_missing_ranks(port, start_rank):
    other = start_rank(2, "0", port, world_size=4)
    assert other.is_joining.wait(TIMEOUT)
    first = start_rank(0, "0", port, world_size=4, timeout=3.0)
    error = first.result()
    first.process.kill()  # the other rank would wait for longer
    assert isinstance(error, DeadlineExceeded)
    assert f"not all 4 ranks joined at tcp://127.0.0.1:{port} within 3 s; missing ranks: 1, 3" in error.message
    assert isinstance(other.result(), PeerLost)


@pytest.mark.process
def test_without_rank_0_the_others_end_at_the_deadline(port, start_rank):
    error = start_rank(1, "0", port, timeout=0.5).result()
    assert isinstance(error, DeadlineExceeded)
    assert "missing ranks: 0, at least" in error.message


@pytest.mark.process
def test_a_second_copy_of_a_rank_is_refused(port, start_rank):
    start_rank(0, "0", port, world_size=3)
    copies = [start_rank(1, "0", port, world_size=3) for _ in range(2)]
    start_rank(2, "0", port, world_size=3)
    results = [copy.result() for copy in copies]
    assert ["0"] * 3 in results
    assert any(isinstance(result, ProcessReplaced) and "has already joined" in result.message for result in results)


def test_a_gang_without_all_its_variables_is_refused(monkeypatch):
    monkeypatch.setenv("RAMIFY_GANG_TOKEN", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigInvalid, match="MASTER_ADDR and MASTER_PORT are needed"):
        GangMember.from_environment()
    monkeypatch.delenv("RAMIFY_GANG_TOKEN")
    assert GangMember.from_environment() is None


def test_the_interface_is_that_of_the_route():
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("no address") is None


def _sum_ranks(environment: dict[str, str], results) -> None:
    os.environ |= environment
    with init_distributed(TrainerConfig(threads=1, device="cpu")) as ranks:
        total = torch.tensor([float(ranks.rank + 1)])
        dist.all_reduce(total)
        results.put((total.item(), ranks.all_gather(ranks.rank), os.environ["GLOO_SOCKET_IFNAME"]))


@pytest.mark.process
def test_a_gang_runs_collectives_over_the_interface_of_its_address(port):
    results = context.Queue()
    environments = [build_environment(rank, 2, "7", port) for rank in range(2)]
    processes = [context.Process(target=_sum_ranks, args=(each, results)) for each in environments]
    for process in processes:
        process.start()
    try:
        assert [results.get(timeout=TIMEOUT) for _ in processes] == [(3.0, [0, 1], "lo")] * 2
    finally:
        for process in processes:
            process.join(TIMEOUT)
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
