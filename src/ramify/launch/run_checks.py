"""What is checked and noted before a run starts: models, ranks, packages, lengths and runtimes.

One error lists all problems, including those in plugin tables. Notes are lines of the plan about what may surprise.

A dry run checks everything that a process of the run would refuse at its start. GPUs that are not on this machine are
assumed, and models that the run would download or export are not checked. Nor are the published weights of another run,
which may still have to train them. So a run for another machine can be planned here. Problems that appear only when the
model is loaded are left to the run.
"""

import contextlib
import os
from pathlib import Path
from typing import Any, cast

from ramify.core.errors import ConfigInvalid, ConfigProblem, ModelNotFound, RamifyError
from ramify.core.hub import is_hub_id
from ramify.core.names import format_count
from ramify.infer.config import EngineConfig, VLLMConfig
from ramify.launch.plugin_check import check_plugin_tables, raise_with_plugin_problems
from ramify.launch.run_directory import check_environments
from ramify.launch.sink_threads import check_sinks_installed
from ramify.model.config_check import check_model_config
from ramify.model.image_support import find_rank_problem
from ramify.model.render import load_renderer
from ramify.model.resolve import (
    describe_missing_model,
    fetch_model,
    has_weights,
    is_fetchable,
    is_loaded_as_text,
    read_max_positions,
    read_vocab_size,
    resolve_config_path,
    resolve_model_path,
)
from ramify.orchestrate.run_config import START_REFERENCE, RunConfig, uses_model
from ramify.processes.program import run_program
from ramify.processes.wire.address import check_bind_address
from ramify.rollout.runtime.bwrap import describe_fallback
from ramify.run.store import RunStore
from ramify.run.store.run_directory import check_identity
from ramify.run.store.run_store import DATABASE_NAME
from ramify.run.supervisor_lock import lock_run
from ramify.train.weights_directory import WEIGHTS_DIR

FIND_TIMEOUT = 60.0  # seconds for another interpreter to find a package
NOT_FOUND = 64  # its exit status if there is none


def check_run(config: RunConfig, *, dry_run: bool = False) -> None:
    """Download or export models. Raise ConfigInvalid with all problems, also in plugin tables.

    Raises ModelUnsupported if the model's config shows that it cannot be trained or sampled.
    """
    if problems := find_run_problems(config, dry_run=dry_run):
        raise_with_plugin_problems(config, problems)


def find_run_problems(config: RunConfig, *, dry_run: bool = False) -> list[ConfigProblem]:
    """Download or export models that are not here, and return the problems of models, ranks and packages.

    A dry run needs no model. Raises ModelUnsupported if the model's config shows that it cannot be trained or sampled.
    """
    _check_model_support(config, dry_run=dry_run)
    problems = [*_find_rank_problems(config), *_find_sink_problems(config), *_find_adapter_problems(config)]
    problems += [*_find_vllm_problems(config), *_find_weight_problems(config)]
    if not dry_run:
        problems += [
            ConfigProblem(key, text) for key, name, text in list_missing_models(config) if not is_fetchable(name)
        ]
        problems += _find_missing_vllm(config)
        if not problems:  # a download or an export may take minutes
            problems += _fetch_models(config)
            # again: only now the files of a downloaded model are here
            problems += [*_find_rank_problems(config), *_find_vllm_problems(config)]
    return [*problems, *_find_top_k_problems(config)]


def _check_model_support(config: RunConfig, *, dry_run: bool) -> None:
    """Raise ModelUnsupported if a model's config shows that the trainer or the native engine of the run refuses it.

    Of a hub id, the config is downloaded, but not by a dry run. A dry run without the packages of a run checks nothing.
    """
    engines = [(config.model.name, config.inference)]  # of the trained model first
    engines += [(model.name, model.inference) for model in config.models.values() if model.is_managed]
    for number, (name, engine) in enumerate(engines):
        check_model_config(
            name,
            by_trainer=number == 0,
            by_engine=isinstance(engine, EngineConfig),
            fetch=not dry_run,
            skip_without_transformers=dry_run,
        )


def list_missing_models(config: RunConfig) -> list[tuple[str, str, str]]:
    """Return the key and the name of each model that is not on this machine, and where it was looked for."""
    missing: list[tuple[str, str, str]] = []
    for key, name in _list_started_models(config).items():
        try:
            resolve_model_path(name)
        except ModelNotFound as error:
            missing.append((key, name, error.message))
    return missing


def _fetch_models(config: RunConfig) -> list[ConfigProblem]:
    problems: list[ConfigProblem] = []
    for key, name in _list_started_models(config).items():
        try:
            fetch_model(name)
        except ModelNotFound as error:
            problems.append(ConfigProblem(key, error.message))
    return problems


