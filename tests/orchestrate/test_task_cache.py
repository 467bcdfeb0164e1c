"""Tasks are fetched once by number, and the cache is limited."""

from typing import Any

from ramify.envserver.messages import TaskItem, TaskPage
from ramify.orchestrate import task_cache as module
from ramify.orchestrate.task_cache import PAGE_SIZE, TaskCache


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
