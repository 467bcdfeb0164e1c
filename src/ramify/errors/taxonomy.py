"""The names. Each docstring says what happened and, after a blank line, what to do; `docs/errors.md` repeats both.

*Policy* failures are things the agent did: the rollout is finished, scored and trained on. *System* failures are things
that happened to it: the attempt says nothing about the policy, so it is run again or leaves its group. `retryable` says
whether doing the same thing once more can succeed.
"""

from ramify.errors.base import Blame, RamifyError


class ContextOverflow(RamifyError, blame="policy", retryable=False):
    """The conversation no longer fits the model's context.

    Nothing if it is rare; otherwise raise `seq_len`, or use a harness that compacts its history.
    """


class BudgetExceeded(RamifyError, blame="policy", retryable=False):
    """The rollout used up its turns or tokens.

    Nothing if it is rare; otherwise raise the budget of the source, or reward finishing early.
    """


class RolloutDeadline(RamifyError, blame="policy", retryable=False):
    """The rollout took longer than its task or harness allows, not counting the time its engine stood still.

    Raise the harness timeout if agents are slow but right; look at the timing of the trace first.
    """


class MalformedCall(RamifyError, blame="policy", retryable=False):
    """The policy wrote a tool call or reply that could not be parsed, and the harness gave up on it.

    Read the last message of the trace; check that renderer and tool format fit the model.
    """


class AgentExit(RamifyError, blame="policy", retryable=False):
    """The agent program ended with an error of its own.

    Read the exit code and the end of its output in the message; run the harness alone to reproduce it.
    """


class ProviderError(RamifyError, blame="system", retryable=True):
    """A model server answered with an error, or not at all.

    Check the server's health and log; the attempt is run again.
    """


class EngineStalled(RamifyError, blame="system", retryable=True):
    """The inference engine made no progress for longer than a rollout may wait for it.

    Look at the engine's process and log: it is stopped, paused, hung or away; the attempt is run again.
    """


class WorkerDied(RamifyError, blame="system", retryable=True):
    """A worker process exited or hung while it held the attempt.

    Look for its exit code and stack in the log, often memory; the attempt is run again elsewhere.
    """


class SandboxError(RamifyError, blame="system", retryable=True):
    """The runtime could not start, reach or keep the box an agent runs in.

    Run `ramify doctor`, and check image, resources and free disk; the attempt is run again.
    """


class JudgeError(RamifyError, blame="system", retryable=True):
    """A judge could not be reached, or its verdict could not be read, so a reward is missing.

    Check the judge's endpoint and its prompt; the attempt is run again.
    """


class EnvironmentFault(RamifyError, blame="system", retryable=True):
    """Code of the environment raised: a reward, a tool, a setup or another hook.

    Fix the code at the file and line that the message shows; `ramify validate` runs it without a model.
    """


class DeadlineExceeded(RamifyError, blame="system", retryable=True):
    """A wait of ours passed its deadline.

    The message names what was waited for and its owner; look there, not here.
    """


class TokensRequired(RamifyError, blame="system", retryable=False):
    """A source is trained on, but its endpoint gives no token ids and logprobs.

    Serve the policy with an engine that does, or use the endpoint for evals only.
    """


class LogprobMismatch(RamifyError, blame="system", retryable=False):
    """A server's logprobs are not those of the distribution it samples from, so they cannot be trained on.

    Start it so that logprobs come after temperature; for vLLM that is `--logprobs-mode processed_logprobs`.
    """


class TokenizerMismatch(RamifyError, blame="system", retryable=False):
    """Two parts that must share one tokenizer have different ones.

    Point trainer, engine and renderer at the same model.
    """


class ModelNotFound(RamifyError, blame="system", retryable=False):
    """A model's name leads to no directory with a model in it.

    Give a directory, a packaged model, or a Hugging Face id; the message says what was tried and how to get it.
    """


class ModelUnsupported(RamifyError, blame="system", retryable=False):
    """A model uses something the native engine or the trainer does not know.

    The message names it; serve this model with vLLM, or train another.
    """


class WeightsRefused(RamifyError, blame="system", retryable=False):
    """A published set of weights is incomplete, changed, or made for another model; the old weights stay.

    Publish again; the message names the first file or tensor that is wrong.
    """


class RequestInvalid(RamifyError, blame="system", retryable=False):
    """A request to a server has a field that cannot be used.

    Fix the caller: the message names the field, what was expected and what was found.
    """


class RequestCancelled(RamifyError, blame="system", retryable=False):
    """A request was taken back, or whoever made it is gone.

    Nothing if you took it back; otherwise the message says who did.
    """


class PeerLost(RamifyError, blame="system", retryable=True):
    """The process at the other end of a connection is silent, closing, or was started again and has forgotten.

    Look at its log; ask again once it is back, the connection is made again by itself.
    """


class PeerRefused(RamifyError, blame="system", retryable=False):
    """The process at the other end of a connection wants nothing to do with this one.

    The message says why: another version of the wire, another secret, or frames that make no sense.
    """


class SecretUnknown(RamifyError, blame="system", retryable=False):
    """A request to the gateway bears no secret, or that of no rollout that is running.

    Give the client the `api_key` of the rollout's endpoint; a rollout that has ended answers nobody.
    """


class OriginRefused(RamifyError, blame="system", retryable=False):
    """A control request came from a web page, or under a host name that the server does not know.

    Use a program instead of a page; a name that leads to the server goes into `allowed_hosts`, as the message says.
    """


