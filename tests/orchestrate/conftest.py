import pytest

from ramify.store import RunStore
from ramify.store.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    with RunStore.open(tmp_path) as store:
        yield Ledger.open(store)
