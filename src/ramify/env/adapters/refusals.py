"""Why a model call failed, as the gateway recorded it: an environment only sees an HTTP error."""

import ramify as rf
from ramify.core.errors import ProviderError

POLICY_REFUSALS = ("BudgetExceeded", "ContextOverflow")  # the policy's failures: the rollout counts


def find_policy_refusal(trace: rf.Trace) -> str | None:
    """Return the limit that ended the rollout; None if no call was refused. Raises ProviderError for other refusals."""
    refusals = trace.info.get("refusals", [])
    if not refusals:
        return None
    last = refusals[-1]
    if last["name"] in POLICY_REFUSALS:
        return last["name"]
    raise ProviderError(f"a model call failed: {last['name']}: {last['message']}")
