import pytest

from ramify.processes.prefork import start_prefork_server
from ramify.rollout.envserver.worker_process import PRELOAD_MODULES
from ramify.run.store import RunStore
from ramify.run.store.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    with RunStore.open(tmp_path) as store:
        yield Ledger.open(store)


@pytest.fixture(scope="package")
def fork_client():
    """The client of a fork server that the env servers of these tests share, so that their workers start quickly."""
    with start_prefork_server(PRELOAD_MODULES, {}) as client:
        yield client
