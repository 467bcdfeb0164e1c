"""The summary of a rollout in the index, so that lists and statistics need not decode traces."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ramify.core.errors import AgentFailed, BudgetExceeded, ContextOverflow, Failure, RequestInvalid, failure_classes
from ramify.trace import Trace

REVISION_KEY = "revision"  # the summary's key for the revision of the source's environment
AGENT_FAILURE_KEY = "agent_failure"  # the summary's key for the name of the failure of the agent, if it failed
LIMIT_NAMES = (BudgetExceeded.name, ContextOverflow.name)  # refusals that end the rollouts of an agent that works


def summarize_rollout(traces: Sequence[Trace], failure: Failure | None = None) -> dict[str, Any]:
    """Return counts, scores and timing of a rollout as plain data; `failure` is the system failure that ended it.

    `message` is the first line of that failure, or else of the first error.
    """
    first, errors = traces[0], [error for trace in traces for error in trace.errors]
    reported = failure or next(iter(errors), None)
    agent_failure = find_agent_failure(traces)
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
        **({} if agent_failure is None else {AGENT_FAILURE_KEY: agent_failure.name}),
    }


def find_agent_failure(traces: Sequence[Trace]) -> Failure | None:
    """Return why the agent program of a rollout seems to be broken, or None.

    That is an error before its first reply, an exit with an error, or a refused request. After a reply, refusals are
    ordinary if a limit was reached, or if the path is unknown: programs try paths that are optional.
    """
    errors = [error for trace in traces for error in trace.errors]
    refusals = [entry for trace in traces for entry in trace.info.get("refusals", ()) if entry["status"] < 500]
    if any(trace.num_turns for trace in traces):
        refusals = [entry for entry in refusals if entry["name"] in failure_classes().keys() - LIMIT_NAMES]
    elif errors:
        return errors[0]
    exits = [trace.info.get("program", {}) for trace in traces if trace.stop == "exit"]
    refusal = f"{refusals[-1]['path']} was refused: {refusals[-1]['message']}" if refusals else ""
    if exits:
        last_line = str(exits[0].get("stderr", "")).strip().rpartition("\n")[2]
        message = f"the program exited with code {exits[0].get('exit_code')} after a reply"
        return _build_agent_failure(AgentFailed.name, ": ".join(filter(None, [message, refusal or last_line])))
    return _build_agent_failure(refusals[-1]["name"], refusal) if refusals else None


def _build_agent_failure(name: str, message: str) -> Failure:
    return Failure(name if name in failure_classes() else RequestInvalid.name, message, "policy", False)


def get_agent_failure(summary: Mapping[str, Any]) -> str | None:
    """Return the name of the failure of a rollout's agent, or None."""
    return summary.get(AGENT_FAILURE_KEY) or get_error_before_reply(summary)


def get_error_before_reply(summary: Mapping[str, Any]) -> str | None:
    """Return the name of the error that ended a rollout before its first reply, or None."""
    return next(iter(summary.get("errors", {})), None) if summary.get("calls") == 0 else None
