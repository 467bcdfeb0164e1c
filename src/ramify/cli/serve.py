"""`ramify serve -m MODEL`: the native engine behind HTTP."""

import asyncio
import contextlib
from collections.abc import Sequence

from ramify.config import parse, switch
from ramify.infer.config import ServeConfig


def run(args: Sequence[str]) -> int:
    """Read the configuration, load the model, serve until interrupted."""
    dry, rest = switch(_spelled_out(args), "--dry-run")
    config = parse(ServeConfig, rest, prog="ramify serve")
    if dry:
        from ramify.model.resolve import resolve

        print(f"would serve {config.model.name} from {resolve(config.model.name)}")
        print(f"at http://{config.server.host}:{config.server.port}, {config.inference}")
        return 0
    from ramify.infer.engine import Engine  # torch is loaded here, not for help
    from ramify.infer.server import serve

    engine = Engine.load(config.model.name, config.inference)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(engine, name=config.model.name, config=config.server))
    return 0


def _spelled_out(args: Sequence[str]) -> list[str]:
    return ["--model.name" if arg == "-m" else arg for arg in args]
