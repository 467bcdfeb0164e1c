"""`ramify model`: list the packaged models, inspect a model, or download one."""

import json
import math
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rich.table import Table

from ramify.core.console import PipeConsole
from ramify.core.errors import ConfigInvalid, ModelNotFound
from ramify.model.resolve import PACKAGED_MODELS, fetch_model, resolve_model_path
from ramify.model.weights_manifest import read_tensor_shapes

MEASUREMENT_LABELS = {
    "well_formed": "reverse-text: well-formed replies",
    "similarity": "... similarity",
    "exact": "... exact",
    "greedy_similarity": "... similarity, greedy",
    "greedy_exact": "... exact, greedy",
    "tool_calls": "unseen tools: parseable tool calls",
    "offered_calls": "... of an offered tool",
    "walk_calls": "wikispeedia: calls of an offered tool",
    "walk_links": "... clicks on a link of the page",
    "walk_reached": "... targets reached",
    "sort_tagged": "alphabet-sort: replies with the right tags",
    "sort_reward": "... reward",
    "guess_valid": "wordle: valid guesses",
    "guess_reward": "... reward",
    "guess_spread": "... standard deviation of the rewards for one word",
    "codeword_letters": "color-codeword: replies of letters only",
    "codeword_match": "... partial match",
    "codeword_exact": "... exact",
    "codeword_spread": "... standard deviation of the partial match of one task",
}
CONFIG_LABELS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
}


@dataclass(slots=True)
class ModelInfo:
    """A model directory, as described by its files; the model is not loaded."""

    name: str
    path: Path
    num_parameters: int | None
    """None if the weights are not here."""
    num_bytes: int
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    build_info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Content of `ramify.json`: how a packaged model was built, and its measurements; empty for other models."""


def run(options: Namespace) -> int:
    """Run the action `list`, `show` or `fetch`."""
    if options.action != "list" and not options.name:
        raise ConfigInvalid(f"ramify model {options.action} needs the NAME of a model")
    return {"list": _list_models, "show": _show_model, "fetch": _fetch_model}[options.action](options)


def read_model_info(name: str) -> ModelInfo:
    """Read the files of a model, without its weights."""
    path = resolve_model_path(name)
    config = _read_json_object(path / "config.json")
    config = {**config, **config.get("text_config", {})}  # a vision-language model has its decoder's sizes
    record = path / "ramify.json"
    return ModelInfo(
        name,
        path,
        sum(map(math.prod, read_tensor_shapes(path).values())) or None,
        sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        {label: config[key] for label, key in CONFIG_LABELS.items() if key in config},
        _read_json_object(record) if record.is_file() else {},
    )


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotFound(f"{path} does not contain a JSON object")
    return cast(dict[str, Any], content)


def _list_models(options: Namespace) -> int:
    models: list[ModelInfo] = []
    for name in PACKAGED_MODELS:
        try:
            models.append(read_model_info(name))
        except ModelNotFound as error:
            print(error.message)
    if options.json:
        print(json.dumps([_to_json(info) for info in models], indent=2))
        return 0
    table = Table.grid(padding=(0, 2, 0, 0))
    for info in models:
        count = "unknown" if info.num_parameters is None else _format_millions(info.num_parameters)
        table.add_row(info.name, f"{count} parameters", _format_megabytes(info.num_bytes), str(info.path))
    PipeConsole(soft_wrap=True).print(table)
    return 0


def _show_model(options: Namespace) -> int:
    info = read_model_info(options.name)
    if options.json:
        print(json.dumps(_to_json(info), indent=2))
        return 0
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("model", info.name)
    table.add_row("path", str(info.path))
    count = info.num_parameters
    table.add_row("parameters", "unknown: the weights are not here" if count is None else _format_millions(count))
    table.add_row("size", _format_megabytes(info.num_bytes))
    for label, value in info.config.items():
        table.add_row(label, str(value))
    if info.build_info:
        build = {key: info.build_info[key] for key in ("recipe", "seed", "built") if key in info.build_info}
        table.add_row("build", ", ".join(f"{key} {value}" for key, value in build.items()))
    for key, value in info.build_info.get("figures", {}).items():
        table.add_row(MEASUREMENT_LABELS.get(key, key), f"{value:.3f}")
    PipeConsole(soft_wrap=True).print(table)
    return 0


def _fetch_model(options: Namespace) -> int:
    print(fetch_model(options.name))
    return 0


def _to_json(info: ModelInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "path": str(info.path),
        "parameters": info.num_parameters,
        "bytes": info.num_bytes,
        "config": info.config,
        **({"record": info.build_info} if info.build_info else {}),
    }


def _format_millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def _format_megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
