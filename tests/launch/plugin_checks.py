"""Checks of plugin tables without the process that `ramify.launch.plugin_check` starts for them."""

import json

import pytest

from ramify.launch import plugin_check


@pytest.fixture
def in_this_process(monkeypatch):
    """Check plugin tables in this process, for tests of what is checked, not of where."""

    def check(_python, request):
        return json.loads(json.dumps(plugin_check.run_checks(json.loads(json.dumps(request, default=str)))))

    monkeypatch.setattr(plugin_check, "_check_in", check)
