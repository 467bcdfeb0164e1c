"""Derives the configuration of each process from the configuration of a run.

`ramify rl` writes one config file per process. `serve`, `env-server` and `trainer`, if they are given the file of a
run, derive the same configuration with these functions. Each returns only the keys that were set.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from ramify.core.config import Config
from ramify.core.errors import ConfigInvalid
from ramify.infer.config import EngineAdaptersConfig, EngineConfig, ExternalServersConfig, NamedModelConfig, VLLMConfig
from ramify.launch.machine import HOST, list_visible_gpus, uses_gpu
from ramify.orchestrate.run_config import RunConfig, TrainSourceConfig
from ramify.rollout.envserver.config import EnvServerConfig, ServedSourceConfig

EVAL_PORT_OFFSET = 1000  # eval source i listens on base_port + EVAL_PORT_OFFSET + i

ConfigTable = dict[str, Any]


def build_source_addresses(config: RunConfig) -> dict[str, str]:
    """Return the addresses of the env servers that the run starts, by name (`train/reverse`); port 0: any free port."""
    base, addresses = config.launch.base_port, dict[str, str]()
    for kind, first, sources in (("train", base, config.train), ("eval", base + EVAL_PORT_OFFSET, config.eval)):
        for number, source in enumerate(sources):
            if source.address is None:
                addresses[f"{kind}/{source.source_name}"] = f"tcp://{HOST}:{first + number if base else 0}"
    return addresses


def build_serve_config(run_config: RunConfig, *, is_trainer_on_gpu: bool | None = None) -> ConfigTable:
    """Build the configuration of `ramify serve`: the run's model and engine, at its `base_url` if it names one server.

    The device of the trainer determines the dtype; None: a GPU if this machine has one.
    """
    inference, dtype = run_config.inference, _resolve_engine_dtype(run_config, is_trainer_on_gpu)
    table: ConfigTable = {"model": {"name": run_config.model.name}, "server": {"model_name": run_config.model.name}}
    if isinstance(inference, ExternalServersConfig):
        table["inference"] = {"dtype": dtype, "max_model_len": run_config.seq_len}
        if len(inference.base_url) > 1:  # host and port are given as flags
            table["server"]["allowed_hosts"] = [urlsplit(url).hostname for url in inference.base_url]
        else:
            url = urlsplit(inference.base_url[0])
            port = url.port or (443 if url.scheme == "https" else 80)
            table["server"] |= {"host": url.hostname, "port": port}
    else:
        length = inference.max_model_len or run_config.seq_len
        table["inference"] = {**_dump_set_fields(inference), "dtype": dtype, "max_model_len": length}
    if isinstance(inference, VLLMConfig):
        return table
    if (adapters := build_engine_adapters(run_config)) is not None:
        table["inference"] |= {"adapters": adapters.model_dump(exclude_none=True)}
    if (weights_url := run_config.weights.url_for(run_config.path)) is not None:
        table["inference"]["weights_url"] = weights_url
    return {**table, "renderer": _dump_set_fields(run_config.renderer)}


def publishes_adapters(run_config: RunConfig) -> bool:
    """Return whether published weights hold only adapters, which the run's engines apply beside the base model."""
    is_native = isinstance(run_config.inference, EngineConfig)
    return run_config.trainer.lora.enabled and is_native and run_config.weights.adapters != "merged"


def build_engine_adapters(run_config: RunConfig) -> EngineAdaptersConfig | None:
    """Build the configuration of the adapters in the run's engines; None if they hold merged weights."""
    if not publishes_adapters(run_config):
        return None
    lora = run_config.trainer.lora
    return EngineAdaptersConfig(
        rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules, quantize=run_config.model.quantize
    )


def build_model_serve_config(run_config: RunConfig, model: NamedModelConfig, *, is_on_gpu: bool) -> ConfigTable:
    """Build the configuration of `ramify serve` for another model of the run."""
    inference = model.inference
    dtype = inference.dtype if inference.dtype != "auto" else "bfloat16" if is_on_gpu else "float32"
    table: ConfigTable = {
        "model": {"name": model.name},
        "server": {"model_name": model.name},
        "inference": {
            **_dump_set_fields(inference),
            "dtype": dtype,
            "max_model_len": inference.max_model_len or run_config.seq_len + 1,  # a scored path, and one more token
        },
    }
    return table if isinstance(inference, VLLMConfig) else {**table, "renderer": _dump_set_fields(run_config.renderer)}


