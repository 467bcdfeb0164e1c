"""The failures: every failure of a run has one name, the same in code, logs, ledger and docs.

The tree has three branches, by what follows from a failure (`docs/errors.md` draws it):

- `PolicyFailure`: the agent caused it. The rollout is finished, scored and trained on.
- `TransientFailure`: the agent did not cause it, and the same operation may succeed when it is repeated.
- `PermanentFailure`: neither the agent nor a repetition changes it; somebody has to act first.

A leaf is a class of its own if code or users react to it in their own way. Its docstring says what happened and, after
a blank line, what to do. `Failure` is the serialized form. This package imports nothing else of ramify.
"""

import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

Blame = Literal["policy", "system"]

MAX_CAUSES = 16  # of a failure, including itself
MAX_FRAMES = 32  # of a traceback; the innermost frames are kept

_failure_classes: dict[str, type["RamifyError"]] = {}


def failure_classes() -> Mapping[str, type["RamifyError"]]:
    """Return a read-only view of all failure classes defined so far, by name."""
    return MappingProxyType(_failure_classes)


class RamifyError(Exception):
    """A failure with a name, which is unique: it identifies the failure in other processes.

    It is constructed from its message and `details`, so that any process can rebuild it. `remote_traceback` is the
    traceback in the process that raised it, if that is another one.
    """

    name: str = "RamifyError"
    blame: Blame
    retryable: bool
    remote_traceback: str | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def details(self) -> dict[str, Any]:
        """What a handler reads besides the message: plain data, and further arguments of the class."""
        return {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__name__ in _failure_classes:
            module = _failure_classes[cls.__name__].__module__
            raise TypeError(f"failure {cls.__name__} is already defined in {module}; names are unique")
        if not hasattr(cls, "blame"):
            raise TypeError(f"failure {cls.__name__} must derive from one of {', '.join(_BRANCHES)}")
        cls.name = cls.__name__
        if cls.name not in _BRANCHES:
            _failure_classes[cls.name] = cls


_BRANCHES = ("PolicyFailure", "TransientFailure", "PermanentFailure")


class PolicyFailure(RamifyError):
    """A failure that the agent caused: the rollout is finished, scored and trained on."""

    blame, retryable = "policy", False


class TransientFailure(RamifyError):
    """A failure of the system that may not happen again: the operation is repeated."""

    blame, retryable = "system", True


class PermanentFailure(RamifyError):
    """A failure of the system that happens again until somebody acts: the attempt, the request or the run ends."""

    blame, retryable = "system", False


# -- caused by the agent -----------------------------------------------------------------------------------------------


class ContextOverflow(PolicyFailure):
    """The conversation no longer fits the model's context.

    Nothing if it is rare; otherwise raise `seq_len`, or use a harness that compacts its history.
    """


class BudgetExceeded(PolicyFailure):
    """The rollout used up its turns, its tokens or its time, not counting the stalls of its engine.

    Nothing if it is rare; otherwise raise the budget of the source or the timeout of the harness, or reward finishing
    early. The timing of the trace shows slow agents.
    """


class MalformedCall(PolicyFailure):
    """The policy wrote a tool call or reply that could not be parsed, and the harness stopped.

    Read the last message of the trace; check that renderer and tool format fit the model.
    """


class AgentFailed(PolicyFailure):
    """The agent program exited with an error, or its requests blocked two workers, so that it is not started again.

    Read the exit code or the stack in the message, with the end of the output; run the harness alone to reproduce it.
    """


class ImageInvalid(PolicyFailure):
    """The agent sent an image that is damaged, too large, not a PNG, JPEG or WebP, or that the model cannot take.

    Fix the agent program: the message says what is wrong. A bad image of a task is an `EnvironmentFault` instead.
    """


class QuotaExceeded(PolicyFailure):
    """An agent has more open requests than the gateway allows one rollout.

    Send fewer requests at once; SDKs wait and send a refused request again.
    """


# -- may succeed when repeated ----------------------------------------------------------------------------------------


class ProviderError(TransientFailure):
    """A model server returned an error, did not respond, or made no progress for longer than a rollout may wait.

    Check the server's process, health and log; the attempt is retried.
    """


class ProcessDied(TransientFailure):
    """A process exited or hung: a worker that held an attempt, or a process of a run, too often.

    Read the exit code and the end of its log in the message, often out of memory. An attempt is retried in another
    worker; a run is resumed by the same command.
    """


class SandboxError(TransientFailure):
    """The runtime could not start or reach the sandbox of an agent, or lost it.

    Run `ramify doctor`, which tries bubblewrap, and check image, resources and free disk; the attempt is retried.
    """


class JudgeError(TransientFailure):
    """A judge could not be reached, or its verdict could not be read even when repaired, so a reward is missing.

    Check the judge's endpoint, its `timeout` and whether its model writes JSON; the attempt is retried.
    """


class EnvironmentFault(TransientFailure):
    """Code of the environment raised an exception: a reward, a setup or another hook.

    Fix the code at the file and line that the message shows; `ramify validate` runs it without a model.
    """


class DeadlineExceeded(TransientFailure):
    """An operation did not finish before its deadline.

    The message names what was waited for; look for the cause there.
    """


class WeightsReplaced(TransientFailure):
    """A newer version was published before an engine had loaded this one; the old weights stay in use.

    Nothing: the orchestrator loads the newer version.
    """


class WeightsMissing(TransientFailure):
    """An engine has no complete weights: a copy from the trainer's memory broke off. Its requests wait.

    Nothing: the engine loads the version's directory, or the orchestrator sends a newer version.
    """


class ImageMissing(TransientFailure):
    """An inference server was asked about an image that it does not have, or no longer has.

    Nothing: the client uploads the image again. If it stays, raise the server's inference.image_cache_mib.
    """

    def __init__(self, message: str, hashes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.hashes = tuple(hashes)  # of the missing images

    @property
    def details(self) -> dict[str, Any]:
        """The hashes of the missing images."""
        return {"hashes": self.hashes} if self.hashes else {}


class PeerLost(TransientFailure):
    """The peer of a connection does not respond, is closing, or was restarted and lost the request.

    Look at its log; send the request again once it is back: the connection is restored automatically.
    """


class QueueFull(TransientFailure):
    """The request queue of a server is full.

    Send the request again later or elsewhere; if it happens often, raise the server's `max_queued_requests` or lower
    the concurrency.
    """


class DataCorrupt(TransientFailure):
    """Encoded data, such as a trace or a batch, is truncated, changed, out of order, or something else.

    What was sent is requested again. If it is a file, use another copy; without one, run the attempt again.
    """


class RunBusy(TransientFailure):
    """Another process uses the run directory.

    Wait for that process, stop it, or choose another run; the message says which process it is.
    """


class PortTaken(TransientFailure):
    """A port that a process of the run should listen on is in use.

    End the process that uses it, or choose another `launch.base_port`; 0 takes free ports.
    """


class PacksTooLarge(TransientFailure):
    """One of several ranks of a trainer ran out of GPU memory.

    Nothing: the trainer is started again, with more recomputed layers or smaller packs; the message says which.
    """


# -- happens again until somebody acts --------------------------------------------------------------------------------


class ConfigProblem(NamedTuple):
    """What is wrong with the value of one key, and the file or flag that set it, where they are known."""

    key: str
    text: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.key and f'{self.key}: '}{self.text}{self.origin and f' ({self.origin})'}"


class ConfigInvalid(PermanentFailure):
    """The configuration has invalid keys or values; commands exit with code 2.

    The message lists problems with their keys, and suggests valid keys; fix them and start again.
    """

    def __init__(self, message: str = "", *, key: str = "", problems: Sequence[Sequence[str]] = ()) -> None:
        """Raise one problem, with its key if it has one, or all `problems` of a configuration."""
        self.problems = [ConfigProblem(*problem) for problem in problems] or [ConfigProblem(key, message)]
        count = len(self.problems)
        lines = [f"{count} problems in the configuration:", *(f"  {problem}" for problem in self.problems)]
        super().__init__("\n".join(lines) if count > 1 else str(self.problems[0]))

    @property
    def details(self) -> dict[str, Any]:
        """The problems, unless the message says it all."""
        return {"problems": self.problems} if any(problem.key for problem in self.problems) else {}


class EnvironmentChanged(ConfigInvalid):
    """The code, configuration or tasks of an environment have changed since the run's stored rollouts.

    The message lists what differs: restore it, start a new run with `--fresh`, or resume with `--accept-changes`.
    `ramify replay RUN` scores the stored rollouts of an eval again with the new version.
    """


class ClusterTooSmall(ConfigInvalid):
    """This machine or cluster does not have the cores, GPUs or memory that the run needs.

    The message lists what does not fit, and what is left or which settings would fit: use them, lower the counts of
    `[cluster]`, or add nodes.
    """


class GpuMemoryFull(PermanentFailure):
    """The trainer's GPU has no room for a step, even with all layers recomputed and small packs.

    The message says what did not fit: use LoRA or 8-bit moments, a shorter `seq_len`, more GPUs, or leave the engines
    on the same GPU less memory.
    """


class EngineIncompatible(PermanentFailure):
    """A server cannot be trained with: no token ids, logprobs of another distribution, or another tokenizer.

    Serve the policy with the native engine or vLLM (`--logprobs-mode processed_logprobs`) and the same model, or use
    the server for evals only.
    """


class ModelNotFound(PermanentFailure):
    """No model was found under this name.

    Use a directory, a packaged model, or a Hugging Face id; the message says what was tried and how to download it.
    """


class ModelUnsupported(PermanentFailure):
    """A model uses a feature that the native engine or the trainer does not support.

    The message names it; serve this model with vLLM, or train another.
    """


class WeightsRefused(PermanentFailure):
    """Published weights are incomplete, changed, or belong to another model; the old weights stay in use.

    Publish again; the message names the first file or tensor that is wrong.
    """


class TemplateRefused(PermanentFailure):
    """The model's chat template fails, or refuses the conversation.

    Read the template's error in the message; reorder the messages, or set `template_args` or a family in `renderer`.
    """


class RequestInvalid(PermanentFailure):
    """A request to a server has an invalid field.

    Fix the caller: the message names the field, what was expected and what was given.
    """


class RequestCancelled(PermanentFailure):
    """A request was cancelled, or its sender is gone.

    Nothing if you cancelled it; otherwise the message says why it was cancelled.
    """


class PeerRefused(PermanentFailure):
    """A server refused the connection or request: another protocol version, a wrong secret, or a foreign web page.

    The message says why. For the gateway, use the `api_key` of the rollout's endpoint while the rollout runs; for a
    host name that the server does not know, add it to `allowed_hosts`.
    """


class ProcessReplaced(PeerRefused):
    """A newer copy of this process has taken over, so nothing that this one does counts any more.

    Nothing: the newer copy continues the work, and this one exits. Look at the log for why it was replaced.
    """


class OperationInvalid(PermanentFailure):
    """An operation would break a rule of the trace or of the ledger, which is unchanged.

    Fix the caller: the message names the rule, what was expected and what was given. A trace holds plain data only:
    numbers, text, lists, tables.
    """


class ValueNotFinite(OperationInvalid):
    """A token has an advantage, weight or logprob that is not a finite float32; its group is dropped.

    Bound the reward, or look for a fault of the engine: the message names the token, the ledger has the rewards.
    """


class CheckpointRefused(PermanentFailure):
    """A checkpoint cannot be loaded: it is missing, damaged, or belongs to another model or optimizer.

    If it is damaged, run the `ramify rollback` command in the message; otherwise use the configuration that wrote it.
    """


class StorageFull(PermanentFailure):
    """The disk of the run, or the quota of this user, is full.

    Free some space and repeat the command: what was finished is kept.
    """


class StorageFailed(PermanentFailure):
    """The run directory or shared storage could not be read or written, or has not answered for ten minutes.

    Read the reason in the message; check permissions, mounts and the disk, then repeat the command.
    """


class RunDamaged(PermanentFailure):
    """The index of a run is missing, damaged or empty, or another version of Ramify wrote the run or a trace.

    Nothing was changed: use that version, restore `run.sqlite` from a copy, or start a new run with `--fresh`, which
    deletes nothing.
    """


class RunStalled(PermanentFailure):
    """A run made no progress: it waited too long, its tasks ended, or no group of many could be trained.

    The message says who waits for whom, as does `stalled.txt` in the run, or counts why groups were dropped. Equal
    rewards give no advantage: compare the replies with the reward, and use partial credit or easier tasks.
    """


class UnknownFailure(PermanentFailure):
    """A failure whose name has no class in this version, or an exception that is not a RamifyError.

    It keeps the `name`, `blame` and `retryable` it was sent with; upgrade the older side, or read the traceback.
    """

    def __init__(
        self, message: str, *, name: str = "UnknownFailure", blame: Blame = "system", retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.name, self.blame, self.retryable = name, blame, retryable

    def __str__(self) -> str:
        return self.message if self.name == "UnknownFailure" else f"{self.name}: {self.message}"


# -- the serialized form ----------------------------------------------------------------------------------------------


class Failure(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A failure as plain data, which becomes an exception again in another process, and the failure that led to it.

    Unpickling an exception would need the sender's code in the receiver. The name of an exception that is not a
    RamifyError is its qualified name (`builtins.ValueError`). Names of RamifyErrors have no dot, so the two cannot be
    confused.
    """

    name: str
    message: str
    blame: Blame
    retryable: bool
    traceback: str | None = None
    cause: "Failure | None" = None
    details: dict[str, Any] = {}

    @classmethod
    def from_exception(cls, exc: BaseException, *, wrap_as: type[RamifyError] | None = None) -> "Failure":
        """Convert `exc` and its causes.

        An exception that is not a RamifyError has no blame; only the caller knows whose code was running. With
        `wrap_as` (an env server uses `EnvironmentFault` for hooks) it becomes the cause of a failure of that class.
        Otherwise it has its qualified name, is blamed on the system and is not retryable.

        This runs while an error is handled, so it must not raise: chains of causes may be cyclic, messages may be
        unprintable or not unicode, stacks may be very deep.
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
            error = cls(self.message, **self.details)
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
        # The original traceback is more useful than the traceback of raising a received failure again.
        text = exc.remote_traceback or _format_traceback(exc)
        return Failure(exc.name, safe_message(exc), exc.blame, exc.retryable, text, cause, exc.details)
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
