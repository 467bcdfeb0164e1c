"""Leases: how long two copies of a process can overlap.

    watcher --renewal n, sent at s--> head: granted at g        the lease ends at s + L on the watcher's clock
    head: no grant since g  ->  a replacement may start at g + L(1 + 2 drift) + slack on the head's clock

The lease is counted from when its holder *sent* the renewal, because the holder cannot know how long the grant was on
its way. The holder is a watcher on the process's node, not the process: it kills the process tree when the lease ends,
also while the process is stopped. All times come from a clock that runs while the machine is suspended
(`read_lease_clock`), and are only compared with times of the same machine.
"""

import time
from dataclasses import dataclass

from ramify.core.errors import ProcessReplaced
from ramify.run.fencing.token import FencingToken, check_token


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The terms of a lease, which holder and head both know; times in seconds."""

    duration: float = 60.0  # L: how long a granted renewal is valid
    max_drift: float = 0.001  # how far the rate of a clock may be from 1
    slack: float = 10.0  # time for the watcher to kill the process tree after the lease has ended

    def __post_init__(self) -> None:
        second_order = self.duration * 2 * self.max_drift**2 / (1 - self.max_drift)
        if self.duration <= 0 or not 0 <= self.max_drift < 0.1 or self.slack <= second_order:
            raise ValueError(f"{self}: expected duration > 0, max_drift in [0, 0.1), slack > {second_order:g}")

    @property
    def replacement_delay(self) -> float:
        """How long the head waits after the last grant before it starts a replacement."""
        return self.duration * (1 + 2 * self.max_drift) + self.slack


def read_lease_clock() -> float:
    """Return the time of this machine's clock for leases, which starts at boot and runs while it is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseHolder:
    """The lease as the watcher of one process sees it. The process may run only while it is not expired.

    The process is started after the first grant: a command to start it that was delayed on its way then has no effect.
    """

    def __init__(self, terms: LeaseTerms) -> None:
        self._terms = terms
        self._sent_at: dict[int, float] = {}  # of the renewals that may still extend the lease
        self._num_sent = 0
        self.expires_at: float | None = None
        """When the lease ends; None before the first grant."""

    def send_renewal(self, now: float) -> int:
        """Return the number of a renewal that is sent now; it comes back with the grant."""
        self._num_sent += 1
        self._sent_at[self._num_sent] = now
        return self._num_sent

    def record_grant(self, renewal: int) -> None:
        """Extend the lease to L after this renewal was sent. Grants may arrive late, twice, or in any order."""
        if renewal in self._sent_at:
            self.expires_at = self._sent_at[renewal] + self._terms.duration
            self._sent_at = {number: sent_at for number, sent_at in self._sent_at.items() if number > renewal}

    def is_expired(self, now: float) -> bool:
        """Return whether the process must be dead now."""
        return self.expires_at is None or now >= self.expires_at


class RoleLeases:
    """The leases of one role as the head sees them: one per rank for a gang, else of rank 0 alone.

    `token` is the newest token of the role. Its start counts as a grant, and so does a restart of the head, which
    forgets the grants before it. A gang ends as a whole: once a rank is lost, no rank is granted renewals any more.
    """

    def __init__(self, role: str, token: FencingToken, terms: LeaseTerms, *, num_ranks: int = 1, now: float) -> None:
        self.role, self.token, self._terms, self.num_ranks = role, token, terms, num_ranks
        self.is_ending = False
        self._granted_at = dict.fromkeys(range(num_ranks), now)  # of the ranks that may be running

    def begin(self, now: float) -> None:
        """Count all leases from now on. Call it when no rank has been started yet."""
        self._granted_at = dict.fromkeys(range(self.num_ranks), now)

    def grant(self, token: FencingToken, rank: int, now: float) -> None:
        """Record that the renewal of a rank is granted. Raises ProcessReplaced for a copy that is or will be replaced.

        A rank whose lease has ended is never revived: its watcher may have killed it already.
        """
        check_token(self.role, token, self.token)
        self.end_if_lapsed(now)
        if self.is_ending:
            raise ProcessReplaced(f"{self.role} {token} is being replaced; this copy must exit")
        self._granted_at[rank] = now

    def record_exit(self, token: FencingToken, rank: int) -> None:
        """Record that the process tree of a rank is empty, and that its watcher starts none again under this token."""
        if token == self.token:
            self._granted_at.pop(rank, None)
            self.is_ending = True

    def end_if_lapsed(self, now: float) -> None:
        """End the role if a rank has not been granted a renewal for too long."""
        if any(now >= granted_at + self._terms.replacement_delay for granted_at in self._granted_at.values()):
            self.is_ending = True

    def dead_at(self, rank: int) -> float:
        """When a rank is dead for certain, unless it is granted another renewal; minus infinity if it has exited."""
        return self._granted_at.get(rank, float("-inf")) + self._terms.replacement_delay

    @property
    def replaceable_at(self) -> float:
        """When every rank is dead for certain; minus infinity if all of them have exited."""
        return max(map(self.dead_at, range(self.num_ranks)))

    def replace(self, now: float) -> FencingToken:
        """Begin the next incarnation of the role and return its token; older copies get no more grants.

        Store the token before a process uses it. Raises ValueError before `replaceable_at`.
        """
        if now < self.replaceable_at:
            raise ValueError(f"{self.role} may still run: it can be replaced in {self.replaceable_at - now:.1f} s")
        self.token, self.is_ending = self.token.next_incarnation(), False
        self._granted_at = dict.fromkeys(range(self.num_ranks), now)
        return self.token
