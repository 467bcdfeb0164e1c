"""Checks of a run before it is planned: models, ranks, packages, and what a resumed run may change."""

import json
import shutil
import sys
from importlib.util import find_spec

import pytest

from ramify.core.errors import ConfigInvalid, ModelUnsupported
from ramify.launch import run_checks
from ramify.launch.process_configs import build_serve_config, build_trainer_config
from ramify.launch.run_checks import check_run, list_model_notes
from ramify.launch.run_directory import prepare_run_directory
from ramify.model.config_check import is_always_supported
from ramify.model.resolve import read_vocab_size, resolve_model_path
from ramify.orchestrate.run_config import RunConfig

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("check_plugins_in_process")]

TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}


def config(tmp_path, **more) -> RunConfig:
    return RunConfig(**{"name": "run", "output": tmp_path, "seq_len": 256, "train": [TRAIN], **more})


def test_top_k_above_the_vocabulary_of_a_started_teacher_is_refused(tmp_path):
    vocab_size = read_vocab_size(resolve_model_path("tiny"))
    source = {**TRAIN, "teacher": "teacher", "sampling": {"temperature": 1.0}}

    def check(top_k, teacher):
        train = [{**source, "algorithm": {"id": "opd", "top_k": top_k}}]
        check_run(config(tmp_path, train=train, models={"teacher": teacher}), dry_run=True)

    problem = f"train.0.algorithm.top_k: expected at most {vocab_size}, the vocabulary of models.teacher, got 5000"
    with pytest.raises(ConfigInvalid, match=problem):
        check(5000, {"name": "tiny"})
    check(vocab_size, {"name": "tiny"})
    check(5000, {"base_url": ["http://10.0.0.1:8000"]})


def test_a_model_that_the_policys_engine_refuses_is_refused_although_vllm_runs_it_as_a_judge(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "falcon_h1"}')
    model = {"name": str(tmp_path / "model")}
    judge = {**model, "inference": {"engine": "vllm"}}
    with pytest.raises(ModelUnsupported, match="falcon_h1"):
        check_run(config(tmp_path, model=model, models={"judge": judge}), dry_run=True)


def test_missing_models_and_wrong_plugin_tables_are_reported_together(tmp_path):
    models = {"teacher": {"name": str(tmp_path / "nothing")}, "judge": {"name": "org/model"}}
    train = [{**TRAIN, "algorithm": {"id": "grpo", "normalise": True}}]
    with pytest.raises(ConfigInvalid) as caught:
        check_run(config(tmp_path, model={"name": "tinny"}, models=models, train=train))
    head, *problems = caught.value.message.splitlines()
    assert head == "3 problems in the configuration:"
    keys = ["model.name", "models.teacher.name", "train.0.algorithm.normalise"]
    assert [problem.split(":")[0].strip() for problem in problems] == keys


def test_several_ranks_are_refused_for_a_vision_model_that_was_just_downloaded(tmp_path, monkeypatch):
    repo_directory = tmp_path / "hub" / "models--org--vision"

    def download(name):
        shutil.copytree(resolve_model_path("tiny-vision"), repo_directory / "snapshots" / "0")
        (repo_directory / "refs").mkdir()
        (repo_directory / "refs" / "main").write_text("0")

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(run_checks, "fetch_model", download)
    with pytest.raises(ConfigInvalid, match=r"launch.trainer_gpus: org/vision .* one rank, got 2; set it to 1"):
        check_run(config(tmp_path, launch={"trainer_gpus": 2}, model={"name": "org/vision"}))


def test_a_dry_run_needs_no_model(tmp_path):
    check_run(config(tmp_path, model={"name": "Qwen/Qwen3-0.6B"}), dry_run=True)
    with pytest.raises(ConfigInvalid, match=r"model.name: model 'Qwen/Qwen3-0.6B' is not in the local cache"):
        check_run(config(tmp_path, model={"name": "Qwen/Qwen3-0.6B"}))


def test_families_that_are_always_supported_are_known_without_transformers(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for settings, is_known in (
        ({"model_type": "qwen3"}, True),
        ({"model_type": "qwen3", "quantization_config": {}}, False),
        ({"model_type": "gpt_oss"}, False),
        ({"model_type": []}, False),
        ([], False),
    ):
        (model / "config.json").write_text(json.dumps(settings))
        assert is_always_supported(model) == is_known


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (f"exec {sys.executable} -S $*", "has no package vllm; name the interpreter"),  # without any packages
        ("echo broken >&2; exit 7", ": broken"),
        (None, ": No such file or directory"),
    ],
)
def test_vllm_that_is_not_installed_is_refused_and_noted_in_a_dry_run(tmp_path, program, text):
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}".replace("$*", '"$@"'))
        python.chmod(0o700)
    teacher = {"name": "tiny", "inference": {"engine": "vllm", "python": str(python)}}
    run = config(tmp_path, inference={"engine": "vllm", "python": str(python)}, models={"teacher": teacher})
    with pytest.raises(ConfigInvalid) as caught:
        check_run(run)
    notes = [note for note in list_model_notes(run) if "python" in note]
    check_run(run, dry_run=True)
    for key, note in zip(("inference", "models.teacher.inference"), notes, strict=True):
        assert f"{key}.python: {python}" in caught.value.message and text in caught.value.message
        assert note.startswith(f"note: {key}.python: {python}") and text in note


def test_adapters_of_other_servers_are_merged(tmp_path):
    servers = {"engine": "external", "base_url": ["http://localhost:8000"]}
    unmerged = {"trainer": {"lora": {"rank": 8}}, "weights": {"adapters": "unmerged"}}
    with pytest.raises(ConfigInvalid, match=r"weights.adapters: 'unmerged' needs native engines"):
        check_run(config(tmp_path, inference=servers, **unmerged), dry_run=True)
    with pytest.raises(ValueError, match=r"weights.adapters: is for LoRA"):
        config(tmp_path, weights={"adapters": "merged"})
    lora = {"trainer": {"lora": {"rank": 8, "alpha": 4}}}
    engine = build_serve_config(config(tmp_path, model={"name": "tiny", "quantize": "4bit"}, **lora))["inference"]
    assert engine["adapters"] == {"rank": 8, "alpha": 4, "target_modules": [], "quantize": "4bit"}
    merged = config(tmp_path, inference=servers, **lora)
    assert "adapters" not in build_serve_config(merged)["inference"]
    assert build_trainer_config(merged)["weights"]["adapters"] == "merged"


def test_missing_sink_library_is_refused(tmp_path):
    assert find_spec("trackio") is None, "this test needs an environment without trackio"
    match = r"monitor.sinks.0: trackio is not installed; pip install 'ramify\[trackio\]'"
    with pytest.raises(ConfigInvalid, match=match):
        check_run(config(tmp_path, monitor={"sinks": [{"type": "trackio"}]}), dry_run=True)


def test_resuming_with_other_trained_weights_is_refused_before_anything_starts(tmp_path):
    full, lora = config(tmp_path), config(tmp_path, trainer={"lora": {"rank": 8}})
    prepare_run_directory(full)
    for accept_changes in (False, True):  # no checkpoint fits, so the change cannot be accepted
        with pytest.raises(ConfigInvalid, match=r"(?s)lora\.enabled: was False, now True.*lora\.rank: .*8.*--fresh"):
            prepare_run_directory(lora, accept_changes=accept_changes)
    prepare_run_directory(lora, fresh=True)
    with pytest.raises(ConfigInvalid, match=r"lora\.rank: was 8, now 4"):
        prepare_run_directory(config(tmp_path, trainer={"lora": {"rank": 4}}))
