"""RayLauncher without Ray; `make test-cluster` runs it with Ray."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ramify.core.async_calls import cancel_all
from ramify.core.errors import DeadlineExceeded, ProcessDied, StorageFull
from ramify.launch import ray_launcher
from ramify.launch.launcher import Place, PlacementRequest
from ramify.launch.ray_launcher import RayLauncher, RayLauncherSettings
from tests.support.launchers import build_leases
from tests.support.ray import RayError, StubRay

RAY_HANGS_AT_EXIT = """
import atexit, threading
from ramify.launch.ray_launcher import RayLauncher, RayLauncherSettings
from tests.support.ray import StubRay

class HangingRay(StubRay):
    def shutdown(self):
        threading.Event().wait()

ray = HangingRay("a")
atexit.register(ray.shutdown)  # as `ray.init` does
RayLauncher(ray, RayLauncherSettings(shutdown_timeout=0.2)).disconnect()
"""


def connect(ray: StubRay, **settings: float) -> RayLauncher:
    """Return a launcher with short intervals."""
    return RayLauncher(ray, RayLauncherSettings(**{"retry_interval": 0.01, "release_poll_interval": 0.01, **settings}))


def choose_first(*names: str) -> PlacementRequest:
    """Return a placement that gives one rank to each of the first two of these nodes that can be reached."""
    return PlacementRequest(
        choose_places=lambda nodes: [Place(name) for name in names if name in {node.name for node in nodes}][:2],
    )


def choose_one(*names: str) -> PlacementRequest:
    """Return a placement that takes the first of these nodes that can be reached."""

    def choose_places(nodes):
        return [Place(name) for name in names if name in {node.name for node in nodes}][:1]

    return PlacementRequest(choose_places=choose_places)


async def test_ranks_are_started_on_the_chosen_nodes_and_no_others():
    ray = StubRay("a", "b", "c")
    slots = await connect(ray).open_slots(build_leases(2), choose_first("c", "b"), timeout=60)
    assert [slot.node for slot in slots] == ["c", "b"]
    assert [(actor.strategy.node_id, actor.strategy.soft) for actor in ray.actors] == [("id-c", False), ("id-b", False)]


async def test_nodes_are_chosen_again_when_one_dies():
    ray = StubRay("a", "b", "c", failures={"b": "dies"})
    slots = await connect(ray).open_slots(build_leases(2), choose_first("a", "b", "c"), timeout=60)
    assert [slot.node for slot in slots] == ["a", "c"]
    assert [actor.is_killed for actor in ray.actors] == [True, True, False, False]


async def test_actor_that_cannot_start_is_named_and_ends_the_others():
    ray = StubRay("a", "b", failures={"a": "full", "b": "ModuleNotFoundError: No module named 'ramify'"})
    with pytest.raises(ProcessDied, match=r"cannot be started on b: ModuleNotFoundError: No module named 'ramify'; "):
        await connect(ray).open_slots(build_leases(2), choose_first("a", "b"), timeout=60)
    assert [actor.is_killed for actor in ray.actors] == [True, True]
    assert ray.actors[0].is_cancelled


async def test_full_cluster_is_reported_with_what_the_nodes_have():
    ray = StubRay("a", failures={"a": "full"})
    needed = "it needs 0 GPUs and 1 core on a node; the nodes have in total a: 0 GPUs and 4 cores; add a node, or lower"
    message = f"role could not be placed within 0.2 s: {needed}"
    for placement in (choose_first("a"), PlacementRequest(choose_places=lambda nodes: ())):
        with pytest.raises(DeadlineExceeded, match=message):
            await connect(ray).open_slots(build_leases(), placement, timeout=0.2)
    assert all(actor.is_killed for actor in ray.actors)


async def test_cluster_that_others_have_filled_is_reported_with_what_they_use():
    ray = StubRay("a", "b", failures={"b": "full"})
    launcher = connect(ray, release_timeout=0.1)
    await launcher.open_slots(build_leases(), choose_one("a"), timeout=60)
    ray.used_cores = 6
    usage = "other Ray jobs use 0 GPUs and 6 cores, and 0 GPUs and 1 core are free; wait until they end, add a node"
    with pytest.raises(DeadlineExceeded, match=f"could not be placed within 0.2 s: .*; {usage}, or lower"):
        await launcher.open_slots(build_leases(), choose_one("b"), timeout=0.2)


async def test_actors_that_were_just_ended_are_not_counted_as_other_jobs():
    ray = StubRay("a", failures={"a": "slow"})
    ray.num_late_reports = 2
    with pytest.raises(DeadlineExceeded, match="4 cores; add a node") as raised:
        await connect(ray).open_slots(build_leases(), choose_one("a"), timeout=0.2)
    assert "other Ray jobs" not in raised.value.message


@pytest.mark.parametrize(("failure", "used_cores"), [("full", 4), ("slow", 3)])
async def test_actors_that_have_not_started_are_not_subtracted_and_named(failure, used_cores):
    ray = StubRay("a", "b", failures={"b": failure})
    ray.used_cores = used_cores
    launcher = connect(ray)
    task = asyncio.create_task(launcher.open_slots(build_leases(), choose_one("b"), timeout=60))
    while not ray.actors:
        await asyncio.sleep(0.01)
    users = "other Ray jobs, or processes of this run that have not started yet,"
    assert launcher.describe_usage(launcher.list_nodes()).startswith(f"{users} use 0 GPUs and 4 cores, and ")
    await cancel_all([task])


async def test_actors_are_ended_although_the_timeout_interrupts_their_cleanup(monkeypatch):
    async def interrupt(tasks):
        await cancel_all(tasks)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        raise TimeoutError

    monkeypatch.setattr(ray_launcher, "cancel_all", interrupt)
    ray = StubRay("a", failures={"a": "crashes"})
    with pytest.raises(DeadlineExceeded):
        await connect(ray).open_slots(build_leases(), choose_first("a"), timeout=0.2)
    assert ray.actors and all(actor.is_killed for actor in ray.actors)


async def test_actor_that_crashes_again_and_again_ends_with_the_timeout():
    ray = StubRay("a", failures={"a": "crashes"})
    with pytest.raises(DeadlineExceeded, match=r"within 0.5 s: .*; the last try failed: .* on a .*worker has crashed"):
        await connect(ray).open_slots(build_leases(), choose_first("a"), timeout=0.5)
    assert all(actor.is_killed for actor in ray.actors)


async def test_node_that_crashes_is_avoided_although_ray_takes_it_for_alive():
    ray, chosen_from = StubRay("a", "b", failures={"a": "crashes"}), []
    launcher = connect(ray)

    def choose_places(nodes):
        chosen_from.append([node.name for node in nodes])
        return [Place(chosen_from[-1][0])]

    for _ in range(2):  # the next process does not try it first either
        (slot,) = await launcher.open_slots(build_leases(), PlacementRequest(choose_places=choose_places), timeout=60)
        assert slot.node == "b"
    assert chosen_from == [["a", "b"], ["b"], ["b"]]


@pytest.mark.parametrize(("seconds", "next_node"), [(120.0, "b"), (0.0, "a")])
async def test_node_on_which_a_process_was_lost_is_avoided_for_a_while(seconds, next_node):
    launcher = connect(StubRay("a", "b"), node_avoidance=seconds)
    (slot,) = await launcher.open_slots(build_leases(), choose_one("a", "b"), timeout=60)
    await slot._client.close(is_reachable=False)
    (next_slot,) = await launcher.open_slots(build_leases(), choose_one("a", "b"), timeout=60)
    assert (slot.node, next_slot.node) == ("a", next_node)


async def test_node_that_does_not_answer_is_given_up_before_the_timeout():
    ray = StubRay("a", "b", failures={"a": "full"})
    (slot,) = await connect(ray).open_slots(build_leases(), choose_one("a", "b"), timeout=1.5)
    assert slot.node == "b"
    assert [actor.is_killed for actor in ray.actors] == [True, False]


async def test_avoided_node_is_chosen_if_the_others_have_no_room():
    ray = StubRay("a", "b", failures={"a": "crashes"})
    launcher = connect(ray)
    with pytest.raises(DeadlineExceeded):
        await launcher.open_slots(build_leases(), choose_first("a"), timeout=0.2)
    ray.failures.clear()
    (slot,) = await launcher.open_slots(build_leases(), choose_first("a"), timeout=60)
    assert slot.node == "a"


async def test_failure_of_a_method_keeps_its_name():
    failure = StorageFull("no room on a")
    with pytest.raises(StorageFull) as error:
        await connect(StubRay("a", failures={"a": failure})).open_slots(build_leases(), choose_first("a"), timeout=60)
    assert error.value is failure


async def test_ray_that_cannot_be_asked_for_a_while_does_not_end_the_run(monkeypatch):
    ray = StubRay("a")
    list_nodes, failures = ray.nodes, [ConnectionError("no control service"), RayError("it restarts")]

    def fail_first():
        if failures:
            raise failures.pop()
        return list_nodes()

    monkeypatch.setattr(ray, "nodes", fail_first)
    (slot,) = await connect(ray).open_slots(build_leases(), choose_first("a"), timeout=60)
    assert slot.node == "a" and failures == []


async def test_failure_of_an_earlier_try_is_not_named_if_there_was_no_room_later():
    ray = StubRay("a", "b", failures={"b": "dies"})
    with pytest.raises(DeadlineExceeded) as raised:
        await connect(ray).open_slots(build_leases(), choose_first("b"), timeout=0.5)
    assert "the nodes have in total a: 0 GPUs and 4 cores" in raised.value.message
    assert "last try" not in raised.value.message


def test_nodes_are_waited_for_until_the_timeout_even_if_ray_hangs(monkeypatch):
    ray, released = StubRay("a", "b"), threading.Event()
    launcher = connect(ray)
    assert [node.name for node in launcher.wait_for_nodes(2, timeout=60)] == ["a", "b"]
    ray.names.append("a")  # Ray was started there again
    with pytest.raises(DeadlineExceeded, match=r"after 0.2 s, 2 of 3 nodes have joined \(a, b\), fewer than "):
        launcher.wait_for_nodes(3, timeout=0.2)
    monkeypatch.setattr(ray, "nodes", released.wait)
    with pytest.raises(DeadlineExceeded, match="0 of 3 nodes"):
        launcher.wait_for_nodes(3, timeout=0.2)
    released.set()


def test_waiting_for_nodes_is_reported_at_once_and_then_at_intervals():
    ray, lines = StubRay("a"), []
    launcher = connect(ray, node_poll_interval=0.01, node_report_interval=0.05)

    def print_line(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            ray.names += ["b", "c"]

    assert len(launcher.wait_for_nodes(3, timeout=60, print_line=print_line)) == 3
    assert lines == ["1 of 3 nodes have joined (a); waiting up to 60 s"] * 2
    launcher.wait_for_nodes(3, timeout=60, print_line=print_line)
    assert len(lines) == 2


async def test_error_of_ray_says_what_was_called_and_what_to_do(monkeypatch):
    ray = StubRay("a")
    monkeypatch.setattr(ray, "nodes", lambda: (_ for _ in ()).throw(RayError("traceback\nno control service")))
    message = "Ray did not list its nodes: no control service; check the cluster with `ray status`"
    with pytest.raises(DeadlineExceeded, match=message):
        await connect(ray).open_slots(build_leases(), choose_one("a"), timeout=0.1)


@pytest.mark.parametrize("released", [None, threading.Event()])
def test_disconnecting_ends_with_its_deadline_if_ray_hangs(released):
    ray, lines = StubRay("a"), []
    ray.released = released
    connect(ray, shutdown_timeout=0.2).disconnect(lines.append)
    problem = "DeadlineExceeded: Ray did not disconnect within 0.2 s; processes on its nodes end with their leases"
    assert lines == ([] if released is None else [f"{problem}; check the cluster with `ray status`"])
    if released is not None:
        released.set()


@pytest.mark.process
def test_process_exits_although_ray_hangs():
    command, root = [sys.executable, "-c", RAY_HANGS_AT_EXIT], Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, check=True)
    assert "Ray did not disconnect within 0.2 s" in result.stdout
