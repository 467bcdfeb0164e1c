"""One engine and one server that several tests share."""

import asyncio

import pytest

from ramify.processes.prefork import start_prefork_server
from ramify.rollout.envserver import EnvClient, EnvServer
from ramify.rollout.envserver.worker_process import PRELOAD_MODULES
from tests.support.engine import ScriptedEngine, reply_cba, run_engine
from tests.support.processes import async_wait_until as wait_until
from tests.support.tricky_env_server import QUICK, make_config


@pytest.fixture(scope="package")
def engine():
    with run_engine(ScriptedEngine(reply_cba)) as engine:
        yield engine


@pytest.fixture(scope="package")
def fork_client():
    """The client of a fork server that the env servers of these tests share, so that their workers start quickly."""
    with start_prefork_server(PRELOAD_MODULES, {}) as client:
        yield client


@pytest.fixture(scope="package")
def shared(engine, fork_client, tmp_path_factory):
    """(runner, server, client) with two ready workers."""
    with asyncio.Runner() as runner:

        async def start():
            config = make_config(engine.url, tmp_path_factory.mktemp("shared"))
            server = await EnvServer(config, prefork_client=fork_client).start()
            client = await EnvClient(server.address, settings=QUICK).start()
            await wait_until(lambda: len(server.pool._ready_workers()) == 2, "two workers")
            return server, client

        async def stop():
            await client.close()
            await server.close()

        server, client = runner.run(start())
        yield runner, server, client
        runner.run(stop())
