from collections.abc import Iterator

import pytest

from tests.gateway.stage import Player, player


@pytest.fixture(scope="session")
def play() -> Iterator[Player]:
    with player() as playing:
        yield playing
