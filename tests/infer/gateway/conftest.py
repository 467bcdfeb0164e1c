"""The servers that all tests of the gateway share, in one event loop."""

import functools

import pytest
import pytest_asyncio

from tests.support.scenario import open_servers, open_session


def pytest_collection_modifyitems(items):
    for item in items:
        if "open_scenario" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def open_scenario():
    async with open_servers() as servers:
        yield functools.partial(open_session, servers)
