"""Background tasks of an orchestrator."""

import pytest

from ramify.orchestrate.status import describe_recent_drops
from ramify.orchestrate.untrainable_groups import UntrainableGroupCounter
from ramify.run.store.group_state import DropReason
from ramify.run.store.ledger import GroupRecord


@pytest.mark.parametrize(
    ("limit", "text"),
    [(10, "2 × filtered: zero_advantage, 1 × unscored"), (2, "2 × filtered: zero_advantage (the last 2 of 3)")],
)
async def test_state_describes_only_recently_dropped_groups(ledger, limit, text):
    await ledger.declare_source("reverse", 100)
    for number, reason in enumerate((DropReason.UNSCORED, DropReason.FILTERED, DropReason.FILTERED)):
        await ledger.issue_groups([GroupRecord(number, "reverse", number, 1)])
        await ledger.drop_group(number, reason, "zero_advantage" if reason is DropReason.FILTERED else "")
    assert describe_recent_drops(ledger, ledger.count_by_state()["dropped"], limit) == text


@pytest.mark.parametrize(("reason", "has_advice"), [(DropReason.FILTERED, True), (DropReason.UNSCORED, False)])
async def test_partial_credit_is_advised_only_for_groups_without_advantage(ledger, reason, has_advice):
    counter = UntrainableGroupCounter()
    await ledger.declare_source("reverse", 100)
    counter.restore(ledger, 2)
    for number in range(2):
        await ledger.issue_groups([GroupRecord(number, "reverse", number, 1)])
        await ledger.drop_group(number, reason, "zero_advantage" if has_advice else "ProviderError: no answer")
        counter.record_dropped(reason)
    report = await counter.report(ledger)
    assert ("partial credit" in report) == has_advice
    assert ("ProviderError: no answer" in report) != has_advice
    assert 'orchestrator.on_no_signal = "warn" continues the run' in report
