"""Fixtures for tasksets whose tasks need a sandbox."""

import pytest

from tests.rollout.runtime.conftest import skip_unless_available


@pytest.fixture(params=["local", "sandbox"])
def sandbox_kind(request) -> str:
    """The id of a runtime that works on this machine."""
    skip_unless_available(request.param)
    return request.param
