"""All failure classes. Each docstring says what happened and, after a blank line, what to do.

`docs/errors.md` repeats the docstrings. *Policy* failures are caused by the agent: the rollout is finished, scored and
trained on. *System* failures are not: the attempt says nothing about the policy, so it is retried or dropped from its
group. `retryable` says whether the same operation can succeed when it is repeated.
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
    """The rollout took longer than its task or harness allows, not counting the stalls of its engine.

    Raise the harness timeout if agents are slow but correct; look at the timing of the trace first.
    """


class MalformedCall(RamifyError, blame="policy", retryable=False):
    """The policy wrote a tool call or reply that could not be parsed, and the harness gave up on it.

    Read the last message of the trace; check that renderer and tool format fit the model.
    """


class AgentExit(RamifyError, blame="policy", retryable=False):
    """The agent program exited with an error.

    Read the exit code and the end of its output in the message; run the harness alone to reproduce it.
    """


class AgentHang(RamifyError, blame="policy", retryable=False):
    """Requests of the agent blocked the event loop of two workers, so it is not started a third time.

    Read the stack in the message and the log of the env server, and report what the agent sent.
    """


class ProviderError(RamifyError, blame="system", retryable=True):
    """A model server returned an error, or did not respond.

    Check the server's health and log; the attempt is retried.
    """


class EngineStalled(RamifyError, blame="system", retryable=True):
    """The inference engine made no progress for longer than a rollout may wait for it.

    Look at the engine's process and log: it is stopped, paused, hung or unreachable; the attempt is retried.
    """


class WorkerDied(RamifyError, blame="system", retryable=True):
    """A worker process exited or hung while it held the attempt.

    Look for its exit code and stack in the log, often out of memory; the attempt is retried elsewhere.
    """


class SandboxError(RamifyError, blame="system", retryable=True):
    """The runtime could not start or reach the sandbox of an agent, or lost it.

    Run `ramify doctor`, which tries bubblewrap, and check image, resources and free disk; the attempt is retried.
    """


class JudgeError(RamifyError, blame="system", retryable=True):
    """A judge could not be reached, or its verdict could not be parsed, so a reward is missing.

    Check the judge's endpoint and its prompt; the attempt is retried.
    """


class EnvironmentFault(RamifyError, blame="system", retryable=True):
    """Code of the environment raised an exception: a reward, a setup or another hook.

    Fix the code at the file and line that the message shows; `ramify validate` runs it without a model.
    """


class DeadlineExceeded(RamifyError, blame="system", retryable=True):
    """An operation did not finish before its deadline.

    The message names what was waited for; look for the cause there.
    """


class TokensRequired(RamifyError, blame="system", retryable=False):
    """A source is trained on, but its endpoint does not return token ids and logprobs.

    Serve the policy with an engine that does, or use the endpoint for evals only.
    """


class LogprobMismatch(RamifyError, blame="system", retryable=False):
    """A server's logprobs are not those of the distribution it samples from, so they cannot be trained on.

    Start it so that logprobs are computed after temperature; for vLLM use `--logprobs-mode processed_logprobs`.
    """


class TokenizerMismatch(RamifyError, blame="system", retryable=False):
    """Two components that must share one tokenizer have different ones.

    Point trainer, engine and renderer at the same model.
    """


class ModelNotFound(RamifyError, blame="system", retryable=False):
    """No model was found under this name.

    Use a directory, a packaged model, or a Hugging Face id; the message says what was tried and how to download it.
    """


class ModelUnsupported(RamifyError, blame="system", retryable=False):
    """A model uses a feature that the native engine or the trainer does not support.

    The message names it; serve this model with vLLM, or train another.
    """


class WeightsRefused(RamifyError, blame="system", retryable=False):
    """Published weights are incomplete, changed, or of another model; the old weights stay in use.

    Publish again; the message names the first file or tensor that is wrong.
    """


class WeightsReplaced(WeightsRefused, blame="system", retryable=True):
    """A newer version was published before an engine had loaded this one; the old weights stay in use.

    None: the orchestrator loads the newer version.
    """


class RequestInvalid(RamifyError, blame="system", retryable=False):
    """A request to a server has an invalid field.

    Fix the caller: the message names the field, what was expected and what was given.
    """


class ImageInvalid(RamifyError, blame="policy", retryable=False):
    """The agent sent an image that is damaged, too large, not a PNG, JPEG or WebP, or that the model cannot take.

    Fix the agent program: the message says what is wrong. A bad image of a task is an `EnvironmentFault` instead.
    """


class ImageMissing(RamifyError, blame="system", retryable=True):
    """An inference server was asked about an image that it does not have, or no longer has.

    Nothing: the client uploads the image again. If it stays, raise the server's inference.image_cache_mib.
    """

    hashes: tuple[str, ...] = ()  # of the missing images, where the error is raised and in the client of the server


class QuotaExceeded(RamifyError, blame="policy", retryable=False):
    """An agent has more open requests than the gateway allows one rollout.

    Send fewer requests at once; SDKs wait and send a refused request again.
    """


class RequestCancelled(RamifyError, blame="system", retryable=False):
    """A request was cancelled, or its sender is gone.

    Nothing if you cancelled it; otherwise the message says why it was cancelled.
    """


class PeerLost(RamifyError, blame="system", retryable=True):
    """The peer of a connection does not respond, is closing, or was restarted and lost the request.

    Look at its log; send the request again once it is back: the connection is restored automatically.
    """


class PeerRefused(RamifyError, blame="system", retryable=False):
    """The peer rejected the connection.

    The message says why: another protocol version, another secret, or malformed frames.
    """


class ProcessReplaced(PeerRefused):
    """A newer copy of this process has taken over, so nothing that this one does counts any more.

    Nothing: the newer copy continues the work, and this one exits. Look at the log for why it was replaced.
    """


class SecretUnknown(RamifyError, blame="system", retryable=False):
    """A request to the gateway has no secret, or one that belongs to no running rollout.

    Use the `api_key` of the rollout's endpoint; after the rollout has ended, requests are refused.
    """


class OriginRefused(RamifyError, blame="system", retryable=False):
    """A control request came from a web page, or was sent to a host name that the server does not know.

    Use a program instead of a page; add the host name of the server to `allowed_hosts`, as the message says.
    """


class QueueFull(RamifyError, blame="system", retryable=True):
    """The request queue of a server is full.

    Send the request again later or elsewhere; if it happens often, raise the server's `max_queued_requests` or lower
    the concurrency.
    """


class ConfigInvalid(RamifyError, blame="system", retryable=False):
    """The configuration has invalid keys or values; commands exit with code 2.

    The message lists problems with their keys, and suggests valid keys; fix them and start again.
    """


class EnvironmentChanged(ConfigInvalid):
    """The code, configuration or tasks of an environment differ from those of the run's stored rollouts.

    The message lists what differs: restore it, start a new run with `--fresh`, or resume with `--accept-changes`.
    `ramify replay RUN` scores the stored rollouts of an eval again with the new version.
    """


class ClusterTooSmall(ConfigInvalid):
    """The nodes of the cluster do not have the cores, GPUs or memory that the run needs.

    The message lists what does not fit and what is left: add nodes, or lower the counts of `[cluster]`.
    """


class TemplateRefused(RamifyError, blame="system", retryable=False):
    """The model's chat template fails, or refuses the conversation.

    Read the template's error in the message; reorder the messages, or set `template_args` or a family in `renderer`.
    """


class TraceInvalid(RamifyError, blame="system", retryable=False):
    """An operation would break the message graph.

    Fix the caller: the message names the rule, what was expected and what was given.
    """


class ValueNotFinite(TraceInvalid):
    """A token has an advantage, weight or logprob that is not a finite float32; its group is dropped.

    Bound the reward, or look for a fault of the engine: the message names the token, the ledger has the rewards.
    """


class TraceCorrupt(RamifyError, blame="system", retryable=False):
    """An encoded trace is truncated, changed, or not a trace.

    Read the trace from another copy; if there is none, the attempt must be run again.
    """


class BatchCorrupt(RamifyError, blame="system", retryable=True):
    """An encoded batch is truncated, changed, or not a batch.

    The trainer requests it again; if it is a batch that was saved to a file, save it again.
    """


class CheckpointRefused(RamifyError, blame="system", retryable=False):
    """A checkpoint cannot be loaded: it is missing, damaged, or of another model or optimizer.

    If it is damaged, run the `ramify rollback` command in the message; otherwise use the configuration that wrote it.
    """


class SchemaUnsupported(RamifyError, blame="system", retryable=False):
    """A trace or the tables of a run were written with another schema than this version reads.

    Use the version of Ramify that wrote them.
    """


class ValueRefused(RamifyError, blame="system", retryable=False):
    """A value that cannot be encoded was set on a trace.

    The message names the key and the type; use plain data: numbers, text, lists, tables.
    """


class CallConflict(RamifyError, blame="system", retryable=False):
    """Two different model calls have the same call id.

    Fix the sender: a repeated call must be equal, and a new sample needs a new call id.
    """


class DeltaLost(RamifyError, blame="system", retryable=True):
    """A delta of a trace is missing, or arrived before an earlier one.

    Request the complete trace again.
    """


class DeltaRepeated(RamifyError, blame="system", retryable=False):
    """A delta of a trace arrived twice.

    Ignore it: it was already applied. If it happens often, acknowledgements are lost.
    """


class StorageFull(RamifyError, blame="system", retryable=False):
    """The disk of the run, or the quota of this user, is full.

    Free some space and repeat the command: what was finished is kept.
    """


class StorageFailed(RamifyError, blame="system", retryable=False):
    """The run directory could not be read or written.

    Read the reason in the message; check permissions, mounts and the disk, then repeat the command.
    """


class RunDamaged(RamifyError, blame="system", retryable=False):
    """A run's directory holds traces, checkpoints or weights, but its index is missing, damaged or empty.

    Nothing was changed: restore `run.sqlite` from a copy, or start a new run with `--fresh`, which deletes nothing.
    """


class RunBusy(RamifyError, blame="system", retryable=True):
    """Another process uses the run directory.

    Wait for that process, stop it, or choose another run; the message says which process it is.
    """


class ProcessDied(RamifyError, blame="system", retryable=True):
    """A process of a run exited more often than `launch.max_restarts` allows.

    Read the end of its log in the message; the same command resumes the run.
    """


class PortTaken(RamifyError, blame="system", retryable=True):
    """A port that a process of the run should listen on is in use.

    End the process that uses it, or choose another `launch.base_port`; 0 takes free ports.
    """


class TransitionRefused(RamifyError, blame="system", retryable=False):
    """A change of the ledger is not allowed in the current state of the group, attempt or batch.

    Fix the caller: the message names the group, its state and the requested change; the ledger is unchanged.
    """


class RunStalled(RamifyError, blame="system", retryable=False):
    """A run made no progress for longer than allowed, or its tasks ended before its first step.

    The message and `stalled.txt` in the run say which process waits for which; look at the last one first.
    """


class NoTrainableGroups(RamifyError, blame="system", retryable=False):
    """A run dropped `orchestrator.patience` groups in a row and could train on none of them.

    The message counts the reasons. Equal rewards give no advantage: compare the replies with the reward, and use
    partial credit or easier tasks.
    """


class UnknownFailure(RamifyError, blame="system", retryable=False):
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
