"""The check that each trained token is the one that was sampled at its position."""

from dataclasses import replace

import numpy as np
import pytest

from ramify.orchestrate.batches import rebuild_forests
from ramify.run.store import Ledger, RunStore
from ramify.view.training_record import check_trained_tokens, find_differing_calls
from tests.support.sample_runs import write_rl_run
from tests.support.traces import refuse_top_logprobs

pytestmark = pytest.mark.promise


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_rl_run(tmp_path_factory.mktemp("outputs") / "run", num_groups=2)


@pytest.fixture(scope="module")
def batch(path):
    """Return the forest of a batch, whose three calls have four entries each, and its traces by id."""
    with RunStore.open(path) as store:
        [forest] = rebuild_forests(Ledger.open_readonly(store).batches()[0], store.read_traces, refuse_top_logprobs)
        return forest, {trace.id: trace for id in ("0.0", "0.1", "0.2") for trace in store.read_traces(id)}


def set_value(column, index, value):
    changed = column.copy()
    changed[index] = value
    return changed


def test_the_entries_of_a_run_are_its_sampled_tokens(path, batch):
    assert find_differing_calls(*batch) == []
    with RunStore.open(path) as store:
        check = check_trained_tokens(store)
    assert (check.num_batches, check.num_entries, check.problems) == (1, 12, [])


SWAPPED = [1, 0, *range(2, 12)]
REPEATED = [0, 0, *range(2, 12)]


@pytest.mark.parametrize("order", [SWAPPED, REPEATED])
def test_entries_that_are_swapped_or_repeated_are_reported(batch, order):
    forest, traces = batch
    targets = forest.targets.select(np.array(order))
    [problem] = find_differing_calls(replace(forest, targets=targets), traces)
    assert problem.startswith("node 1 of trace 0.0: ")


def test_entries_with_each_other_s_logprobs_are_reported(batch):
    """The pairs of tokens and logprobs were sampled, but at other positions."""
    forest, traces = batch
    columns = {name: getattr(forest.targets, name)[SWAPPED] for name in ("token", "logprob")}
    changed = replace(forest, targets=replace(forest.targets, **columns))
    assert len(find_differing_calls(changed, traces)) == 1


@pytest.mark.parametrize("value", [np.nan, -np.inf, -0.125])
def test_entries_of_the_policy_gradient_with_another_logprob_are_reported(batch, value):
    forest, traces = batch
    targets = replace(forest.targets, logprob=set_value(forest.targets.logprob, 5, value))
    assert len(find_differing_calls(replace(forest, targets=targets), traces)) == 1


def test_entries_of_a_cross_entropy_need_no_logprob(batch):
    forest, traces = batch
    targets = replace(
        forest.targets,
        logprob=set_value(forest.targets.logprob, 5, np.nan),
        rl=set_value(forest.targets.rl, 5, 0.0),
        ce=set_value(forest.targets.ce, 5, 1.0),
    )
    assert find_differing_calls(replace(forest, targets=targets), traces) == []


def test_tokens_that_were_not_sampled_are_reported(batch):
    forest, traces = batch
    changed = replace(forest, targets=replace(forest.targets, token=forest.targets.token + 1))
    assert len(find_differing_calls(changed, traces)) == 3
