"""Background tasks of an orchestrator."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from ramify.core.errors import StorageFailed
from ramify.orchestrate import background
from ramify.orchestrate.patience import PatienceCounter
from ramify.run.store.group_state import DropReason
from ramify.run.store.ledger import GroupRecord


@pytest.mark.parametrize(
    ("limit", "text"),
    [(10, "2 × filtered: zero_advantage, 1 × unscored"), (2, "2 × filtered: zero_advantage (the last 2 of 3)")],
)
async def test_snapshot_describes_only_recently_dropped_groups(ledger, limit, text):
    await ledger.declare_source("reverse", 100)
    for number, reason in enumerate((DropReason.UNSCORED, DropReason.FILTERED, DropReason.FILTERED)):
        await ledger.issue_groups([GroupRecord(number, "reverse", number, 1)])
        await ledger.drop_group(number, reason, "zero_advantage" if reason is DropReason.FILTERED else "")
    assert background.describe_recent_drops(ledger, ledger.count_by_state()["dropped"], limit) == text


@pytest.mark.parametrize(("reason", "has_advice"), [(DropReason.FILTERED, True), (DropReason.UNSCORED, False)])
async def test_partial_credit_is_advised_only_for_groups_without_advantage(ledger, reason, has_advice):
    patience = PatienceCounter()
    await ledger.declare_source("reverse", 100)
    patience.restore(ledger, 2)
    for number in range(2):
        await ledger.issue_groups([GroupRecord(number, "reverse", number, 1)])
        await ledger.drop_group(number, reason, "zero_advantage" if has_advice else "ProviderError: no answer")
        patience.record_dropped(reason)
    report = await patience.report(ledger)
    assert ("partial credit" in report) == has_advice
    assert ("ProviderError: no answer" in report) != has_advice
    assert 'orchestrator.on_no_signal = "warn" continues the run' in report


async def test_run_directory_that_hangs_ends_the_run_and_does_not_block_it(tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(background, "STORAGE_TIMEOUT", 0.1)
    monkeypatch.setattr(background, "save_snapshot", lambda path, text: answers.wait())
    monkeypatch.setattr(background, "build_status", lambda run: {"groups": {}})
    monkeypatch.setattr(background, "list_waits", lambda run: [])
    monkeypatch.setattr(background, "describe_recent_drops", lambda ledger, total: "")
    run = SimpleNamespace(config=SimpleNamespace(path=tmp_path), ledger=None)
    try:
        with pytest.raises(StorageFailed, match=r"status.json: the storage did not answer within 0.1 s"):
            await asyncio.wait_for(background.write_snapshots(run), 60)
    finally:
        answers.set()
