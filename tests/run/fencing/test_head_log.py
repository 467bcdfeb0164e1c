"""Of several heads of one run exactly one history counts, however their steps interleave."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import ProcessReplaced, StorageFailed
from ramify.run.fencing.head_log import HeadLog, LogPosition
from tests.support.fencing_simulation import Storage

pytestmark = pytest.mark.promise


class InterruptedStorage(Storage):
    """Storage that lets other parties act before each creation, as if the creator was paused."""

    __slots__ = ("interruptions",)

    def __init__(self, interruptions):
        super().__init__()
        self.interruptions = interruptions

    def create(self, name, data):
        if self.interruptions:
            interrupt = self.interruptions.pop(0)
            remaining, self.interruptions = self.interruptions, []  # those who interrupt are not interrupted
            interrupt()
            self.interruptions = remaining
        return super().create(name, data)


class SimpleHead:
    """A head that appends numbered entries until it is replaced."""

    def __init__(self, log, name):
        self.log, self.name, self.acknowledged, self.is_busy = log, name, [], False
        self.token, self.base = log.claim_term()

    def append(self):
        position = LogPosition(self.token.term, len(self.acknowledged))
        data = f"{self.name}:{position.number}".encode()
        if not self.is_busy:  # a head makes one entry after another
            self.is_busy = True
            self.log.append(position, data)
            self.is_busy = False
            self.acknowledged.append((position, data))


def test_new_head_continues_after_the_last_entry():
    log = HeadLog(Storage())
    first = SimpleHead(log, "a")
    assert (first.token.term, first.base) == (0, None)
    first.append(), first.append()
    second = SimpleHead(log, "b")
    assert (second.token.term, second.base) == (1, LogPosition(0, 1))
    with pytest.raises(ProcessReplaced, match="term 0 was ended at entry 2"):
        first.append()
    second.append()
    assert [data for _, data in log.iter_entries()] == [b"a:0", b"a:1", b"b:0"]


def test_head_without_entries_is_continued_where_it_began():
    log = HeadLog(Storage())
    SimpleHead(log, "a").append()
    SimpleHead(log, "b")
    assert SimpleHead(log, "c").base == LogPosition(0, 0)
    assert SimpleHead(log, "d").base == LogPosition(0, 0)
    assert [data for _, data in log.iter_entries()] == [b"a:0"]


def test_append_may_be_repeated():
    log = HeadLog(Storage())
    head = SimpleHead(log, "a")
    head.append()
    log.append(*head.acknowledged[0])
    assert len(list(log.iter_entries())) == 1


def test_missing_term_is_named():
    with pytest.raises(StorageFailed, match="term/3 is missing"):
        HeadLog(Storage()).read_base(3)


def test_missing_entry_of_the_history_is_named():
    storage = Storage()
    log = HeadLog(storage)
    first = SimpleHead(log, "a")
    for _ in range(3):
        first.append()
    SimpleHead(log, "b").append()
    assert len(list(log.iter_entries())) == 4
    del storage.names["ledger/0/1"]
    with pytest.raises(StorageFailed, match="ledger/0/1 is missing"):
        list(log.iter_entries())
    del storage.names["ledger/0/0"]
    with pytest.raises(StorageFailed, match="ledger/0/0 is missing"):
        list(log.iter_entries())


ACTIONS = ("append", "claim", "nothing")


@given(st.lists(st.sampled_from(ACTIONS), max_size=12), st.lists(st.sampled_from(ACTIONS), max_size=8))
def test_acknowledged_entries_are_never_lost_and_one_chain_counts(interruptions, actions):
    storage = InterruptedStorage([])
    log, heads = HeadLog(storage), []

    def act(name):
        try:
            if name == "claim" or not heads:
                heads.append(SimpleHead(log, f"head{len(heads)}-{len(storage.names)}"))
            elif name == "append":
                heads[-1].append()
                if len(heads) > 1:
                    heads[-2].append()
        except ProcessReplaced:
            pass

    act("claim")
    storage.interruptions = [lambda name=name: act(name) for name in interruptions]
    for name in actions:
        act(name)
    counted = list(log.iter_entries())
    assert counted == sorted(counted)
    acknowledged = {entry for head in heads for entry in head.acknowledged}
    assert acknowledged <= set(counted)  # also by heads that were replaced later
