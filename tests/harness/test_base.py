"""The interface that harnesses of users implement."""

import pytest

import ramify as rf
from ramify.errors import ConfigInvalid


def test_a_harness_with_the_former_name_of_requires_endpoint_is_refused():
    """Ignored silently, the agent would be started without an address to call."""
    with pytest.raises(ConfigInvalid, match="Agent: wants_endpoint is now called requires_endpoint"):

        class Agent(rf.Harness):
            wants_endpoint = True
