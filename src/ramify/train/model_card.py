"""The model card of an exported model: where it comes from, its evals, the curves and the configuration of its run.

Importable without torch.
"""

import platform
import re
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import tomli_w

from ramify import __version__
from ramify.core.config import CONFIG_FILE
from ramify.core.config.schema import is_dict, is_list
from ramify.run.store import RunStore
from ramify.run.store.run_log import RunLog
from ramify.train.config import find_best_step
from ramify.train.exported_models import ExportedModel

CARD_FILE, CURVES_FILE = "README.md", "curves.png"  # beside the model
SCORE_NAME = re.compile(r"eval/.+/(avg|pass@\d+|pass\^\d+|metric/.+)|validation/loss")
CURVE_NAME = re.compile(r"reward/all/mean|train/loss|eval/.+/avg|validation/loss")
SECRET_KEY = re.compile(r"(key|token|secret|password|credential|authorization)s?$", re.IGNORECASE)
VARIABLES_KEY = "env"  # of a table of environment variables; each of them may be a secret
LOCAL_KEYS = ("output",)  # of a configuration: they only say where the run was on its machine
PACKAGES = ("torch", "transformers", "vllm")


def write_model_card(store: RunStore, exported: ExportedModel, *, has_curves: bool) -> Path:
    """Write the card beside an exported model of the run in `store`, and return its path."""
    config = tomllib.loads((store.path / CONFIG_FILE).read_text("utf-8"))
    path = exported.directory / CARD_FILE
    path.write_text(_build_card(store, config, exported.step, has_curves), "utf-8")
    return path


def _build_card(store: RunStore, config: dict[str, Any], step: int, has_curves: bool) -> str:
    name, base = store.path.resolve().name, str(config["model"]["name"])
    method = "reinforcement learning" if "train" in config else "supervised fine-tuning"
    base_name = f"`{base}`" if not Path(base).is_absolute() else f"`{Path(base).name}`"
    sections = [
        f"# {name}",
        f"{base_name} after {step} steps of {method} with Ramify, in the run `{name}`.",
        "## Data",
        "\n".join(f"- {line}" for line in _list_data(config)),
        "## Evals",
        _build_score_table(store, step),
        *([f"![curves]({CURVES_FILE})"] if has_curves else []),
        "## Versions",
        ", ".join(_list_versions()),
        "## Configuration",
        f"<details><summary>{CONFIG_FILE}</summary>\n\n```toml\n{tomli_w.dumps(_redact(config))}```\n\n</details>",
    ]
    return _build_front_matter(config, base) + "\n\n".join(sections) + "\n"


def _build_front_matter(config: Mapping[str, Any], base: str) -> str:
    """Return the table that the hub reads; a base model with the form of a hub id is linked."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- ramify"]
    lines += ["- reinforcement-learning"] if "train" in config else ["- sft"]
    lines += [f"base_model: {base}"] if re.fullmatch(r"[\w.-]+/[\w.-]+", base) else []
    return "\n".join(["---", *lines, "---", "", ""])


def _list_data(config: Mapping[str, Any]) -> list[str]:
    """Return a line for each dataset and environment."""
    data = config.get("data", [])
    lines = [f"dataset `{_shorten(table['path'])}`" for table in (data if is_list(data) else [data])]
    for kind, purpose in (("train", "trained on"), ("eval", "evaluated on")):
        for source in config.get(kind, []):
            taskset = source["taskset"]
            dataset = f", dataset `{_shorten(taskset['path'])}`" if "path" in taskset else ""
            lines.append(f"{purpose} `{_shorten(taskset['id'])}`{dataset}")
    return list(dict.fromkeys(lines))  # sources may differ in other keys only


def _shorten(path: Any) -> str:
    """Return a name, and of an absolute path its last part: other machines do not have the rest."""
    return Path(str(path)).name if Path(str(path)).is_absolute() else str(path)


def _build_score_table(store: RunStore, step: int) -> str:
    """Return a table of the evals: at their first step, at the last one up to the model's step, and the best."""
    values: dict[str, dict[int, float]] = {}
    for point in RunLog(store).metrics():
        if SCORE_NAME.fullmatch(point.name) and point.step <= step:
            values.setdefault(point.name, {})[point.step] = point.value
    if not values:
        return "The run has no evals."
    rows = ["| metric | first | last | best |", "|---|---|---|---|"]
    for name, by_step in sorted(values.items()):
        best = find_best_step(name, by_step, by_step)
        steps = (min(by_step), max(by_step), max(by_step) if best is None else best)
        rows.append(f"| `{name}` | " + " | ".join(f"{by_step[at]:.4g} (step {at})" for at in steps) + " |")
    return "\n".join(rows)


def _list_versions() -> list[str]:
    versions = [f"ramify {__version__}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return versions


def _redact(value: Any, key: str = "", *, is_secret: bool = False) -> Any:
    """Return the configuration without directories of this machine and without values that may be secrets."""
    is_secret = is_secret or key == VARIABLES_KEY or SECRET_KEY.search(key) is not None
    if is_dict(value):
        table = cast(Mapping[str, Any], value)
        return {
            name: _redact(item, name, is_secret=is_secret) for name, item in table.items() if name not in LOCAL_KEYS
        }
    if is_list(value):
        return [_redact(item, is_secret=is_secret) for item in value]
    if isinstance(value, str):
        return "..." if is_secret else _shorten(value)
    return value
