"""The wire form of a failure: plain data that turns back into the exception it came from.

An exception dies with its process, and pickling it would need the sender's code on the other side. A `Failure` is what
remains true elsewhere: the name with its blame, the message, the traceback where code raised it, and the causes.
`Failure.of` runs while something is already going wrong, so it never raises: causes are bounded and may loop,
messages may be unprintable or not unicode, stacks may be a thousand frames deep.
"""

import traceback

import msgspec

from ramify.errors.base import Blame, RamifyError, failure_classes
from ramify.errors.taxonomy import UnknownFailure

MAX_CAUSES = 16  # failure and causes together
MAX_FRAMES = 32  # the innermost ones are kept: they are where it was raised


class Failure(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One failure and, through `cause`, what led to it.

    The name of an exception that is not ours is its full one (`builtins.ValueError`). Names of ours have no dot, so the
    two cannot be confused.
    """

    name: str
    message: str
    blame: Blame
    retryable: bool
    traceback: str | None = None
    cause: "Failure | None" = None

    @classmethod
    def from_exception(cls, exc: BaseException, *, wrap_as: type[RamifyError] | None = None) -> "Failure":
        """The wire form of `exc` and its causes.

        An exception that is not ours says nothing about blame; only the caller knows whose code was running. With
        `default` (an env server says `EnvironmentFault` around hooks) it becomes the cause of such a failure. Without,
        it is reported under its own full name, blamed on the system and not retried.
        """
        failure: Failure | None = None
        for link in reversed(_cause_chain(exc)):
            failure = _convert(link, failure)
        assert failure is not None  # a chain holds at least `exc`
        if wrap_as is None or isinstance(exc, RamifyError):
            return failure
        message = f"{type(exc).__name__}: {failure.message}"
        return Failure(wrap_as.name, message, wrap_as.blame, wrap_as.retryable, cause=failure)

    def to_exception(self) -> RamifyError:
        """The exception again, of the class that bears the name, or an `UnknownFailure` that keeps the name."""
        known = failure_classes().get(self.name)
        if known is None or known is UnknownFailure:
            error = UnknownFailure(self.message, name=self.name, blame=self.blame, retryable=self.retryable)
        else:
            error = known(self.message)
        error.__cause__ = None if self.cause is None else self.cause.to_exception()
        if self.traceback is not None:
            error.remote_traceback = self.traceback
            error.add_note(f"raised in another process:\n{self.traceback}")
        return error


def _cause_chain(exc: BaseException) -> list[BaseException]:
    """`exc` and its causes, outermost first, as Python itself would print them."""
    chain: list[BaseException] = []
    link: BaseException | None = exc
    while link is not None and len(chain) < MAX_CAUSES and not any(link is seen for seen in chain):
        chain.append(link)
        implied = None if link.__suppress_context__ else link.__context__
        link = implied if link.__cause__ is None else link.__cause__
    return chain


def _convert(exc: BaseException, cause: Failure | None) -> Failure:
    if isinstance(exc, RamifyError):
        # The first raise tells more than the place where a received failure was raised again.
        where = exc.remote_traceback or _format_traceback(exc)
        return Failure(exc.name, safe_message(exc), exc.blame, exc.retryable, where, cause)
    kind = type(exc)
    return Failure(
        f"{kind.__module__}.{kind.__qualname__}", safe_message(exc), "system", False, _format_traceback(exc), cause
    )


def _format_traceback(exc: BaseException) -> str | None:
    if exc.__traceback__ is None:
        return None
    frames = traceback.format_tb(exc.__traceback__, limit=-MAX_FRAMES)
    return _escape_surrogates(
        f"Traceback (most recent call last):\n{''.join(frames)}{type(exc).__name__}: {safe_message(exc)}\n"
    )


def safe_message(exc: BaseException) -> str:
    """Return the text of an exception; never raises, whatever its `__str__` does."""
    try:
        return _escape_surrogates(str(exc.message if isinstance(exc, RamifyError) else exc))
    except Exception as broken:  # noqa: BLE001 - the exception's own __str__ may do anything
        return f"<{type(exc).__name__} that cannot print itself: {type(broken).__name__}>"


def _escape_surrogates(text: str) -> str:
    """`text` without lone surrogates (from undecodable file names), which no encoder accepts."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
