"""`ramify serve -m MODEL`: a model behind HTTP, by the native engine or by vLLM."""

import asyncio
import contextlib
import shlex
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ramify.cli.short_flags import expand_short_flags
from ramify.config import parse_component, pop_flag, raise_config_invalid
from ramify.infer.config import ExternalConfig, ServeConfig, VLLMConfig
from ramify.launch.process_configs import build_serve_config
from ramify.model.resolve import fetch_model, resolve_model_path
from ramify.orchestrate.config import RunConfig
from ramify.render import load_renderer

if TYPE_CHECKING:
    from ramify.infer.vllm_server import VLLMServer

USAGE = """usage: ramify serve [@ FILE] [-m MODEL] [--server.host HOST] [--server.port PORT] [--key value]

  FILE       the server's own, or a whole run's as `ramify rl` takes it: its model and engine, at its `base_url` where
             that names one server; flags are the keys below either way
  --dry-run  say what would be served

All keys:
"""


def run(argv: Sequence[str]) -> int:
    """Read the configuration, load the model, serve until interrupted."""
    if "--help" in argv or "-h" in argv:
        print(USAGE)
    dry, rest = pop_flag(expand_short_flags(argv), "--dry-run")
    config, run_config = parse_component(
        ServeConfig, rest, RunConfig, build_serve_config, prog="ramify serve", command_flags=["--dry-run"]
    )
    address_keys = {"host", "port"} & config.server.model_fields_set
    if run_config is not None and isinstance(run_config.inference, ExternalConfig) and not address_keys:
        urls = ", ".join(run_config.inference.base_url)
        raise_config_invalid(
            [("server", f"the run has several engines, {urls}; say which, with --server.host and --server.port")]
        )
    if not dry:
        fetch_model(config.model.name)
    if config.inference.engine == "vllm":
        return _serve_vllm(config, config.inference, dry=dry)
    if dry:
        print(f"would serve {config.model.name} from {resolve_model_path(config.model.name)}")
        print(f"at http://{config.server.host}:{config.server.port}, {config.inference}")
        return 0
    from ramify.infer.engine import Engine  # torch is loaded here, not for help
    from ramify.infer.server import serve
    from ramify.infer.template_chat_renderer import TemplateChatRenderer

    directory = resolve_model_path(config.model.name)
    renderer = None
    if (directory / "tokenizer.json").exists():
        renderer = TemplateChatRenderer(load_renderer(directory, config.renderer))
    else:
        print(f"{directory} has no tokenizer.json: serving token ids alone, no chat", flush=True)
    engine = Engine.load(config.model.name, config.inference)
    with contextlib.suppress(KeyboardInterrupt):
        name = config.server.model_name or config.model.name
        asyncio.run(serve(engine, name=name, config=config.server, renderer=renderer))
    return 0


def _serve_vllm(config: ServeConfig, inference: VLLMConfig, *, dry: bool) -> int:
    from ramify.infer.vllm_server import VLLMServer

    server = VLLMServer(config.model.name, inference, config.server)
    if dry:
        print(f"would serve {config.model.name} ({server.version}) at {server.url}, output in {server.log_path}")
        print(shlex.join(server.build_command()))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_until_signal(server))
    return 0


async def _serve_until_signal(server: "VLLMServer") -> None:
    """Serve until a signal comes; whatever happens, the server is stopped before we go."""
    current_task = asyncio.current_task()
    assert current_task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, current_task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with server:
            print(f"serving {server.model_name} ({server.version}) at {server.url}", flush=True)
            await server.wait()
