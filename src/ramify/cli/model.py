"""`ramify model`: the models that ship with the package, what is known about a model, and how to build one again."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ramify.cli.paper import Paper
from ramify.errors import ConfigInvalid, ModelNotFound, WeightsRefused
from ramify.model.resolve import PACKAGED_MODELS, fetch_model, resolve_model_path

FIGURES = {
    "well_formed": "reverse-text: well-formed replies",
    "similarity": "... similarity",
    "exact": "... exact",
    "greedy_similarity": "... similarity, greedy",
    "greedy_exact": "... exact, greedy",
    "tool_calls": "tools never seen: parseable tool calls",
    "offered_calls": "... of an offered tool",
    "walk_calls": "wikispeedia: calls of an offered tool",
    "walk_links": "... clicks on a link of the page",
    "walk_reached": "... targets reached",
    "sort_tagged": "alphabet-sort: replies with the right tags",
    "sort_reward": "... reward",
    "guess_valid": "wordle: valid guesses",
    "guess_reward": "... reward",
    "guess_spread": "... its deviation over attempts at a word",
}
SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
}


@dataclass(slots=True)
class About:
    """A model directory, as far as its files tell without loading it."""

    name: str
    path: Path
    parameters: int
    bytes: int
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    record: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the build measured and wrote beside the model; empty for a model that `ramify model build` did not make."""


def run(args: Sequence[str]) -> int:
    """List, show, fetch or build."""
    asked = _parser().parse_args(args)
    return {"list": _list, "show": _show, "fetch": _fetch, "build": _build}[asked.action](asked)


def _parser() -> argparse.ArgumentParser:
    from ramify.cli.app import COMMANDS

    parser = argparse.ArgumentParser(prog="ramify model", description=COMMANDS["model"].help)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="the models that ship with the package")
    show = actions.add_parser("show", help="a model's sizes, and its figures where they were measured")
    show.add_argument("name", metavar="NAME", help="a packaged model, a directory, or a cached Hugging Face id")
    show.add_argument("--measure", action="store_true", help="measure the figures now (a minute for tiny)")
    for action in (listing, show):
        action.add_argument("--json", action="store_true", help="print JSON")
    fetch = actions.add_parser("fetch", help="download a model from the Hugging Face hub into its local cache")
    fetch.add_argument("name", metavar="NAME", help="ORG/NAME")
    build = actions.add_parser("build", help="train a packaged model from its recipe")
    build.add_argument("name", metavar="NAME", choices=PACKAGED_MODELS, help=" or ".join(PACKAGED_MODELS))
    build.add_argument("--seed", type=int, default=0, help="0 is the model that ships")
    build.add_argument("-o", dest="directory", metavar="DIR", type=Path, required=True, help="where to write it")
    build.add_argument("--force", action="store_true", help="replace DIR if it exists")
    return parser


def look(name: str) -> About:
    """What the files of a model say."""
    path = resolve_model_path(name)
    config = _table(path / "config.json")
    record = path / "ramify.json"
    return About(
        name,
        path,
        _parameters(path),
        sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        {label: config[key] for label, key in SIZES.items() if key in config},
        _table(record) if record.is_file() else {},
    )


def _table(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelNotFound(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelNotFound(f"{path} is no table")
    return found


def _parameters(directory: Path) -> int:
    """Counted from the headers of the weights; tied weights are stored once."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in directory.glob("*.safetensors"):
        try:
            with safe_open(file, "numpy") as weights:
                total += sum(math.prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightsRefused(f"{file} is not a safetensors file: {error}") from error
    return total


def _list(asked: argparse.Namespace) -> int:
    found: list[About] = []
    for name in PACKAGED_MODELS:
        try:
            found.append(look(name))
        except ModelNotFound as error:
            print(error.message)
    if asked.json:
        print(json.dumps([_plain(about) for about in found], indent=2))
        return 0
    table = Table.grid(padding=(0, 2, 0, 0))
    for about in found:
        table.add_row(about.name, f"{_millions(about.parameters)} parameters", _megabytes(about.bytes), str(about.path))
    Paper(highlight=False, soft_wrap=True).print(table)
    return 0


def _show(asked: argparse.Namespace) -> int:
    about = look(asked.name)
    if asked.measure:
        from ramify.recipe.metrics import measure_model  # torch is loaded here, not for help

        about.record = {**about.record, "figures": measure_model(about.path).to_dict(), "built": "measured now"}
    if asked.json:
        print(json.dumps(_plain(about), indent=2))
        return 0
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("model", about.name)
    table.add_row("where", str(about.path))
    table.add_row("parameters", _millions(about.parameters))
    table.add_row("size", _megabytes(about.bytes))
    for label, value in about.config.items():
        table.add_row(label, str(value))
    if about.record:
        recipe = {key: about.record[key] for key in ("recipe", "seed", "built") if key in about.record}
        table.add_row("build", ", ".join(f"{key} {value}" for key, value in recipe.items()))
    for key, value in about.record.get("figures", {}).items():
        table.add_row(FIGURES.get(key, key), f"{value:.3f}")
    console = Paper(highlight=False, soft_wrap=True)
    console.print(table)
    if "figures" not in about.record:
        console.print("figures: not measured; --measure does it now")
    return 0


def _fetch(asked: argparse.Namespace) -> int:
    print(fetch_model(asked.name))
    return 0


def _build(asked: argparse.Namespace) -> int:
    if asked.directory.exists() and not asked.force:
        raise ConfigInvalid(f"{asked.directory} exists; --force replaces it")
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: one thread chosen later gives other bits
    from ramify.recipe.build import build_model  # torch is loaded here, not for help
    from ramify.store import wrap_storage_errors
    from ramify.train.sft.display import choose_display

    with wrap_storage_errors(asked.directory):
        build_model(asked.name, asked.directory, seed=asked.seed, display=choose_display)
    return 0


def _plain(about: About) -> dict[str, Any]:
    return {
        "name": about.name,
        "path": str(about.path),
        "parameters": about.parameters,
        "bytes": about.bytes,
        "config": about.config,
        **({"record": about.record} if about.record else {}),
    }


def _millions(count: int) -> str:
    return f"{count / 1e6:.2f} M"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
