"""One engine and one server for the tests that do not mind sharing."""

import asyncio

import pytest

from ramify.envserver import EnvClient, EnvServer
from tests.envserver.engine import instant
from tests.envserver.stage import QUICK, configured, until


@pytest.fixture(scope="package")
def engine():
    with instant() as engine:
        yield engine


@pytest.fixture(scope="package")
def shared(engine, tmp_path_factory):
    """(runner, server, client) with two workers that are ready."""
    with asyncio.Runner() as runner:

        async def start():
            server = await EnvServer(configured(engine.url, tmp_path_factory.mktemp("shared"))).start()
            client = await EnvClient(server.address, settings=QUICK).start()
            await until(lambda: len(server.pool._ready_workers()) == 2, "two workers")
            return server, client

        async def stop():
            await client.close()
            await server.close()

        server, client = runner.run(start())
        yield runner, server, client
        runner.run(stop())
