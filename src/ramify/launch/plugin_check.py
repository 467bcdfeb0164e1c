"""Validates the plugin tables of a configuration in a subprocess.

Only the config class of a plugin knows the keys of its table, and importing it runs user code. The launcher never does
that: it passes the tables to `python -m ramify.launch.plugin_check`, and reads the problems from its output. A source
with an interpreter of its own is checked there.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ramify.core.errors import ConfigInvalid, ConfigProblem, DeadlineExceeded, EnvironmentFault, RamifyError
from ramify.processes.interpreter import find_other_interpreter

if TYPE_CHECKING:
    from ramify.orchestrate.run_config import RunConfig  # the subprocess does not need it
    from ramify.rollout import Environment
    from ramify.train.sft.config import SftConfig

IMPORT_TIMEOUT = 120.0  # seconds for the import of all plugins
MAX_ERROR_CHARS = 2000  # of the subprocess's output in an error message


def check_plugin_tables(config: "RunConfig", *, include_start_checks: bool = False) -> dict[str, dict[str, Any]]:
    """Validate all plugin tables, and return the identities of the loaded environments, by source name in the store.

    With `include_start_checks`, also check what the processes of the run would refuse at their start: a source whose
    first task cannot be loaded, and a loss that cannot be imported.
    Raises ConfigInvalid with all problems, EnvironmentFault if the subprocess fails, DeadlineExceeded if it hangs.
    """
    identities = _check_request({**_build_request(config), "start": include_start_checks})
    names = {f"train.{number}": source.source_name for number, source in enumerate(config.train)}
    names |= {f"eval.{number}": f"eval/{source.source_name}" for number, source in enumerate(config.eval)}
    return {names[key]: identity for key, identity in identities.items()}


def check_sft_evals(config: "SftConfig") -> None:
    """Validate the plugin tables of the evals of an SFT run, and load the first task of each. Raises as for RL runs."""
    from ramify.env.data_selection import find_missing_dataset  # the subprocess does not need it

    if not config.eval:
        return
    sources = {f"eval.{number}": source for number, source in enumerate(config.eval)}
    _check_request(
        {
            "sources": {key: source.source_config.model_dump(mode="json") for key, source in sources.items()},
            "downloads": [key for key, source in sources.items() if find_missing_dataset(source.taskset)],
            "tables": [],
            "loss": None,
            "model": config.model.name,
            "engine": config.inference.engine,
            "groups_of_one": {},
            "score_models": {},
            "start": True,
        }
    )


def _check_request(request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Check a request in subprocesses, and return the identities of the environments. Raises ConfigInvalid."""
    replies = [_check_in(python, part) for python, part in _split_by_interpreter(request).items()]
    if problems := [problem for reply in replies for problem in reply["problems"]]:
        raise ConfigInvalid(problems=problems)
    return {key: identity for reply in replies for key, identity in reply["environments"].items()}


def raise_with_plugin_problems(
    config: "RunConfig", problems: Sequence[ConfigProblem], *, include_start_checks: bool = False
) -> NoReturn:
    """Raise ConfigInvalid with problems that were found elsewhere and all problems of the plugin tables."""
    plugin_problems: list[ConfigProblem] = []
    try:
        check_plugin_tables(config, include_start_checks=include_start_checks)
    except ConfigInvalid as error:
        plugin_problems = error.problems
    except (EnvironmentFault, DeadlineExceeded):
        pass  # the check is repeated when the other problems are solved
    raise ConfigInvalid(problems=[*problems, *plugin_problems])


def _split_by_interpreter(request: dict[str, Any]) -> dict[Path, dict[str, Any]]:
    """Return the requests to check in each interpreter: this process's, and the ones that sources name."""
    this_python = Path(sys.executable)
    sources_only: dict[str, Any] = {**request, "tables": [], "loss": None}
    requests: dict[Path, dict[str, Any]] = {this_python: {**request, "sources": {}}}
    for key, source in request["sources"].items():
        try:
            python = find_other_interpreter(source["python"]) or this_python
        except ConfigInvalid as error:
            raise ConfigInvalid(error.message, key=f"{key}.python") from error
        requests.setdefault(python, {**sources_only, "sources": {}})["sources"][key] = source
    return requests


