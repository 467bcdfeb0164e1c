"""Background tasks of an orchestrator."""

import asyncio

import pytest

from ramify.orchestrate import background
from ramify.store import Ledger, RunStore
from ramify.store.group_state import DropReason
from ramify.store.ledger import GroupRecord


@pytest.mark.parametrize(
    ("limit", "text"),
    [(10, "2 × filtered: zero_advantage, 1 × unscored"), (2, "2 × filtered: zero_advantage (the last 2 of 3)")],
)
def test_snapshot_describes_only_recently_dropped_groups(tmp_path, monkeypatch, limit, text):
    monkeypatch.setattr(background, "MAX_DESCRIBED_DROPS", limit)

    async def drop(ledger: Ledger) -> None:
        await ledger.declare_source("reverse", 100)
        for number, reason in enumerate((DropReason.UNSCORED, DropReason.FILTERED, DropReason.FILTERED)):
            await ledger.issue_groups([GroupRecord(number, "reverse", number, 1)])
            await ledger.drop_group(number, reason, "zero_advantage" if reason is DropReason.FILTERED else "")

    with RunStore.open(tmp_path / "run") as store:
        ledger = Ledger.open(store)
        asyncio.run(drop(ledger))
        assert background.describe_recent_drops(ledger, ledger.count_by_state()["dropped"]) == text
