"""The state of a run, asked from its orchestrator."""

import pytest

from ramify.core.errors import ProviderError
from ramify.run.reader import RunActivity, ask_orchestrator, observe_run
from tests.support.status import serve_status


def test_only_the_orchestrator_of_this_run_is_believed(tmp_path):
    path = tmp_path / "run"
    assert observe_run(path).activity is RunActivity.IDLE
    with serve_status(path) as address:
        observed = observe_run(path)
        assert observed.is_live and observed.state.orchestrator.step == 7
        assert not observe_run(path, ask_any_address=False).is_live  # no process of this machine holds the run
        assert ask_orchestrator(address).step == 7
    assert not observe_run(path).is_live
    with pytest.raises(ProviderError, match="/status does not respond"):
        ask_orchestrator(address)
    with serve_status(path, run="another"):
        assert not observe_run(path).is_live