def _check_in(python: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Run the checks of a request in a subprocess of an interpreter, and return its reply."""
    command = [str(python), "-m", "ramify.launch.plugin_check"]
    try:
        text = json.dumps(request, default=str)
        result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=IMPORT_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(
            f"checking plugin configuration timed out: imports took longer than {IMPORT_TIMEOUT:g} s"
        ) from None
    if result.returncode != 0:
        output = (result.stderr or result.stdout)[-MAX_ERROR_CHARS:].strip()
        raise EnvironmentFault(f"plugin configuration could not be checked:\n{output}")
    return json.loads(result.stdout.splitlines()[-1])


def _build_request(config: "RunConfig") -> dict[str, Any]:
    """Return everything to check: sources that the run serves, plugin tables, and the loss, by their config keys."""
    from ramify.launch.pinned_datasets import list_missing_datasets  # the subprocess does not need it

    sources = {
        f"{kind}.{number}": config.with_default_seq_len(source).source_config.model_dump(mode="json")
        for kind, sources in (("train", config.train), ("eval", config.eval))
        for number, source in enumerate(sources)
        if source.address is None
    }
    return {
        "sources": sources,
        "downloads": list(list_missing_datasets(config)),  # tasks that cannot be loaded yet
        "tables": config.plugin_tables,
        "loss": config.trainer.loss.model_dump(mode="json"),
        "model": config.model.name,
        "engine": config.inference.engine,
        "groups_of_one": {
            f"train.{number}": "orchestrator.group_size" if source.group_size is None else f"train.{number}.group_size"
            for number, source in enumerate(config.train)
            if config.get_group_size(source) == 1
        },
        "score_models": {
            f"train.{number}": source.score_model
            for number, source in enumerate(config.train)
            if source.score_model in config.all_models
        },
    }


def check_request(request: dict[str, Any]) -> dict[str, Any]:
    """Check a request in this process, which is the subprocess; return the problems and the environment identities."""
    from ramify.env import plugin
    from ramify.env.decorators import MISSING_REWARD_ADVICE
    from ramify.rollout import Environment, SourceConfig

    problems: list[ConfigProblem] = []
    environments: dict[str, dict[str, Any]] = {}
    for source_key, table in request["sources"].items():
        try:
            environment = Environment.load(SourceConfig(**table), key=source_key)
            environments[source_key] = environment.identity
            if source_key.startswith("train.") and not environment.has_rewards:
                text = f"{environment.name} has no reward, so nothing can be learned; {MISSING_REWARD_ADVICE}"
                problems.append(ConfigProblem(f"{source_key}.taskset", text))
            if environment.taskset.requires_vision:
                problems += _find_vision_problems(source_key, environment, request)
        except ConfigInvalid as error:
            problems += [problem._replace(key=_prefix_key(source_key, problem.key)) for problem in error.problems]
            continue
        if request.get("start") and source_key not in request["downloads"]:
            problems += _find_first_task_problems(source_key, environment, request)
    try:
        resolved = plugin.resolve_plugins(request["tables"])
    except ConfigInvalid as error:
        problems += error.problems
    else:
        problems += _find_group_size_problems(request, [plugin_class for plugin_class, _ in resolved])
    if request.get("start") and request["loss"] is not None:
        problems += _find_loss_problems(request["loss"])
    return {"problems": problems, "environments": environments}


def _find_first_task_problems(
    source_key: str, environment: "Environment", request: dict[str, Any]
) -> list[ConfigProblem]:
    from ramify.rollout.environment import check_prompt_images

    key = f"{source_key}.taskset"
    try:
        task = next(environment.iter_tasks(), None)
        if task is None:
            return [ConfigProblem(key, "has no tasks")]
        environment.check_task(task)
        has_images = check_prompt_images(task)
    except RamifyError as error:
        return [ConfigProblem(key, error.message)]
    except Exception as error:  # noqa: BLE001 - `load` is user code
        return [ConfigProblem(key, f"load raised {type(error).__name__}: {error}")]
    if has_images and not environment.taskset.requires_vision:
        return _find_vision_problems(source_key, environment, request)
    return []


def _find_vision_problems(source_key: str, environment: "Environment", request: dict[str, Any]) -> list[ConfigProblem]:
    """Return why the run cannot train or evaluate on a source with images."""
    from ramify.model.image_support import find_image_problem

    problems: list[ConfigProblem] = []
    if reason := find_image_problem(request["model"], request["engine"]):
        problems.append(ConfigProblem(f"{source_key}.taskset", f"{environment.name} {reason}"))
    if score_model := request["score_models"].get(source_key):
        problem = (
            f"{environment.name} has images, and rollouts with images cannot be scored by the model {score_model!r}"
        )
        problems.append(
            ConfigProblem(f"{source_key}.algorithm", f"{problem}; use an algorithm without teacher and without beta")
        )
    return problems


def _find_group_size_problems(request: dict[str, Any], plugin_classes: Sequence[Any]) -> list[ConfigProblem]:
    """Return the settings that give groups of one attempt to algorithms that compare attempts."""
    problems: list[ConfigProblem] = []
    for (kind, table_key, table), plugin_class in zip(request["tables"], plugin_classes):
        source_key = table_key.removesuffix(".algorithm")
        if kind == "algorithm" and source_key in request["groups_of_one"] and plugin_class.compares_attempts:
            text = f"1 gives the algorithm {table['id']!r} of {source_key} nothing to compare"
            problems.append(
                ConfigProblem(request["groups_of_one"][source_key], f"{text}; use at least 2, or opd, sft or rae")
            )
    return problems


def _find_loss_problems(loss: dict[str, Any]) -> list[ConfigProblem]:
    from ramify.train.losses import load_loss

    try:
        load_loss(loss["id"], loss["options"])
    except ConfigInvalid as error:
        return [ConfigProblem("trainer.loss", error.message)]
    return []


def _prefix_key(source_key: str, key: str) -> str:
    """Return a key of a source, or of one of its tables, relative to the whole configuration."""
    return key if key.startswith(f"{source_key}.") else f"{source_key}.{key}".removesuffix(".")


if __name__ == "__main__":
    print(f"\n{json.dumps(check_request(json.load(sys.stdin)))}")
