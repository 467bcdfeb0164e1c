"""`ramify orchestrator @ run.toml`: the run's own process, given engines and env servers that answer already."""

import asyncio
import sys
from collections.abc import Mapping, Sequence

from ramify.config import parse, switch
from ramify.errors import TokenizerMismatch, TokensRequired
from ramify.orchestrate.config import RunConfig
from ramify.trace import Trace


def run(args: Sequence[str]) -> int:
    """Read the run's configuration, and orchestrate it to its end."""
    dry, rest = switch(args, "--dry-run")
    config = parse(RunConfig, rest, prog="ramify orchestrator")
    if dry:
        print(f"would orchestrate {config.path}: {config.max_steps} steps, {len(config.train)} train sources")
        return 0
    from ramify.monitor import open_monitors, samples_of
    from ramify.orchestrate.process import Orchestrator

    def show(step: int, shown: Mapping[str, list[tuple[Trace, float | None]]]) -> None:
        rollouts = ((source, *rollout) for source, several in shown.items() for rollout in several)
        told = [samples_of(trace, source=source, advantage=advantage) for source, trace, advantage in rollouts]
        monitors.show(step, [sample for samples in told for sample in samples])

    monitors = open_monitors(config, lambda line: print(line, flush=True))
    try:
        return asyncio.run(Orchestrator(config, log=monitors.log, show=show).run())
    except (TokensRequired, TokenizerMismatch) as error:
        print(f"{error.name}: {error.message}", file=sys.stderr)
        return 2
    finally:
        monitors.close()
