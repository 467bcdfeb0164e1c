"""Tasks are fetched once by number, and the cache is limited."""

from typing import Any

from ramify.orchestrate import connected_source as module
from ramify.orchestrate.connected_source import PAGE_SIZE, ConnectedSource, TaskCache
from ramify.rollout.envserver.messages import TaskItem, TaskPage
from ramify.run.store.environments import ObservedEnvironment, find_changes, record_environments


class UnboundedServer:
    """An env server with an unbounded number of tasks."""

    def __init__(self) -> None:
        self.fetched_pages: list[int] = []

    async def tasks(self, start: int, count: int, *, timeout: float) -> TaskPage:
        self.fetched_pages.append(start // PAGE_SIZE)
        tasks = [TaskItem(str(number), {"prompt": str(number)}) for number in range(start, start + count)]
        return TaskPage(tasks, end=False)


async def test_cache_of_an_unbounded_source_is_limited(monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED_PAGES", 3)
    client: Any = UnboundedServer()
    cache = TaskCache("it", client)
    for number in (*range(0, 6 * PAGE_SIZE, 50), 0, 1, 6 * PAGE_SIZE - 1):
        assert await cache.get_task(number) == {"prompt": str(number)}
    assert client.fetched_pages == [0, 1, 2, 3, 4, 5, 0]
    assert len(cache._pages) == 3


async def test_only_issued_tasks_of_an_unbounded_source_are_compared(ledger):
    client: Any = UnboundedServer()
    options = dict.fromkeys(("attempt_timeout", "server_timeout"), 9.0)
    source = ConnectedSource(name="it", servers=client, tasks=TaskCache("it", client), max_tries=1, **options)
    unchanged = (await source.observe_environment(ledger.store, "it", 5)).task_digests
    for number in (0, 3):
        ledger.queue_task_digest("it", number, unchanged[number] if number else "another digest")
    await ledger.declare_source("it", None)  # later than the digests
    observed = await source.observe_environment(ledger.store, "it", None)
    assert observed.task_digests == {number: unchanged[number] for number in (0, 3)}
    record_environments(ledger.store, {"it": ObservedEnvironment({})}, {})
    assert [line.partition(" (")[0] for line in find_changes(ledger.store, {"it": observed})["it"]] == [
        "task 0 has changed"
    ]
