"""`ramify orchestrator @ run.toml`: the run's own process, given engines and env servers that answer already."""

import asyncio
import sys
from collections.abc import Sequence

from ramify.config import parse, switch
from ramify.errors import TokenizerMismatch, TokensRequired
from ramify.orchestrate.config import RunConfig


def run(args: Sequence[str]) -> int:
    """Read the run's configuration, and orchestrate it to its end."""
    dry, rest = switch(args, "--dry-run")
    config = parse(RunConfig, rest, prog="ramify orchestrator")
    from ramify.orchestrate.process import Orchestrator

    try:
        orchestrator = Orchestrator(config)
        if dry:
            print(f"would orchestrate {config.path}: {config.max_steps} steps, {len(config.train)} train sources")
            return 0
        return asyncio.run(orchestrator.run())
    except (TokensRequired, TokenizerMismatch) as error:
        print(f"{error.name}: {error.message}", file=sys.stderr)
        return 2
