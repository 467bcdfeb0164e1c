"""Is a task sound? Found out without a model: set it up, run its `validate`, play its gold replies through the harness.

The same attempt as any other, with a script in the place of the policy. So whatever would fail in a rollout that does
everything right fails here: a setup that raises, a tool that does not answer, a reward that cannot be computed, or one
that a perfect agent does not get. For a task without gold replies the script is one empty reply: its rewards run, but
whether a correct answer earns anything is not checked.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ramify.env import Task, ToolSet, User
from ramify.errors import BudgetExceeded, ConfigInvalid, EnvironmentFault
from ramify.rollout.attempt import AttemptRunner
from ramify.rollout.environment import Environment
from ramify.rollout.gold_replies import parse_gold_replies
from ramify.rollout.scripted_policy import ScriptedPolicy
from ramify.trace import Trace

if TYPE_CHECKING:
    from ramify.gateway import Gateway


@dataclass(frozen=True, slots=True)
class TaskValidation:
    """What is known about one task."""

    task: str
    problem: str | None
    """What is wrong with it; None if nothing is."""
    reward: float | None
    """What the replies earned; None where the rewards did not run."""
    has_gold: bool
    """Whether gold replies were played; otherwise an empty reply was."""
    seconds: float
    trace: Trace


async def validate_task(
    env: Environment, task: Task, *, gateway: "Gateway | None" = None, seed: int = 0
) -> TaskValidation:
    """Check one task."""
    identity = task.identity
    attempt = _ValidationAttempt(env, task, ScriptedPolicy(), gateway, f"validate-{identity}", "", 0, seed, False, None)
    try:
        env.check_task(task)
    except ConfigInvalid as error:
        return TaskValidation(identity, error.message, None, False, 0.0, attempt.trace)
    await attempt.run()
    timing = attempt.trace.timing
    seconds = timing.boot + timing.setup + timing.harness + timing.finalize + timing.scoring
    return TaskValidation(
        identity, attempt.find_problem(), attempt.gold_reward(), attempt.has_gold, seconds, attempt.trace
    )


class _ValidationAttempt(AttemptRunner):
    """An attempt with the task's gold replies, or with one empty reply if it has none."""

    has_gold = False

    async def run_harness(self, tools: ToolSet, user: User | None) -> str:
        hooks = self.env.hooks
        if hooks.validate is not None:
            _check_validate_result(await hooks.validate(self.context))
        gold = None if hooks.gold is None else await hooks.gold(self.context)
        policy = self.session.policy
        assert isinstance(policy, ScriptedPolicy)
        if gold is None:
            policy.replies = [""]
            policy.exhausted_error = BudgetExceeded
            return await super().run_harness(tools, user)
        self.has_gold = True
        policy.replies = parse_gold_replies(gold)
        stop = await super().run_harness(tools, user)
        if policy.num_played < len(policy.replies):
            said = f"{policy.num_played} of {len(policy.replies)} gold replies were played before the rollout ended"
            raise EnvironmentFault(f"{said} ({stop})")
        return stop

    def gold_reward(self) -> float | None:
        """What the replies earned; the rewards of a group are not theirs."""
        entries = [self.trace.rewards[hook.name] for hook in self.env.hooks.rewards]
        if not entries or any(entry is None for entry in entries):
            return None
        return sum(entry[0] * entry[1] for entry in entries if entry is not None)

    def find_problem(self) -> str | None:
        """What is wrong."""
        errors = [error for error in self.trace.errors if self.has_gold or error.blame == "system"]
        if errors:
            return "; ".join(f"{error.name}: {error.message}" for error in errors)
        reward = self.gold_reward()
        if self.has_gold and reward is not None and reward <= 0:
            return f"the gold replies earn {reward:g}; a perfect agent should earn something"
        return None


def _check_validate_result(result: Any) -> None:
    """What `validate` says: nothing or True is well, False or a text is not."""
    if isinstance(result, str) and result:
        raise EnvironmentFault(f"validate: {result}")
    if result is False:
        raise EnvironmentFault("validate returned False")
