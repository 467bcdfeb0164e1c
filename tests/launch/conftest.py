import pytest

from tests.support.processes import find_free_port


@pytest.fixture
def free_port() -> int:
    """A port on which nothing listens."""
    return find_free_port()
