"""Validate a task without a model: set it up, run its `validate` hook, and play its gold replies through the harness.

It is a normal attempt with a scripted policy. So it detects everything that would fail in a perfect rollout: a setup
that raises, a tool that does not answer, a reward that cannot be computed or that a perfect agent does not get. For a
task without gold replies, the script is one empty reply: its rewards run, but it is not checked whether a correct
answer earns a reward.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ramify.core.errors import BudgetExceeded, ConfigInvalid, EnvironmentFault
from ramify.env import Task, ToolSet, User
from ramify.rollout.attempt import AttemptRunner
from ramify.rollout.environment import Environment
from ramify.rollout.gold_replies import parse_gold_replies
from ramify.rollout.scripted_policy import ScriptedPolicy
from ramify.trace import Trace

if TYPE_CHECKING:
    from ramify.infer.gateway import Gateway


@dataclass(frozen=True, slots=True)
class TaskValidation:
    """The result of validating one task."""

    task: str
    """The identity of the task."""
    problem: str | None
    """What is wrong with the task; None if it is valid."""
    reward: float | None
    """The reward of the replies; None if the rewards did not run."""
    has_gold: bool
    """Whether the task has gold replies; otherwise one empty reply was played."""
    seconds: float
    """The duration of all phases."""
    trace: Trace


async def validate_task(
    env: Environment, task: Task, *, gateway: "Gateway | None" = None, seed: int = 0
) -> TaskValidation:
    """Validate one task."""
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
    """An attempt that plays the task's gold replies, or one empty reply if it has none."""

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
            played = f"{policy.num_played} of {len(policy.replies)}"
            raise EnvironmentFault(f"{played} gold replies were played before the rollout ended ({stop})")
        return stop

    def gold_reward(self) -> float | None:
        """Return the reward of the replies without group rewards, or None if a reward is missing."""
        rewards = [self.trace.rewards[hook.name] for hook in self.env.hooks.rewards]
        if not rewards or any(reward is None for reward in rewards):
            return None
        return sum(reward[0] * reward[1] for reward in rewards if reward is not None)

    def find_problem(self) -> str | None:
        """Return what is wrong with the task, or None."""
        errors = [error for error in self.trace.errors if self.has_gold or error.blame == "system"]
        if errors:
            return "; ".join(f"{error.name}: {error.message}" for error in errors)
        reward = self.gold_reward()
        if self.has_gold and reward is not None and reward <= 0:
            return f"the reward of the gold replies is {reward:g}; expected more than 0"
        return None


def _check_validate_result(result: Any) -> None:
    """Raise EnvironmentFault if the `validate` hook returned False or a text; None and True mean valid."""
    if isinstance(result, str) and result:
        raise EnvironmentFault(f"validate: {result}")
    if result is False:
        raise EnvironmentFault("validate returned False")
