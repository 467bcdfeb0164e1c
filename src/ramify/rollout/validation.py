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
from ramify.rollout.attempt import Attempt
from ramify.rollout.environment import Environment
from ramify.rollout.gold import read_gold
from ramify.rollout.scripted import ScriptedPolicy
from ramify.trace import Trace

if TYPE_CHECKING:
    from ramify.gateway import Gateway


@dataclass(frozen=True, slots=True)
class Verdict:
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


async def validate(env: Environment, task: Task, *, gateway: "Gateway | None" = None, seed: int = 0) -> Verdict:
    """Check one task."""
    identity = task.identity
    one = _Validation(env, task, ScriptedPolicy(), gateway, f"validate-{identity}", "", 0, seed, False, None)
    try:
        env.check(task)
    except ConfigInvalid as error:
        return Verdict(identity, error.message, None, False, 0.0, one.trace)
    await one.run()
    timing = one.trace.timing
    seconds = timing.boot + timing.setup + timing.harness + timing.finalize + timing.scoring
    return Verdict(identity, one.problem(), one.reward(), one.has_gold, seconds, one.trace)


class _Validation(Attempt):
    """An attempt with the task's gold replies, or with one empty reply if it has none."""

    has_gold = False

    async def converse(self, tools: ToolSet, user: User | None) -> str:
        hooks = self.env.hooks
        if hooks.validate is not None:
            _accept(await hooks.validate(self.context))
        gold = None if hooks.gold is None else await hooks.gold(self.context)
        policy = self.session.policy
        assert isinstance(policy, ScriptedPolicy)
        if gold is None:
            policy.replies = [""]
            policy.exhausted = BudgetExceeded
            return await super().converse(tools, user)
        self.has_gold = True
        policy.replies = read_gold(gold)
        stop = await super().converse(tools, user)
        if policy.said < len(policy.replies):
            said = f"{policy.said} of {len(policy.replies)} gold replies were played before the rollout ended"
            raise EnvironmentFault(f"{said} ({stop})")
        return stop

    def reward(self) -> float | None:
        """What the replies earned; the rewards of a group are not theirs."""
        entries = [self.trace.rewards[hook.name] for hook in self.env.hooks.rewards]
        if not entries or any(entry is None for entry in entries):
            return None
        return sum(entry[0] * entry[1] for entry in entries if entry is not None)

    def problem(self) -> str | None:
        """What is wrong."""
        errors = [error for error in self.trace.errors if self.has_gold or error.blame == "system"]
        if errors:
            return "; ".join(f"{error.name}: {error.message}" for error in errors)
        reward = self.reward()
        if self.has_gold and reward is not None and reward <= 0:
            return f"the gold replies earn {reward:g}; a perfect agent should earn something"
        return None


def _accept(answer: Any) -> None:
    """What `validate` says: nothing or True is well, False or a text is not."""
    if isinstance(answer, str) and answer:
        raise EnvironmentFault(f"validate: {answer}")
    if answer is False:
        raise EnvironmentFault("validate returned False")
