"""The progress of a run as one line of text, for logs and commands."""

from pathlib import Path

from ramify.core.names import format_duration
from ramify.rollout.evals.stats import format_score
from ramify.run.state import OrchestratorState


def format_status_line(status: OrchestratorState) -> str:
    """Format the progress of a run as one line of `name=value` fields."""
    fields = {
        "step": f"{status.step}/{status.max_steps}",
        "state": status.state,
        get_reward_label(status): format_optional_score(status.reward),
        "rollouts_per_s": format_number(status.rollouts_per_s, ".1f"),
        "tokens_per_s": format_number(status.tokens_per_s, ".0f"),
        "staleness": format_number(status.staleness.get("mean"), ".1f"),
        "trainable": format_ratio(status.trainable),
        "left": "unknown" if status.eta_s is None else format_duration(status.eta_s),
    }
    evals = {name: format_optional_score(value) for name, value in list_latest_eval_means(status)}
    counts = ",".join(f"{name}:{count}" for name, count in status.failures.items())
    failures = {"failed": counts} if counts else {}
    return " ".join(f"{name}={str(value).replace(' ', '_')}" for name, value in {**fields, **evals, **failures}.items())


def describe_last_state(path: Path) -> str:
    """Describe the last state that the orchestrator of the run at `path` has written, and its age."""
    status = OrchestratorState.read(path)
    if status is None:
        return f"{path} has no {OrchestratorState.FILE}; its last state is unknown"
    return f"last state, {status.age:.0f} s ago: {format_status_line(status)}"


def get_reward_label(status: OrchestratorState) -> str:
    """Return the name of the mean reward: the teacher's, if one samples all rollouts."""
    return "reward(teacher)" if status.is_teacher_reward else "reward"


def list_latest_eval_means(status: OrchestratorState) -> list[tuple[str, float]]:
    """Return the latest mean reward of each eval, by name."""
    means = {name: metric.value for name, metric in status.evals.items() if name.endswith("/avg")}
    return [(name.removesuffix("/avg"), value) for name, value in means.items() if value is not None]


def format_number(value: float | None, format_spec: str) -> str:
    """Format a number that may not be known yet."""
    return "none yet" if value is None else f"{value:{format_spec}}"


def format_optional_score(value: float | None) -> str:
    """Format a reward that may not be known yet."""
    return "none yet" if value is None else format_score(value)


def format_ratio(pair: tuple[int, int] | None) -> str:
    """Format two counts that may not be known yet."""
    return "none yet" if pair is None else f"{pair[0]}/{pair[1]}"
