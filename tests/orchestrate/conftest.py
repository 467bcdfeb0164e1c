import pytest

from ramify.run.store import RunStore
from ramify.run.store.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    with RunStore.open(tmp_path) as store:
        yield Ledger.open(store)