def _list_started_models(config: RunConfig) -> dict[str, str]:
    """Return the names of the models that the run starts an engine for, by their keys."""
    models = {f"models.{name}.name": model.name for name, model in config.models.items() if model.is_managed}
    if models.get(key := f"models.{START_REFERENCE}.name") == config.model.name:
        del models[key]  # a plan adds it
    return {"model.name": config.model.name, **models}


def _find_weight_problems(config: RunConfig) -> list[ConfigProblem]:
    """Return a problem for each model directory that lacks weight files; files of hub ids are downloaded."""
    problems: list[ConfigProblem] = []
    for key, name in _list_started_models(config).items():
        with contextlib.suppress(ModelNotFound):
            directory = resolve_model_path(name)
            if not is_hub_id(name) and not has_weights(directory):
                text = "has no weights, or not all that its index lists; expected *.safetensors files"
                problems.append(ConfigProblem(key, f"{directory} {text} beside config.json"))
    return problems


def _find_rank_problems(config: RunConfig) -> list[ConfigProblem]:
    num_ranks = {
        "launch.trainer_gpus": config.launch.trainer_gpus,
        "cluster.trainer.num_ranks": config.cluster.trainer.num_ranks,
    }
    if not any((count or 1) > 1 for count in num_ranks.values()):
        return []
    problems = {key: find_rank_problem(config.model.name, count) for key, count in num_ranks.items() if count}
    return [ConfigProblem(key, problem) for key, problem in problems.items() if problem]


def _find_sink_problems(config: RunConfig) -> list[ConfigProblem]:
    if not config.monitor.sinks:
        return []
    try:
        check_sinks_installed(config)
    except ConfigInvalid as error:
        return error.problems
    return []


def _find_adapter_problems(config: RunConfig) -> list[ConfigProblem]:
    if config.weights.adapters != "unmerged" or isinstance(config.inference, EngineConfig):
        return []
    problem = "'unmerged' needs native engines that the run starts; use 'merged'"
    return [ConfigProblem("weights.adapters", problem)]


def _find_vllm_problems(config: RunConfig) -> list[ConfigProblem]:
    """Return a problem if vLLM would load a vision-language model, whose text part is published by other names."""
    if not isinstance(config.inference, VLLMConfig):
        return []
    with contextlib.suppress(ModelNotFound):
        if is_loaded_as_text(resolve_config_path(config.model.name)):
            problem = "vLLM loads the whole model, but only its text part is published, with other names; use 'native'"
            return [ConfigProblem("inference.engine", problem)]
    return []


def _find_missing_vllm(config: RunConfig) -> list[ConfigProblem]:
    """Return a problem for each interpreter that cannot start vLLM, if engines run on this machine."""
    engines = {"inference": config.inference}
    engines |= {f"models.{name}.inference": model.inference for name, model in config.models.items()}
    problems = {
        f"{key}.python": _check_has_vllm(engine)
        for key, engine in engines.items()
        if isinstance(engine, VLLMConfig) and not config.cluster.is_distributed
    }
    return [ConfigProblem(key, problem) for key, problem in problems.items() if problem]


def _check_has_vllm(engine: VLLMConfig) -> str:
    """Return why the interpreter of an engine cannot start vLLM; empty if it can."""
    python = str(Path(engine.python).expanduser())
    code = f"import sys, importlib.util; sys.exit(importlib.util.find_spec('vllm') is None and {NOT_FOUND})"
    result = run_program([python, "-c", code], timeout=FIND_TIMEOUT, env={**os.environ, **engine.extra_env})
    if result.returncode == NOT_FOUND:
        return f"{python} has no package vllm; name the interpreter of an environment with vLLM (docs/inference.md)"
    return "" if result.ok else f"{python}: {result.stderr[-200:] or result.text}"


def _find_top_k_problems(config: RunConfig) -> list[ConfigProblem]:
    """Return each `top_k` that exceeds the vocabulary of a teacher that the run starts and that is here."""
    problems: list[ConfigProblem] = []
    for number, source in enumerate(config.train):
        teacher, top_k = config.models.get(source.score_model or ""), cast(Any, source.top_k)
        if teacher is None or not teacher.is_managed or not isinstance(top_k, int):  # the plugin check refuses others
            continue
        with contextlib.suppress(ModelNotFound):
            vocab_size = read_vocab_size(resolve_config_path(teacher.name))
            if vocab_size is not None and top_k > vocab_size:
                text = f"expected at most {vocab_size}, the vocabulary of models.{source.score_model}, got {top_k}"
                problems.append(ConfigProblem(f"train.{number}.algorithm.top_k", text))
    return problems


