import os

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.ray_cluster import RayCluster

NUM_HOSTS = 3


def pytest_collection_modifyitems(items):
    """Skip tests on hosts unless they are asked for: they need Ray, and root for network namespaces."""
    if not os.environ.get("RAMIFY_RAY_PYTHON"):
        for item in items:
            if not {"ray_cluster", "slurm"}.isdisjoint(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.skip("make test-cluster RAY_PYTHON=... runs it"))


@pytest.fixture(scope="session")
def ray_cluster():
    """Three hosts with Ray; the first is the head."""
    with Hosts(NUM_HOSTS) as hosts:
        cluster = RayCluster(hosts)
        cluster.start()
        yield cluster
