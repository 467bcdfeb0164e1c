"""The summary of a rollout in the index, so that lists and statistics need not decode traces."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import Failure
from ramify.trace import Trace

REVISION_KEY = "revision"  # the summary's key for the revision of the source's environment
UNRECORDED_REVISION = 0  # of rollouts from before revisions were stored


def summarize_rollout(traces: Sequence[Trace], failure: Failure | None = None) -> dict[str, Any]:
    """Return counts, scores and timing of a rollout as plain data; `failure` is the system failure that ended it.

    `message` is the first line of that failure, or else of the first error.
    """
    first, errors = traces[0], [error for trace in traces for error in trace.errors]
    reported = failure or next(iter(errors), None)
    calls = [call for trace in traces for node in trace.nodes if (call := node.call) is not None]
    return {
        "stop": first.stop,
        "truncated": any(call.finish_reason == "length" for call in calls),
        "calls": len(calls),
        "input": sum(call.usage.prompt_tokens for call in calls),
        "output": sum(call.usage.completion_tokens for call in calls),
        "rewards": {name: None if entry is None else entry[0] for name, entry in first.rewards.items()},
        "weights": {name: entry[1] for name, entry in first.rewards.items() if entry is not None},
        "metrics": dict(first.metrics),
        "errors": dict(Counter(error.name for error in errors)),
        "message": "" if reported is None else reported.message.strip().partition("\n")[0],
        "timing": msgspec.structs.asdict(first.timing),
    }


def get_error_before_reply(summary: Mapping[str, Any]) -> str | None:
    """Return the name of the error that ended a rollout before its first reply, or None."""
    return next(iter(summary.get("errors", {})), None) if summary.get("calls") == 0 else None
