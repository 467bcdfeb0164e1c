"""Tasks by their number: fetched once, and not kept for ever."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ramify.envserver.messages import TaskItem, TaskPage
from ramify.orchestrate import task_cache as module
from ramify.orchestrate.task_cache import PAGE_SIZE, TaskCache


class Endless:
    """A server whose tasks have no end."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def tasks(self, start: int, count: int, *, deadline: float) -> TaskPage:
        self.asked.append(start // PAGE_SIZE)
        found = [TaskItem(str(number), {"prompt": str(number)}) for number in range(start, start + count)]
        return TaskPage(found, end=False)


def test_a_source_without_end_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(module, "PAGES", 3)

    async def story() -> SimpleNamespace:
        client: Any = Endless()
        book = TaskCache("it", client)
        for number in (*range(0, 6 * PAGE_SIZE, 50), 0, 1, 6 * PAGE_SIZE - 1):
            assert await book.get_task(number) == {"prompt": str(number)}
        return SimpleNamespace(asked=client.asked, kept=len(book._pages))

    found = asyncio.run(story())
    assert found.asked == [0, 1, 2, 3, 4, 5, 0]
    assert found.kept == 3
