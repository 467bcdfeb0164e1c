"""`ramify serve -m MODEL`: serve a model over HTTP, with the native engine or vLLM."""

import asyncio
import contextlib
import shlex
import signal

from ramify.cli.arguments import ConfigCall
from ramify.cli.commands import pause_garbage_collection
from ramify.core.errors import ConfigInvalid
from ramify.infer.config import EngineConfig, ExternalServersConfig, ServeConfig, VLLMConfig
from ramify.infer.vllm_server import VLLMServer
from ramify.model.config_check import check_model_config
from ramify.model.render import load_renderer
from ramify.model.resolve import fetch_model, resolve_model_path


def run(call: ConfigCall[ServeConfig]) -> int:
    """Load the model, and serve until interrupted."""
    config, run_config, dry = call.config, call.run_config, call.flags.dry_run
    address_keys = {"host", "port"} & config.server.model_fields_set
    if run_config is not None and isinstance(run_config.inference, ExternalServersConfig) and not address_keys:
        urls = ", ".join(run_config.inference.base_url)
        advice = "choose one with --server.host and --server.port"
        raise ConfigInvalid(f"the run lists several engines ({urls}); {advice}", key="server")
    by_engine = isinstance(config.inference, EngineConfig)
    check_model_config(
        config.model.name, by_trainer=False, by_engine=by_engine, fetch=not dry, skip_without_transformers=dry
    )
    if not dry:
        fetch_model(config.model.name)
        engine_name = "vLLM" if config.inference.engine == "vllm" else "the native engine"
        print(f"loading {config.model.name} with {engine_name}", flush=True)
    if config.inference.engine == "vllm":
        return _serve_vllm(config, config.inference, dry=dry)
    if dry:
        print(f"would serve {config.model.name} from {resolve_model_path(config.model.name)}")
        print(f"at http://{config.server.host}:{config.server.port}, {config.inference}")
        return 0
    with pause_garbage_collection():
        from ramify.infer.engine import Engine  # torch is loaded here, not for a dry run
        from ramify.infer.server import serve
        from ramify.model.precision import disable_tf32_convolutions

    disable_tf32_convolutions()
    directory = resolve_model_path(config.model.name)
    renderer = None
    if (directory / "tokenizer.json").exists():
        renderer = load_renderer(directory, config.renderer)
    else:
        print(f"{directory} has no tokenizer.json; only token-id requests are served, not chat", flush=True)
    engine = Engine.load(config.model.name, config.inference)
    with contextlib.suppress(KeyboardInterrupt):
        name = config.server.model_name or config.model.name
        asyncio.run(serve(engine, name=name, config=config.server, renderer=renderer))
    return 0


def _serve_vllm(config: ServeConfig, inference: VLLMConfig, *, dry: bool) -> int:
    server = VLLMServer(config.model.name, inference, config.server)
    if dry:
        print(f"would serve {config.model.name} ({server.version}) at {server.url}, output in {server.log.path}")
        print(shlex.join(server.build_command()))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_until_signal(server))
    return 0


async def _serve_until_signal(server: VLLMServer) -> None:
    """Serve until SIGTERM or SIGINT; the server is stopped on every exit."""
    current_task = asyncio.current_task()
    assert current_task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, current_task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with server:
            print(f"serving {server.model_name} ({server.version}) at {server.url}", flush=True)
            await server.wait()
