"""Are the plugin tables of a configuration right? Asked of the plugins themselves, in a process that ends right after.

A table's keys are known only to the plugin's own config class, and loading it runs code of the user's. The launcher
never does that: it hands the tables to `python -m ramify.launch.plugin_check` and reads back the problems.
"""

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ramify.config import raise_config_invalid
from ramify.errors import ConfigInvalid, DeadlineExceeded, EnvironmentFault, RamifyError
from ramify.orchestrate.config import RunConfig

if TYPE_CHECKING:
    from ramify.rollout import Environment

IMPORT_TIMEOUT = 120.0  # seconds for all plugins to be imported
MAX_ERROR_CHARS = 2000  # characters of what went wrong that are shown


def check_plugin_tables(config: RunConfig, *, include_start_checks: bool = False) -> dict[str, dict[str, Any]]:
    """Refuse, with ConfigInvalid, tables that their plugins refuse.

    With `start`, also refuse what the processes of the run would refuse when they start: a source whose first task
    cannot be loaded, and a loss that cannot be imported.
    Return the identity of each environment that was loaded, by the name of the source in the run's store.
    """
    command = [sys.executable, "-m", "ramify.launch.plugin_check"]
    asked = json.dumps({**_build_request(config), "start": include_start_checks}, default=str)
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=IMPORT_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(
            f"the environments were not loaded within {IMPORT_TIMEOUT:g} s, to check their keys"
        ) from None
    if done.returncode != 0:
        raise EnvironmentFault(
            f"the environments cannot be checked:\n{(done.stderr or done.stdout)[-MAX_ERROR_CHARS:].strip()}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["problems"]:
        raise_config_invalid([(key, text) for key, text in found["problems"]])
    titles = {f"train.{number}": source.source_name for number, source in enumerate(config.train)}
    titles |= {f"eval.{number}": f"eval/{source.source_name}" for number, source in enumerate(config.eval)}
    return {titles[at]: identity for at, identity in found["environments"].items()}


def _build_request(config: RunConfig) -> dict[str, Any]:
    """What is to be checked: sources as a whole, and single tables by the key they stand under."""
    sources: dict[str, Any] = {}
    tables: list[tuple[str, str, dict[str, Any]]] = []
    for kind, listed in (("train", config.train), ("eval", config.eval)):
        for number, source in enumerate(listed):
            if source.address is None:
                sources[f"{kind}.{number}"] = source.source_config.model_dump(mode="json")
    for number, source in enumerate(config.train):
        tables.append(("algorithm", f"train.{number}.algorithm", {"id": "grpo", **source.algorithm}))
    for number, table in enumerate(config.orchestrator.filters):
        tables.append(("filter", f"orchestrator.filters.{number}", table))
    return {"sources": sources, "tables": tables, "loss": config.trainer.loss.model_dump(mode="json")}


def run_checks(request: dict[str, Any]) -> dict[str, Any]:
    """Return each problem with its key, and the identity of each source. Runs in a separate process."""
    from ramify.env import plugin
    from ramify.env.decorators import MISSING_REWARD_ADVICE
    from ramify.rollout import Environment, SourceConfig

    problems: list[tuple[str, str]] = []
    environments: dict[str, dict[str, Any]] = {}
    for at, table in request["sources"].items():
        try:
            environment = Environment.load(SourceConfig(**table))
            environments[at] = environment.identity
            if at.startswith("train.") and not environment.has_rewards:
                text = f"{environment.name} has no reward, so nothing can be learned; {MISSING_REWARD_ADVICE}"
                problems.append((f"{at}.taskset", text))
        except ConfigInvalid as error:
            problems += [_prefix_key(at, key, text) for key, text in _parse_problems(error.message)]
            continue
        if request.get("start"):
            problems += [(f"{at}.taskset", text) for text in _find_first_task_problems(environment)]
    for kind, at, table in request["tables"]:
        try:
            plugin.resolve_plugin(kind, table, table_key=at)
        except ConfigInvalid as error:
            problems += _parse_problems(error.message)
    if request.get("start"):
        problems += _find_loss_problems(request["loss"])
    return {"problems": problems, "environments": environments}


def _find_first_task_problems(environment: "Environment") -> list[str]:
    try:
        task = next(environment.iter_tasks(), None)
        if task is None:
            return ["has no tasks"]
        environment.check_task(task)
    except RamifyError as error:
        return [error.message]
    except Exception as error:  # noqa: BLE001 - `load` is anybody's code
        return [f"load raised {type(error).__name__}: {error}"]
    return []


def _find_loss_problems(loss: dict[str, Any]) -> list[tuple[str, str]]:
    from ramify.train.losses import load_loss

    try:
        load_loss(loss["id"], loss["options"])
    except ConfigInvalid as error:
        return [("trainer.loss", error.message)]
    return []


def _prefix_key(key_prefix: str, key: str, text: str) -> tuple[str, str]:
    """The problem as it is seen from the top, where the source stands under `at`."""
    meant = re.sub(r"did you mean (?=[a-z]\w*\.)", f"did you mean {key_prefix}.", text)
    return (f"{key_prefix}.{key}" if key else key_prefix, meant)


def _parse_problems(message: str) -> list[tuple[str, str]]:
    """The single problems in a message of `refuse`; any other message is one."""
    head, *lines = message.splitlines()
    if not head.endswith("in the configuration:"):
        return [("", message)]
    return [(key, text) if text else ("", key) for key, _, text in (line.strip().partition(": ") for line in lines)]


if __name__ == "__main__":
    print(f"\n{json.dumps(run_checks(json.load(sys.stdin)))}")
