"""The failure taxonomy: every way a run can go wrong has one name, the same in code, logs, ledger and docs.

A name is worth more than a message: `blame` decides whether a rollout is data or has to be run again, `retryable`
whether doing so can help, and both are properties of the name, so no code path decides them for itself. This package
is the ground under every floor. It imports nothing of ours.
"""

from ramify.errors.base import Blame, RamifyError, registry
from ramify.errors.failure import Failure
from ramify.errors.taxonomy import (
    AgentExit,
    BudgetExceeded,
    CallConflict,
    ConfigInvalid,
    ContextOverflow,
    DeadlineExceeded,
    DeltaLost,
    DeltaRepeated,
    EnvironmentFault,
    JudgeError,
    MalformedCall,
    ModelNotFound,
    ModelUnsupported,
    ProviderError,
    QueueFull,
    RequestInvalid,
    RolloutDeadline,
    SandboxError,
    SchemaUnsupported,
    TemplateRefused,
    TokenizerMismatch,
    TokensRequired,
    TraceCorrupt,
    TraceInvalid,
    UnknownFailure,
    ValueRefused,
    WeightsRefused,
    WorkerDied,
)

__all__ = [
    "AgentExit",
    "Blame",
    "BudgetExceeded",
    "CallConflict",
    "ConfigInvalid",
    "ContextOverflow",
    "DeadlineExceeded",
    "DeltaLost",
    "DeltaRepeated",
    "EnvironmentFault",
    "Failure",
    "JudgeError",
    "MalformedCall",
    "ModelNotFound",
    "ModelUnsupported",
    "ProviderError",
    "QueueFull",
    "RamifyError",
    "RequestInvalid",
    "RolloutDeadline",
    "SandboxError",
    "SchemaUnsupported",
    "TemplateRefused",
    "TokenizerMismatch",
    "TokensRequired",
    "TraceCorrupt",
    "TraceInvalid",
    "UnknownFailure",
    "ValueRefused",
    "WeightsRefused",
    "WorkerDied",
    "registry",
]
