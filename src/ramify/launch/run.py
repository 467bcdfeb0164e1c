"""A run from its configuration to its end: check, plan, carry out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ramify.config import check
from ramify.launch.nursery import nursery
from ramify.launch.plan import plan_of
from ramify.launch.tables import check_tables
from ramify.orchestrate.config import RunConfig

if TYPE_CHECKING:
    from ramify.launch.carrying import Ended
    from ramify.launch.dashboard import Display


def rl(
    config: RunConfig | Mapping[str, Any],
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    display: "Display | None" = None,
) -> "Ended":
    """Train, or go on training, until `max_steps`. Raises what went wrong under its name. `fresh` begins anew.

    An environment that has changed since the run was started raises EnvironmentChanged, unless `accept_changes`.
    """
    checked = config if isinstance(config, RunConfig) else check(RunConfig, dict(config), at="run")
    plan = plan_of(checked)
    with nursery(plan.entries) as found:  # it loads while we load the rest and check
        from ramify.launch.carrying import carry_out
        from ramify.launch.dashboard import Quiet

        return carry_out(
            plan,
            fresh=fresh,
            accept_changes=accept_changes,
            environments=check_tables(checked),
            display=display or Quiet(),
            nursery=found,
        )
