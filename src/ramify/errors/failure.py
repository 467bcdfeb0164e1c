"""The serialized form of a failure, which can be turned back into an exception in another process.

Unpickling an exception would need the sender's code in the receiver. A `Failure` is plain data: the name with its
blame, the message, the traceback, and the causes. `Failure.from_exception` runs while an error is handled, so it must
not raise: chains of causes may be cyclic, messages may be unprintable or not unicode, stacks may be very deep.
"""

import traceback

import msgspec

from ramify.errors.base import Blame, RamifyError, failure_classes
from ramify.errors.taxonomy import UnknownFailure

MAX_CAUSES = 16  # including the failure itself
MAX_FRAMES = 32  # the innermost frames are kept


class Failure(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A failure and, in `cause`, the failure that led to it.

    The name of an exception that is not a RamifyError is its qualified name (`builtins.ValueError`). Names of
    RamifyErrors have no dot, so the two cannot be confused.
    """

    name: str
    message: str
    blame: Blame
    retryable: bool
    traceback: str | None = None
    cause: "Failure | None" = None

    @classmethod
    def from_exception(cls, exc: BaseException, *, wrap_as: type[RamifyError] | None = None) -> "Failure":
        """Convert `exc` and its causes.

        An exception that is not a RamifyError has no blame; only the caller knows whose code was running. With
        `wrap_as` (an env server uses `EnvironmentFault` for hooks) it becomes the cause of a failure of that class.
        Otherwise it has its qualified name, is blamed on the system and is not retryable.
        """
        failure: Failure | None = None
        for error in reversed(_cause_chain(exc)):
            failure = _convert(error, failure)
        assert failure is not None  # the chain contains `exc`
        if wrap_as is None or isinstance(exc, RamifyError):
            return failure
        message = f"{type(exc).__name__}: {failure.message}"
        return Failure(wrap_as.name, message, wrap_as.blame, wrap_as.retryable, cause=failure)

    def to_exception(self) -> RamifyError:
        """Return an exception of the class with this name, or an `UnknownFailure` that keeps the name."""
        cls = failure_classes().get(self.name)
        if cls is None or cls is UnknownFailure:
            error = UnknownFailure(self.message, name=self.name, blame=self.blame, retryable=self.retryable)
        else:
            error = cls(self.message)
        error.__cause__ = None if self.cause is None else self.cause.to_exception()
        if self.traceback is not None:
            error.remote_traceback = self.traceback
            error.add_note(f"raised in another process:\n{self.traceback}")
        return error


def _cause_chain(exc: BaseException) -> list[BaseException]:
    """Return `exc` and its causes, outermost first, as Python would print them."""
    chain: list[BaseException] = []
    error: BaseException | None = exc
    while error is not None and len(chain) < MAX_CAUSES and not any(error is seen for seen in chain):
        chain.append(error)
        context = None if error.__suppress_context__ else error.__context__
        error = context if error.__cause__ is None else error.__cause__
    return chain


def _convert(exc: BaseException, cause: Failure | None) -> Failure:
    if isinstance(exc, RamifyError):
        # The traceback of the original raise is more useful than that of raising a received failure again.
        text = exc.remote_traceback or _format_traceback(exc)
        return Failure(exc.name, safe_message(exc), exc.blame, exc.retryable, text, cause)
    name = f"{type(exc).__module__}.{type(exc).__qualname__}"
    return Failure(name, safe_message(exc), "system", False, _format_traceback(exc), cause)


def _format_traceback(exc: BaseException) -> str | None:
    if exc.__traceback__ is None:
        return None
    frames = traceback.format_tb(exc.__traceback__, limit=-MAX_FRAMES)
    return _escape_surrogates(
        f"Traceback (most recent call last):\n{''.join(frames)}{type(exc).__name__}: {safe_message(exc)}\n"
    )


def safe_message(exc: BaseException) -> str:
    """Return the message of an exception; never raises, whatever its `__str__` does."""
    try:
        return _escape_surrogates(str(exc.message if isinstance(exc, RamifyError) else exc))
    except Exception as error:  # noqa: BLE001 - the exception's own __str__ may raise anything
        return f"<{type(exc).__name__} whose message cannot be printed: {type(error).__name__}>"


def _escape_surrogates(text: str) -> str:
    """Escape lone surrogates (from undecodable file names), which cannot be encoded."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