def build_env_server_config(run_config: RunConfig, source_name: str | None) -> ConfigTable:
    """Build the configuration of `ramify env-server` for one source; without `inference` if its address is unknown."""
    addresses = build_source_addresses(run_config)
    table: ConfigTable = {
        kind: [
            _build_source_table(run_config, source, addresses.get(f"{kind}/{source.source_name}")) for source in sources
        ]
        for kind, sources in (("train", run_config.train), ("eval", run_config.eval))
    }
    table |= {
        "renderer": _dump_set_fields(run_config.renderer),
        "model": {"name": run_config.model.name},
        "output": str(run_config.path),
    }
    table |= {"source": source_name} if source_name else {}
    table |= {"secret_env": run_config.secret_env} if run_config.secret else {}
    urls = run_config.inference.base_url if isinstance(run_config.inference, ExternalServersConfig) else []
    selected = EnvServerConfig(**table, inference=ExternalServersConfig(base_url=["http://unused"])).select_source()
    sources = run_config.train if selected.kind == "train" else run_config.eval
    source = next(source for source in sources if source.source_name == selected.source_name)
    if source.endpoint is not None:
        endpoint = source.endpoint
        urls, table["api_key_env"] = [endpoint.base_url], endpoint.api_key_env or ""
        table |= {"model": {"name": endpoint.model}} if endpoint.model else {}
    elif isinstance(source, TrainSourceConfig) and source.sampler_model is not None:
        sampler = run_config.models[source.sampler_model]
        urls, table["served_model"] = sampler.base_url, sampler.name
    return {**table, "inference": {"base_url": urls}} if urls else table


def build_trainer_config(run_config: RunConfig) -> ConfigTable:
    """Build the configuration of `ramify trainer`, with the orchestrator's address if the run has a fixed one."""
    address, path = run_config.orchestrator.address, run_config.path
    sections = ("model", "trainer", "checkpoint", "weights")
    table: ConfigTable = {
        "name": path.name,
        "output": str(path.parent),
        **({} if run_config.shared_path is None else {"shared_directory": str(run_config.shared_path)}),
        "secret_env": run_config.secret_env,
        **({} if urlsplit(address).port == 0 else {"address": address}),
        **{name: _dump_set_fields(getattr(run_config, name)) for name in sections},
        "seed": run_config.seed,
    }
    if run_config.trainer.lora.enabled:
        table["weights"]["adapters"] = "unmerged" if publishes_adapters(run_config) else "merged"
    return table


def _resolve_engine_dtype(run_config: RunConfig, is_trainer_on_gpu: bool | None) -> str:
    """Return the dtype of the engine: by default the trainer's, so that sampler and trainer agree."""
    engine_dtype = "auto" if isinstance(run_config.inference, ExternalServersConfig) else run_config.inference.dtype
    dtype = run_config.trainer.dtype if engine_dtype == "auto" else engine_dtype
    if dtype != "auto":
        return dtype
    if is_trainer_on_gpu is None:
        is_trainer_on_gpu = uses_gpu(run_config.trainer.device, len(list_visible_gpus()))
    return "bfloat16" if is_trainer_on_gpu else "float32"


def _build_source_table(run_config: RunConfig, source: ServedSourceConfig, address: str | None) -> ConfigTable:
    table = {name: value for name, value in _dump_set_fields(source).items() if name in ServedSourceConfig.model_fields}
    table |= {
        "name": source.source_name,
        "seq_len": run_config.with_default_seq_len(source).seq_len,
        "pool": _dump_set_fields(source.pool),
    }
    return table if address is None else {**table, "address": address}


def _dump_set_fields(section: Config) -> ConfigTable:
    """Return the keys of a section that were set, and the key that selects its variant."""
    tags = {tag: getattr(section, tag) for tag in ("type", "engine") if hasattr(section, tag)}
    return {**tags, **section.model_dump(mode="json", exclude_unset=True)}


def extract_server(config: RunConfig, _flags: Namespace, _args: Sequence[str]) -> dict[str, Any]:
    """Return the engine's part of a run's configuration."""
    return build_serve_config(config)


def extract_trainer(config: RunConfig, flags: Namespace, _args: Sequence[str]) -> dict[str, Any]:
    """Return the trainer's part of a run's configuration; without an orchestrator if a recording is replayed."""
    part = build_trainer_config(config)
    return {**part, "address": None} if flags.replay else part


def extract_env_server(config: RunConfig, _flags: Namespace, args: Sequence[str]) -> dict[str, Any]:
    """Return the part of one source of a run's configuration."""
    sources = (arg.partition("=")[2] or following for arg, following in zip(args, [*args[1:], ""]) if _is_source(arg))
    table = build_env_server_config(config, next(sources, None))
    if "inference" not in table and not any(arg.startswith("--inference") for arg in args):
        raise ConfigInvalid("the run starts its own engine; give its address with -b URL", key="inference")
    return table


def _is_source(arg: str) -> bool:
    return arg.partition("=")[0] == "--source"
