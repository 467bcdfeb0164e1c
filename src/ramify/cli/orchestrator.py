"""`ramify orchestrator @ run.toml`: the run's own process, with the env servers that nobody else has started."""

import asyncio
import io
import sys
from collections.abc import Mapping, Sequence

from ramify.cli.short_flags import expand_short_flags
from ramify.config import parse, pop_flag, raise_config_invalid
from ramify.errors import TokenizerMismatch, TokensRequired
from ramify.infer.config import ExternalConfig
from ramify.monitor import check_sinks_installed
from ramify.orchestrate.config import RunConfig
from ramify.trace import Trace

USAGE = """usage: ramify orchestrator @ FILE [-b URL] [-m MODEL] [-o OUTPUTS] [--key value]

  FILE       the run's, as `ramify rl` takes it
  -b URL     engines that run already, in place of the run's `inference`
  --dry-run  check everything, say what would be started, start nothing
  --accept-changes  go on although an environment has changed; the change is recorded

An env server is started for every source without an `address`, and ends with this command. The trainer comes to
`orchestrator.address`. The same command again continues the run. All keys:
"""


def run(argv: Sequence[str]) -> int:
    """Read the run's configuration, and orchestrate it to its end."""
    if "--help" in argv or "-h" in argv:
        print(USAGE)
    dry, rest = pop_flag(argv, "--dry-run")
    accept, rest = pop_flag(rest, "--accept-changes")
    config = parse(
        RunConfig, expand_short_flags(rest), prog="ramify orchestrator", command_flags=["--dry-run", "--accept-changes"]
    )
    if not isinstance(config.inference, ExternalConfig):
        raise_config_invalid([("inference", "the orchestrator starts no engine; say where one answers, with -b URL")])
    check_sinks_installed(config)
    if any(source.address is None for source in (*config.train, *config.eval)):
        return _run_with_env_servers(config, dry=dry, accept=accept)
    if dry:
        print(f"would orchestrate {config.path}: {config.max_steps} steps, {len(config.train)} train sources")
        return 0
    return _run_in_process(config, accept=accept)


def _run_with_env_servers(config: RunConfig, *, dry: bool, accept: bool) -> int:
    """Two kinds of processes, supervised: this one only watches."""
    from ramify.launch.completion import format_finished
    from ramify.launch.dashboard import LogRunDisplay
    from ramify.launch.execution import execute_plan
    from ramify.launch.plan import build_orchestrator_plan
    from ramify.launch.plugin_check import check_plugin_tables

    plan = build_orchestrator_plan(config)
    environments = check_plugin_tables(config)
    if dry:
        print("\n".join(plan.format_lines()))
        return 0
    print(f"trainers come to {plan.orchestrator_address}; status at {plan.status_address}", flush=True)
    ended = execute_plan(plan, accept_changes=accept, environments=environments, display=LogRunDisplay())
    if not ended.did_run:
        print(f"{ended.path} is finished: {format_finished(ended.steps, config)}")
    return ended.outcome.value


def _run_in_process(config: RunConfig, *, accept: bool) -> int:
    from ramify.launch.completion import format_finished, get_finished_steps, mark_finished
    from ramify.launch.run_record import RunRecord, read_record
    from ramify.monitor import build_samples, open_monitor_sinks
    from ramify.orchestrate.orchestrator import Orchestrator

    def log_samples(step: int, shown: Mapping[str, list[tuple[Trace, float | None]]]) -> None:
        rollouts = (
            (source, *rollout) for source, rollouts_of_source in shown.items() for rollout in rollouts_of_source
        )
        told = [build_samples(trace, source=source, advantage=advantage) for source, trace, advantage in rollouts]
        monitors.log_samples(step, [sample for samples in told for sample in samples])

    def record_status_address(url: str) -> None:
        """Who has no supervisor says himself where the run can be asked."""
        if read_record(config.path).get("status") != url:
            RunRecord(config.path, url).write([])

    if (
        steps := get_finished_steps(config, accept_changes=accept or None)
    ) is not None:  # a supervisor has said it before
        print(f"{config.path} is finished: {format_finished(steps, config)}")
        return 0
    make_print_atomic()
    monitors = open_monitor_sinks(config, lambda line: print(line, flush=True))
    try:
        code = asyncio.run(
            Orchestrator(
                config, on_metrics=monitors.log_metrics, on_samples=log_samples, on_status_address=record_status_address
            ).run()
        )
    except (TokensRequired, TokenizerMismatch) as error:
        print(f"{error.name}: {error.message}", file=sys.stderr)
        return 2
    finally:
        monitors.close()
    if code == 0:
        mark_finished(config)
    return code


def make_print_atomic() -> None:
    """Let several threads print: where output is unbuffered, another's line would fit between a line and its end."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(write_through=False)