def describe_step_size(config: RunConfig) -> str:
    """Describe how many groups and rollouts a step has.

    The number of groups depends on `orchestrator.group_size`; a source may have groups of another size.
    """
    num_groups = config.orchestrator.admission_limits.groups_per_batch
    total_weight = sum(source.weight for source in config.train)
    mean_size = sum(source.weight * config.get_group_size(source) for source in config.train) / total_weight
    sizes = ", ".join(f"{source.source_name}: groups of {config.get_group_size(source)}" for source in config.train)
    return f"step: {format_count(num_groups, 'group')}, about {num_groups * mean_size:.0f} rollouts ({sizes})"


def list_start_notes(config: RunConfig) -> list[str]:
    """Return the notes that are also printed when the run starts: on lengths and on runtimes."""
    return [*_list_length_notes(config), *list_runtime_notes(config)]


def _list_length_notes(config: RunConfig) -> list[str]:
    """Return a note for each length that exceeds the length of a sequence or of the model."""
    notes: list[str] = []
    model_length = None
    with contextlib.suppress(ModelNotFound):
        model_length = read_max_positions(resolve_config_path(config.model.name))
    if model_length is not None and config.seq_len > model_length:
        notes.append(f"note: seq_len: {config.seq_len} is longer than the model allows, {model_length} tokens")
    for kind, sources in (("train", config.train), ("eval", config.eval)):
        for number, source in enumerate(sources):
            max_tokens, seq_len = source.sampling.max_tokens, source.seq_len or config.seq_len
            limit = seq_len if model_length is None else min(seq_len, model_length)
            if max_tokens is not None and max_tokens > limit:
                cause = f"seq_len, {seq_len}" if limit == seq_len else f"the model allows, {model_length}"
                effect = f"prompt and reply together end at {limit} tokens"
                key = f"{kind}.{number}.sampling.max_tokens"
                notes.append(f"note: {key}: {max_tokens} is more than {cause}: {effect}")
    return notes


def list_model_notes(config: RunConfig) -> list[str]:
    """Return a note for each model that no source uses, or that is not here, and for vLLM if it is not here.

    A model that is not here is a mistyped path, or one to download.
    """
    unused = [
        f"note: no source uses models.{name}; name it as `teacher` or `reference`, or remove its table"
        for name in config.models
        if not any(uses_model(source, name) for source in (*config.train, *config.eval))
    ]
    # A dry run may be for another machine.
    missing = [
        note for key, name in _list_started_models(config).items() if (note := describe_missing_model(key, name))
    ]
    without_vllm = [f"note: {problem}" for problem in _find_missing_vllm(config)]
    return [*unused, *missing, *without_vllm]


def list_runtime_notes(config: RunConfig) -> list[str]:
    """Return a note for each source whose sandbox is replaced by the runtime `local` on this machine."""
    tables = {f"train.{number}.runtime": source.runtime for number, source in enumerate(config.train)}
    tables |= {f"eval.{number}.runtime": source.runtime for number, source in enumerate(config.eval)}
    return [f"note: {key}: {text}" for key, table in tables.items() if (text := describe_fallback(table))]


def check_dry_run(config: RunConfig, *, fresh: bool = False, accept_changes: bool = False) -> None:
    """Raise what the run would raise at its start. `fresh` and `accept_changes` have the meaning that `rl` gives them.

    Raises ConfigInvalid, ModelUnsupported, EnvironmentChanged, EnvironmentFault or RunBusy.
    """
    run_problems = find_run_problems(config, dry_run=True)
    if problems := [*run_problems, *_find_address_problems(config), *_find_model_problems(config)]:
        raise_with_plugin_problems(config, problems, include_start_checks=True)
    environments = check_plugin_tables(config, include_start_checks=True)
    with lock_run(config.path):
        if not fresh and (config.path / DATABASE_NAME).is_file():
            with RunStore.open(config.path, write=False) as store:
                check_identity(store, config.identity, accept_changes)
                if not accept_changes:
                    check_environments(store, environments)


def _find_address_problems(config: RunConfig) -> list[ConfigProblem]:
    try:
        check_bind_address(config.orchestrator.address, config.secret)
    except ConfigInvalid as error:
        return [ConfigProblem("orchestrator.address", problem.text) for problem in error.problems]
    return []


def _find_model_problems(config: RunConfig) -> list[ConfigProblem]:
    """Return problems of the models and the renderer. A missing model is one unless the run fetches it."""
    problems = [
        ConfigProblem(key, text)
        for key, name, text in list_missing_models(config)
        if not is_fetchable(name) and (key == "model.name" or Path(name).parent.name != WEIGHTS_DIR)
    ]
    try:
        load_renderer(resolve_model_path(config.model.name), config.renderer)
    except ModelNotFound:
        pass  # it is one of the missing models
    except RamifyError as error:
        problems.append(ConfigProblem("renderer", error.message))
    return problems
