"""What each process of a run is told: its part of the run's configuration.

The supervisor writes the parts to files, one for each process; a part command that is given a whole run's file takes
its own. Both go through here, so both mean the same. A part is a table of what was said, over the command's defaults.
"""

from typing import Any
from urllib.parse import urlsplit

from ramify.config import Config
from ramify.envserver.config import EnvServerConfig, ServedSourceConfig
from ramify.infer.config import ExternalConfig, VLLMConfig
from ramify.launch.devices import Gpu, uses_gpu, visible_gpus
from ramify.launch.ports import build_source_addresses
from ramify.orchestrate.config import RunConfig, RunSourceConfig

ConfigTable = dict[str, Any]


def build_serve_config(run_config: RunConfig, gpus: list[Gpu] | None = None) -> ConfigTable:
    """For `ramify serve`: the run's model and engine, at the run's `base_url` where it names one server.

    `gpus` are the trainer's; by default this machine's, as if it were here.
    """
    inference, dtype = run_config.inference, _resolve_engine_dtype(run_config, gpus)
    table: ConfigTable = {"model": _dump_set_fields(run_config.model), "server": {"model_name": run_config.model.name}}
    if isinstance(inference, ExternalConfig):
        table["inference"] = {"dtype": dtype, "max_model_len": run_config.seq_len}
        if len(inference.base_url) > 1:  # flags will say which of them this is
            table["server"]["allowed_hosts"] = [urlsplit(url).hostname for url in inference.base_url]
        else:
            place = urlsplit(inference.base_url[0])
            port = place.port or (443 if place.scheme == "https" else 80)
            table["server"] |= {"host": place.hostname, "port": port}
    else:
        length = inference.max_model_len or run_config.seq_len
        table["inference"] = {**_dump_set_fields(inference), "dtype": dtype, "max_model_len": length}
    return table if isinstance(inference, VLLMConfig) else {**table, "renderer": _dump_set_fields(run_config.renderer)}


def build_env_server_config(run_config: RunConfig, source_name: str | None) -> ConfigTable:
    """For `ramify env-server`: the source `name`; without `inference` where nobody knows yet what its agents ask."""
    given = build_source_addresses(run_config)
    table: ConfigTable = {
        kind: [_build_source_table(run_config, source, given.get(f"{kind}/{source.source_name}")) for source in sources]
        for kind, sources in (("train", run_config.train), ("eval", run_config.eval))
    }
    table |= {
        "renderer": _dump_set_fields(run_config.renderer),
        "model": _dump_set_fields(run_config.model),
        "output": str(run_config.path),
    }
    table |= {"source": source_name} if source_name else {}
    table |= {"secret_env": run_config.secret_env} if run_config.secret else {}
    urls = run_config.inference.base_url if isinstance(run_config.inference, ExternalConfig) else []
    picked = EnvServerConfig(**table, inference=ExternalConfig(base_url=["http://unused"])).select_source()
    sources = {"train": run_config.train, "eval": run_config.eval}[picked.kind]
    endpoint = next(source.endpoint for source in sources if source.title == picked.source_name)
    if endpoint is not None:
        urls, table["api_key_env"] = [endpoint.base_url], endpoint.api_key_env or ""
        table |= {"model": {"name": endpoint.model}} if endpoint.model else {}
    return {**table, "inference": {"base_url": urls}} if urls else table


def build_trainer_config(run_config: RunConfig) -> ConfigTable:
    """For `ramify trainer`: what it trains, for the orchestrator whose address the run has fixed, if it has."""
    place = run_config.orchestrator.address
    known = {} if urlsplit(place).port == 0 else {"address": place}
    told = {name: _dump_set_fields(getattr(run_config, name)) for name in ("model", "trainer", "checkpoint", "weights")}
    where = {"name": run_config.path.name, "output": str(run_config.path.parent), "secret_env": run_config.secret_env}
    return {**where, **known, **told, "seed": run_config.seed}


def _resolve_engine_dtype(run_config: RunConfig, gpus: list[Gpu] | None) -> str:
    """Of the engine: what is trained is what was sampled, so it computes in the trainer's type."""
    asked = "auto" if isinstance(run_config.inference, ExternalConfig) else run_config.inference.dtype
    found = run_config.trainer.dtype if asked == "auto" else asked
    if found != "auto":
        return found
    return "bfloat16" if uses_gpu(run_config.trainer.device, visible_gpus() if gpus is None else gpus) else "float32"


def _build_source_table(run_config: RunConfig, source: RunSourceConfig, address: str | None) -> ConfigTable:
    table = {name: value for name, value in _dump_set_fields(source).items() if name in ServedSourceConfig.model_fields}
    table |= {
        "name": source.source_name,
        "seq_len": run_config.with_default_seq_len(source).seq_len,
        "pool": _dump_set_fields(source.pool),
    }
    return table if address is None else {**table, "address": address}


def _dump_set_fields(section: Config) -> ConfigTable:
    """What was said of a section, and which variant it is."""
    tags = {tag: getattr(section, tag) for tag in ("type", "engine") if hasattr(section, tag)}
    return {**tags, **section.model_dump(mode="json", exclude_unset=True)}
