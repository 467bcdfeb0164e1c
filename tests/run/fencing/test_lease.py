"""What a holder and a head conclude from renewals and grants."""

import pytest

from ramify.core.errors import ProcessReplaced
from ramify.run.fencing.lease import LeaseHolder, LeaseTerms, RoleLeases
from ramify.run.fencing.token import FencingToken

TERMS = LeaseTerms(duration=10.0, max_drift=0.01, slack=2.0)
FIRST, SECOND = FencingToken(0, 0), FencingToken(0, 1)


@pytest.mark.promise
def test_lease_is_counted_from_when_the_granted_renewal_was_sent():
    lease = LeaseHolder(TERMS)
    assert lease.is_expired(0.0)  # nothing runs before the first grant
    first, second = lease.send_renewal(100.0), lease.send_renewal(104.0)
    lease.record_grant(second)
    assert lease.expires_at == 114.0
    lease.record_grant(first)  # it arrives late
    lease.record_grant(second)  # and this one twice
    assert lease.expires_at == 114.0
    assert not lease.is_expired(113.9) and lease.is_expired(114.0)


@pytest.mark.promise
def test_replacement_waits_for_lease_drift_and_slack_of_every_rank():
    leases = RoleLeases("trainer", FIRST, TERMS, num_ranks=2, now=0.0)
    leases.grant(FIRST, 0, now=5.0)
    leases.grant(FIRST, 1, now=8.0)
    assert leases.replaceable_at == 8.0 + 10.0 * 1.02 + 2.0
    leases.record_exit(FIRST, 1)
    assert leases.replaceable_at == 5.0 + 10.0 * 1.02 + 2.0
    with pytest.raises(ValueError, match="may still run"):
        leases.replace(now=6.0)
    leases.record_exit(FIRST, 0)
    assert leases.replace(now=6.0) == SECOND


def test_gang_that_lost_a_rank_is_granted_nothing_more():
    leases = RoleLeases("trainer", FIRST, TERMS, num_ranks=2, now=0.0)
    leases.record_exit(FIRST, 0)
    with pytest.raises(ProcessReplaced, match="is being replaced"):
        leases.grant(FIRST, 1, now=1.0)


def test_rank_that_was_silent_too_long_is_not_revived():
    leases = RoleLeases("env", FIRST, TERMS, now=0.0)
    with pytest.raises(ProcessReplaced):
        leases.grant(FIRST, 0, now=TERMS.replacement_delay)
    assert leases.is_ending


def test_older_copy_is_neither_granted_nor_heard():
    leases = RoleLeases("env", FIRST, TERMS, now=0.0)
    leases.record_exit(FIRST, 0)
    leases.replace(now=1.0)
    with pytest.raises(ProcessReplaced, match="env 0 may not act"):
        leases.grant(FIRST, 0, now=2.0)
    leases.record_exit(FIRST, 0)  # repeated: it says nothing about the new copy
    assert not leases.is_ending and leases.replaceable_at == 1.0 + TERMS.replacement_delay


@pytest.mark.parametrize("terms", [(0.0, 0.001, 1.0), (60.0, 0.5, 1.0), (60.0, 0.01, 0.0)])
def test_terms_that_promise_nothing_are_refused(terms):
    with pytest.raises(ValueError, match="expected duration > 0"):
        LeaseTerms(*terms)
