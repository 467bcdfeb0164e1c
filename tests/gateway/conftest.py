from collections.abc import Iterator

import pytest

from tests.gateway.scenario import ScenarioRunner, open_scenario_runner


@pytest.fixture(scope="session")
def run_scenario() -> Iterator[ScenarioRunner]:
    with open_scenario_runner() as runner:
        yield runner