class QueueFull(RamifyError, blame="system", retryable=True):
    """A server has as many waiting requests as it may hold.

    Send it again later or elsewhere; raise the server's `queue`, or lower the concurrency, if it happens often.
    """


class ConfigInvalid(RamifyError, blame="system", retryable=False):
    """The configuration has keys or values that cannot be used; commands exit with code 2.

    The message lists every problem with its key, and the nearest valid key; fix them and start again.
    """


class EnvironmentChanged(ConfigInvalid):
    """The code, configuration or tasks of an environment are not those that a run's stored rollouts came from.

    The message lists what differs: bring it back, begin anew with `--fresh`, or go on with `--accept-changes`.
    """


class TemplateRefused(RamifyError, blame="system", retryable=False):
    """The model's chat template cannot be run, or refuses the conversation it was given.

    Read its own words in the message; reorder the messages, or give `renderer` other `template_args` or a family.
    """


class TraceInvalid(RamifyError, blame="system", retryable=False):
    """An operation would break the message graph.

    Fix the caller: the message names the rule, what was expected and what was found.
    """


class ValueNotFinite(TraceInvalid):
    """A token would be trained with an advantage, weight or logprob that is no finite float32; its group is dropped.

    Bound the reward, or look for what is wrong with the engine: the message names the token, the ledger the rewards.
    """


class TraceCorrupt(RamifyError, blame="system", retryable=False):
    """Bytes that should be an encoded trace are cut short, changed, or something else.

    Read the trace from another copy; if there is none, the attempt has to be run again.
    """


class BatchCorrupt(RamifyError, blame="system", retryable=True):
    """Bytes that should be a batch for the trainer are cut short, changed, or something else.

    The trainer asks again; if it happens to a recorded batch, record it anew.
    """


class CheckpointRefused(RamifyError, blame="system", retryable=False):
    """A checkpoint cannot be loaded: it is missing, damaged, or of another model or optimizer.

    If it is damaged, run the `ramify rollback` of the message; otherwise use the configuration that wrote it.
    """


class SchemaUnsupported(RamifyError, blame="system", retryable=False):
    """A trace or the tables of a run were written with a newer schema than this version reads.

    Upgrade Ramify on the reading side.
    """


class ValueRefused(RamifyError, blame="system", retryable=False):
    """A value was set on a trace that cannot be encoded.

    The message names key and type; store plain data there: numbers, text, lists, tables.
    """


class CallConflict(RamifyError, blame="system", retryable=False):
    """One call id came with two different contents.

    Fix the sender: a repeat must be equal, and a new sample needs a new call id.
    """


class DeltaLost(RamifyError, blame="system", retryable=True):
    """A part of a growing trace never arrived, or arrived before the one it follows.

    Ask the sender for the whole trace again.
    """


class DeltaRepeated(RamifyError, blame="system", retryable=False):
    """A part of a growing trace arrived a second time.

    Drop it: it was already applied. Many of them mean that acknowledgements get lost.
    """


class StorageFull(RamifyError, blame="system", retryable=False):
    """The disk that holds the run has no room left, or lets us have no more of it.

    Free some space and give the same command again: what was finished is kept, the rest is run.
    """


class StorageFailed(RamifyError, blame="system", retryable=False):
    """The run directory could not be read or written.

    Read the reason in the message; check permissions, mounts and the disk itself, then give the same command again.
    """


class RunDamaged(RamifyError, blame="system", retryable=False):
    """A run's directory holds traces, checkpoints or weights, but its index is missing, damaged or empty.

    Nothing was changed: restore `run.sqlite` from a copy, or begin anew with `--fresh`, which deletes nothing.
    """


class RunBusy(RamifyError, blame="system", retryable=True):
    """The run directory is held by another process.

    Wait for that process, stop it, or choose another run; the message says which process it is.
    """


class ProcessDied(RamifyError, blame="system", retryable=True):
    """A process of a run ended again and again, more often than `launch.restarts` allows.

    Read the end of its log in the message; the same command continues the run.
    """


class PortTaken(RamifyError, blame="system", retryable=True):
    """A port that a process of the run should listen on is in use.

    End whoever holds it, or choose another `launch.base_port`; 0 takes any that are free.
    """


class TransitionRefused(RamifyError, blame="system", retryable=False):
    """The ledger was told that a group, attempt or batch is in a state that cannot follow the one it is in.

    Fix the caller: the message names the group, its state and what was asked; the ledger is unchanged.
    """


class RunStalled(RamifyError, blame="system", retryable=False):
    """A run made no progress for longer than it may, or its tasks ended before its first step.

    The message says who waits for whom, and so does `stalled.txt` in the run; look at the last of them first.
    """


class NoTrainableGroups(RamifyError, blame="system", retryable=False):
    """A run dropped `orchestrator.patience` groups in a row and could train on none of them.

    Compare the replies with the reward: equal rewards teach nothing, so give partial credit or easier tasks.
    """


class UnknownFailure(RamifyError, blame="system", retryable=False):
    """A failure without a class here: a name from another version, or an exception that is not ours.

    Its `name`, blame and retryable are those it was sent with; upgrade the older side, or read the traceback.
    """

    def __init__(
        self, message: str, *, name: str | None = None, blame: Blame | None = None, retryable: bool | None = None
    ) -> None:
        super().__init__(message)
        if name is not None:
            self.name = name
        if blame is not None:
            self.blame = blame
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        return self.message if self.name == "UnknownFailure" else f"{self.name}: {self.message}"
