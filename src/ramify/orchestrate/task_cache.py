"""Cache of the tasks of a source, by number, fetched from its env servers in pages on demand."""

import asyncio
from collections.abc import Iterable
from typing import Any

from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env.task import compute_content_digest
from ramify.orchestrate.env_server_pool import EnvServerPool
from ramify.rollout.envserver.messages import MAX_COUNTED_TASKS

PAGE_SIZE = 256
MAX_CACHED_PAGES = -(-MAX_COUNTED_TASKS // PAGE_SIZE)  # enough for every bounded source


class TaskCache:
    """The tasks of one source. `timeout` is the seconds that a server may take for a page."""

    def __init__(self, name: str, servers: EnvServerPool, *, timeout: float = 300.0) -> None:
        self.name, self._servers, self._timeout = name, servers, timeout
        self._pages: dict[int, list[dict[str, Any]]] = {}
        self._fetch_lock = asyncio.Lock()

    async def count_tasks(self, limit: int = MAX_COUNTED_TASKS) -> int | None:
        """Return the number of tasks; None if there are more than `limit`. Raises ConfigInvalid if there is none."""
        start = 0
        while start < limit:
            page = await self._servers.tasks(start, PAGE_SIZE, timeout=self._timeout)
            self._pages[start // PAGE_SIZE] = [entry.task for entry in page.tasks]
            start += len(page.tasks)
            if page.end:
                if not start:
                    raise ConfigInvalid(f"{self.name}: its taskset has no tasks")
                return start
        return None

    async def get_content_digests(self, numbers: Iterable[int]) -> tuple[dict[int, str], dict[int, str]]:
        """Return the content digests of tasks by number, and the keys of those that have one.

        Tasks that the source no longer has are left out.
        """
        digests: dict[int, str] = {}
        keys: dict[int, str] = {}
        for number in numbers:
            try:
                task = await self.get_task(number)
            except EnvironmentFault:
                continue
            digests[number] = compute_content_digest(task)
            if task.get("key"):
                keys[number] = str(task["key"])
        return digests, keys

    async def get_task(self, number: int) -> dict[str, Any]:
        """Return the wire form of a task. Raises EnvironmentFault if the source no longer has it."""
        page, index = divmod(number, PAGE_SIZE)
        if page not in self._pages:
            async with self._fetch_lock:
                if page not in self._pages:
                    reply = await self._servers.tasks(page * PAGE_SIZE, PAGE_SIZE, timeout=self._timeout)
                    self._pages[page] = [entry.task for entry in reply.tasks]
                    while len(self._pages) > MAX_CACHED_PAGES:
                        del self._pages[next(iter(self._pages))]  # the oldest
        tasks = self._pages[page]
        if index >= len(tasks):
            raise EnvironmentFault(f"{self.name} no longer has task {number}")
        return tasks[index]
