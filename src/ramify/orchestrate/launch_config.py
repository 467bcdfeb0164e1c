"""The section `[launch]`: how the processes of a run are started and supervised, and their environment variables."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ramify.core.config import Config

Variables = dict[str, Annotated[str, Field(coerce_numbers_to_str=True)]]
RUN_VARIABLES = ("RAMIFY_", "CUDA_VISIBLE_DEVICES")  # prefixes of the variables that a run sets itself


class RoleVariablesConfig(Config):
    """Environment variables of the processes of a run, by role; a role's own variables override `all`."""

    all: Variables = {}
    """Variables of every process."""
    orchestrator: Variables = {}
    """Variables of the orchestrator."""
    trainer: Variables = {}
    """Variables of every rank of the trainer."""
    engines: Variables = {}
    """Variables of the engines of the policy."""
    models: Variables = {}
    """Variables of the engines of the other models."""
    env_servers: Variables = {}
    """Variables of the env servers, which their workers and local programs of agents inherit."""

    def find_problems(self) -> Iterator[tuple[str, str]]:
        """Yield each variable that the run sets itself, or whose name is not possible."""
        for role, variables in self:
            for name in variables:
                if name.startswith(RUN_VARIABLES):
                    yield f"{role}.{name}", "is set by the run; remove it"
                elif not name or "=" in name:
                    yield role, f"expected the name of an environment variable, got {name!r}"

    def get_variables(self, role: str) -> dict[str, str]:
        """Return the variables of the processes of a role, which is a key of this section."""
        return {**self.all, **getattr(self, role)}


class LaunchConfig(Config):
    """How the processes of a run are started and supervised."""

    gpu_placement: Literal["auto", "split", "colocated"] = "auto"
    """Placement of engines and trainer: on separate GPUs (`split`), on the same GPUs (`colocated`), or `auto`: split if
    there are enough GPUs."""
    trainer_gpus: int | None = Field(default=None, ge=1)
    """GPUs of the trainer, with one rank each. Default: the fewest that hold its state, at least one per eight GPUs, at
    most half of all; if the number of engines is set, all that they leave."""
    inference_gpus: int | None = Field(default=None, ge=1)
    """GPUs of all engines of the policy together. Default: all that the trainer and other models leave."""
    base_port: int = Field(default=0, ge=0, le=60000)
    """Train source i listens on base_port + i, eval source i on base_port + 1000 + i. 0 picks free ports."""
    startup_timeout: float = Field(default=600.0, gt=0)
    """Seconds until every process must be ready."""
    hang_timeout: float = Field(default=60.0, gt=0)
    """Seconds without an answer after which the orchestrator counts as hung: it is killed and restarted."""
    max_restarts: int = Field(default=10, ge=0)
    """Restarts allowed per process and hour."""
    grace_period: float = Field(default=120.0, gt=0)
    """Seconds to wait for a last checkpoint of a run that is stopped, or for the last weights of a finished one."""
    env: RoleVariablesConfig = RoleVariablesConfig()
