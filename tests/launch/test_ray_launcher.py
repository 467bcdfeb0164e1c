"""RayLauncher without Ray; `make test-cluster` runs it with Ray."""

import sys

import pytest

from ramify.errors import ConfigInvalid
from ramify.launch.ray_launcher import RayLauncher


def test_missing_ray_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigInvalid, match=r"cluster.launcher: 'ray' needs the extra `ray`: pip install"):
        RayLauncher.connect()
