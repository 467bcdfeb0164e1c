"""What each process of a run is told: its part of the run's configuration.

The supervisor writes the parts to files, one for each process; a part command that is given a whole run's file takes
its own. Both go through here, so both mean the same. A part is a table of what was said, over the command's defaults.
"""

from typing import Any
from urllib.parse import urlsplit

from ramify.config import Config
from ramify.envserver.config import EnvServerConfig, ServedSourceConfig
from ramify.infer.config import ExternalConfig, VLLMConfig
from ramify.launch.devices import Gpu, on_gpu, visible_gpus
from ramify.launch.ports import source_addresses
from ramify.orchestrate.config import RunConfig, RunSourceConfig

Table = dict[str, Any]


def serve_part(run: RunConfig, gpus: list[Gpu] | None = None) -> Table:
    """For `ramify serve`: the run's model and engine, at the run's `base_url` where it names one server.

    `gpus` are the trainer's; by default this machine's, as if it were here.
    """
    inference, dtype = run.inference, _dtype(run, gpus)
    table: Table = {"model": _said(run.model), "server": {"model_name": run.model.name}}
    if isinstance(inference, ExternalConfig):
        table["inference"] = {"dtype": dtype, "max_model_len": run.seq_len}
        if len(inference.base_url) > 1:  # flags will say which of them this is
            table["server"]["allowed_hosts"] = [urlsplit(url).hostname for url in inference.base_url]
        else:
            place = urlsplit(inference.base_url[0])
            port = place.port or (443 if place.scheme == "https" else 80)
            table["server"] |= {"host": place.hostname, "port": port}
    else:
        length = inference.max_model_len or run.seq_len
        table["inference"] = {**_said(inference), "dtype": dtype, "max_model_len": length}
    return table if isinstance(inference, VLLMConfig) else {**table, "renderer": _said(run.renderer)}


def env_part(run: RunConfig, name: str | None) -> Table:
    """For `ramify env-server`: the source `name`; without `inference` where nobody knows yet what its agents ask."""
    given = source_addresses(run)
    table: Table = {
        kind: [_source(run, source, given.get(f"{kind}/{source.source_name}")) for source in sources]
        for kind, sources in (("train", run.train), ("eval", run.eval))
    }
    table |= {"renderer": _said(run.renderer), "model": _said(run.model), "output": str(run.path)}
    table |= {"source": name} if name else {}
    table |= {"secret_env": run.secret_env} if run.secret else {}
    urls = run.inference.base_url if isinstance(run.inference, ExternalConfig) else []
    picked = EnvServerConfig(**table, inference=ExternalConfig(base_url=["http://unused"])).select_source()
    sources = {"train": run.train, "eval": run.eval}[picked.kind]
    endpoint = next(source.endpoint for source in sources if source.title == picked.source_name)
    if endpoint is not None:
        urls, table["api_key_env"] = [endpoint.base_url], endpoint.api_key_env or ""
        table |= {"model": {"name": endpoint.model}} if endpoint.model else {}
    return {**table, "inference": {"base_url": urls}} if urls else table


def trainer_part(run: RunConfig) -> Table:
    """For `ramify trainer`: what it trains, for the orchestrator whose address the run has fixed, if it has."""
    place = run.orchestrator.address
    known = {} if urlsplit(place).port == 0 else {"address": place}
    told = {name: _said(getattr(run, name)) for name in ("model", "trainer", "checkpoint", "weights")}
    where = {"name": run.path.name, "output": str(run.path.parent), "secret_env": run.secret_env}
    return {**where, **known, **told, "seed": run.seed}


def _dtype(run: RunConfig, gpus: list[Gpu] | None) -> str:
    """Of the engine: what is trained is what was sampled, so it computes in the trainer's type."""
    asked = "auto" if isinstance(run.inference, ExternalConfig) else run.inference.dtype
    found = run.trainer.dtype if asked == "auto" else asked
    if found != "auto":
        return found
    return "bfloat16" if on_gpu(run.trainer.device, visible_gpus() if gpus is None else gpus) else "float32"


def _source(run: RunConfig, source: RunSourceConfig, address: str | None) -> Table:
    table = {name: value for name, value in _said(source).items() if name in ServedSourceConfig.model_fields}
    table |= {
        "name": source.source_name,
        "seq_len": run.with_default_seq_len(source).seq_len,
        "pool": _said(source.pool),
    }
    return table if address is None else {**table, "address": address}


def _said(section: Config) -> Table:
    """What was said of a section, and which variant it is."""
    tags = {tag: getattr(section, tag) for tag in ("type", "engine") if hasattr(section, tag)}
    return {**tags, **section.model_dump(mode="json", exclude_unset=True)}
