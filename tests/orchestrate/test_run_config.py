"""The configuration of a run: an example is parsed, and keys without effect are refused."""

import json
import re

import pytest

from ramify.core.config import dump_toml, parse
from ramify.core.errors import ConfigInvalid
from ramify.orchestrate.admission import AdmissionLimits
from ramify.orchestrate.components import load_plugins
from ramify.orchestrate.run_config import RunConfig
from ramify.rollout import SourceConfig
from ramify.run.store.run_directory import compare_identities

RUN = """
name = "reverse-text"
max_steps = 120
seq_len = 512

[model]
name = "tiny"

[renderer]
type = "auto"

[inference]
engine = "native"
kv_memory_fraction = 0.4

[orchestrator]
batch_size = 128
group_size = 16

[trainer.optim]
lr = 1e-4

[[train]]
name = "reverse"
taskset = { id = "reverse-text", max_chars = 8 }
harness = { id = "chat", timeout = 120 }
runtime = { id = "local" }
sampling = { temperature = 1.0, max_tokens = 64 }
max_turns = 1
pool = { type = "elastic", min_workers = 1, multiplex = 128 }

[[eval]]
taskset = { id = "reverse-text", split = "eval" }
num_tasks = 128
interval = 20
"""


@pytest.fixture
def read(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return lambda *args: parse(RunConfig, ["@", str(file), *args])


def test_example_configuration_is_parsed(read):
    config = read("--train.0.sampling.temperature", "0.7")
    assert config.path.name == "reverse-text"
    assert config.orchestrator.admission_limits == AdmissionLimits.from_max_staleness(8, 8)
    assert config.train[0].sampling.temperature == 0.7
    assert config.train[0].algorithm == {"id": "grpo"}
    assert config.get_group_size(config.train[0]) == 16
    assert config.with_default_seq_len(config.train[0]).limits.seq_len == 512
    assert config.eval[0].source_name == "reverse-text"


def test_resolved_configuration_round_trips(read, tmp_path):
    config = read()
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert parse(RunConfig, ["@", str(tmp_path / "config.toml")]) == config


def test_default_run_name_depends_on_the_identity(read):
    config = read("--name", "")
    assert config.path.name.startswith("reverse-tiny-")
    assert config.path == read("--name", "", "--max-steps", "7").path
    assert config.path != read("--name", "", "--train.0.sampling.temperature", "0.7").path


DISTILLED = {
    "models": {"teacher": {"name": "larger"}, "judge": {"name": "judging"}, "unused": {"name": "tiny"}},
    "train": [
        {
            "taskset": {"id": "reverse-text", "judge": {"base_url": "models.judge"}},
            "sampling": {"temperature": 1.0},
            "algorithm": {"id": "opd"},
            "teacher": "teacher",
        }
    ],
}
IDENTITY_CHANGES = {
    "models.teacher.name: was 'larger', now 'largest'": ["--models.teacher.name", "largest"],
    "models.judge.name: was 'judging', now 'mild'": ["--models.judge.name", "mild"],
    "train.reverse-text.algorithm.id: was 'opd', now 'sft'": ["--train.0.algorithm.id", "sft"],
    "train.reverse-text.algorithm.top_k: was not set, now 4": ["--train.0.algorithm.top_k", "4"],
}


@pytest.mark.parametrize("change", IDENTITY_CHANGES)
def test_another_teacher_judge_or_algorithm_is_another_run(change):
    layers = [f"--{key}={json.dumps(value)}" for key, value in DISTILLED.items()]
    old, new = parse(RunConfig, layers), parse(RunConfig, [*layers, *IDENTITY_CHANGES[change]])
    with pytest.raises(ConfigInvalid, match=re.escape(f"differences:\n  {change}\n")):
        compare_identities(old.path, old.identity, new.identity, accept_changes=False)
    assert compare_identities(old.path, old.identity, new.identity, accept_changes=True) == [change]


def test_addresses_and_unused_models_of_a_run_may_change():
    layers = [f"--{key}={json.dumps(value)}" for key, value in DISTILLED.items()]
    changes = ["--models.teacher.base_url", "http://h:1", "--models.unused.name", "tiny-vision"]
    assert parse(RunConfig, layers).identity == parse(RunConfig, [*layers, *changes]).identity


def test_the_started_reference_does_not_change_the_identity(tmp_path):
    penalized = {"taskset": {"id": "reverse-text"}, "algorithm": {"id": "grpo", "beta": 0.1}, "reference": "start"}
    config = RunConfig.model_validate({"output": tmp_path, "train": [penalized]})
    assert "start" in config.all_models
    assert config.model_copy(update={"models": config.all_models}).identity == config.identity


def test_another_format_of_fixed_weights_is_refused_under_its_own_key(tmp_path):
    tables = [{"trainer": {"lora": {"rank": 8}}, "model": {"quantize": mode}} for mode in ("8bit", "4bit")]
    run = {"output": tmp_path, "train": [{"taskset": {"id": "reverse-text"}}]}
    stored, identity = (RunConfig.model_validate({**run, **table}).identity for table in tables)
    with pytest.raises(ConfigInvalid, match=r"differences:\n  model\.quantize: was '8bit', now '4bit'\n"):
        compare_identities(tmp_path, stored, identity, True)


REFUSED = {
    "train.0.pool.multiplex": (["--train.0.pool.type", "static"], "train.0.pool with type = 'static' has"),
    "inference.extra_args": (["--inference.extra_args", "[]"], "inference with engine = 'native' has"),
    "train.0": (["--train.0.sampling.top_p", "0.9"], "sampling.top_p: 0.9 cannot be trained on, expected 1"),
    "train.0 ": (
        ["--train.0.address", "tcp://h:1", "--train.0.pool.min_workers", "2"],
        "pool is not allowed with `address`",
    ),
    "orchestrator.batch_size": (
        ["--orchestrator.batch_size", "100"],
        "orchestrator.batch_size: 100 is not a multiple of group_size 16; use 96 or 112 (--orchestrator.batch_size)",
    ),
    "orchestrator.batch_size ": (
        ["--orchestrator.batch_size", "10"],
        "orchestrator.batch_size: 10 is not a multiple of group_size 16; use 16 (--orchestrator.batch_size)",
    ),
    "train.0.algorithm.id": (
        ["--train.0.algorithm.id", "opd"],
        "train.0.algorithm.id: 'opd' needs `teacher`, the name of a model in [models] (--train.0.algorithm.id)",
    ),
    "train.0.algorithm.id ": (
        ["--train.0.algorithm", '{"id": "opd", "teacher": "teacher"}'],
        "in [models]; write `teacher` beside `algorithm`, not in it (--train.0.algorithm)",
    ),
    "train.0.sampling.temperature": (
        ["--train.0.algorithm.beta", "0.1", "--train.0.sampling.temperature", "0.7"],
        "at temperature 1, got 0.7 (--train.0.sampling.temperature)",
    ),
    "train.0.seq_len": (["--train.0.seq_len", "1024"], "1024 is longer than the run's seq_len, 512"),
    "max_step": (["--max-step", "3"], "unknown flag --max-step; did you mean --max_steps?"),
    "train.0.num_tasks": (["--train.0.num-tasks", "8"], "did you mean --train.0.taskset.num_tasks?"),
    "train.0.split": (["--train.0.split", "eval"], "did you mean --train.0.taskset.split?"),
    "eval.0.split": (["--eval.0.split", "eval"], "did you mean --eval.0.taskset.split?"),
    "train.0.curriculum.epochs": (
        ["--train.0.curriculum.type", "difficulty", "--train.0.curriculum.epochs", "2"],
        "train.0.curriculum with type = 'difficulty' has",
    ),
    "eval.0": (
        ["--eval.0.endpoint.base_url", "http://h:1", "--eval.0.hold_weights", "true"],
        "hold_weights: requires the run's inference",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_keys_without_effect_are_refused(read, key):
    args, problem = REFUSED[key]
    with pytest.raises(ConfigInvalid) as caught:
        read(*args)
    assert problem in caught.value.message
    assert key.strip() in caught.value.message


def read_problem_keys(read, *args):
    with pytest.raises(ConfigInvalid) as caught:
        read(*args)
    return [problem.key for problem in caught.value.problems]


def test_all_rules_that_a_source_breaks_are_reported_together(read):
    args = ["--train.0.algorithm.id", "opd", "--train.0.normalization", "fixed", "--train.0.sampling.top_p", "0.9"]
    assert read_problem_keys(read, *args, "--max-steps", "0") == [
        "max_steps",
        "train.0.algorithm.id",
        "train.0.normalization_tokens",
        "train.0.sampling.top_p",
    ]
    assert read_problem_keys(
        read, "--models.big.name", "tiny", "--train.0.teacher", "big", "--train.0.sampling.temperature", "0.7"
    ) == ["train.0.teacher"]


def test_each_sampling_parameter_that_cannot_be_trained_on_is_a_problem(read):
    with pytest.raises(ConfigInvalid) as caught:
        read("--train.0.sampling.top_p", "0.9", "--train.0.sampling.top_k", "5")
    assert caught.value.message.splitlines() == [
        "2 problems in the configuration:",
        "  train.0.sampling.top_p: 0.9 cannot be trained on, expected 1 (--train.0.sampling.top_p)",
        "  train.0.sampling.top_k: 5 cannot be trained on, expected 0 (--train.0.sampling.top_k)",
    ]


def test_all_rules_that_a_run_breaks_are_reported_together(read):
    args = ["--train.0.seq_len", "1024", "--train.0.teacher", "missing", "--train.0.algorithm.id", "sft"]
    args += ["--cluster.launcher", "ray", "--record_batches", "true", "--weights.transport", "shm"]
    assert read_problem_keys(read, *args) == [
        "train.0.seq_len",
        "train.0.teacher",
        "weights.transport",
        "record_batches",
    ]


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("reverse-text", "reverse-text"),
        ("/home/me/envs/words.py", "words"),
        ("envs/words.py:Reverse", "words:Reverse"),
        ("my_package.games:Wordle", "my_package.games:Wordle"),
    ],
)
def test_a_source_is_named_after_its_taskset_or_the_file_of_it(id, name):
    assert SourceConfig(taskset={"id": id}).source_name == name
    assert SourceConfig(taskset={"id": id}, name="mine").source_name == "mine"


def test_duplicate_source_names_are_refused(read):
    config = read().model_dump()
    config["train"] *= 2
    with pytest.raises(ValueError, match="two sources are named 'reverse'"):
        RunConfig.model_validate(config)


def test_all_invalid_plugin_tables_are_reported(read):
    config = read("--train.0.algorithm.normalise", "true")
    config.orchestrator.filters[0] = {"id": "gibbering"}
    with pytest.raises(ConfigInvalid) as caught:
        load_plugins(config)
    assert "train.0.algorithm.normalise: unknown key; did you mean train.0.algorithm.normalize?" in caught.value.message
    assert "orchestrator.filters.0.id: unknown filter 'gibbering'; did you mean 'gibberish'?" in caught.value.message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train.0.teacher", "teacher"], "teacher: the algorithm 'grpo' has none; opd and sft do"),
        (["--train.0.reference", "start"], "reference: the algorithm 'grpo' uses none without beta"),
        (["--train.0.teacher", "tacher", "--train.0.algorithm.id", "sft"], "did you mean 'teacher'?"),
        (["--models.teacher.base-url", '["http://h:1"]', "--models.teacher.inference.dtype", "float32"], "not allowed"),
        (["--models.teacher.name", ""], "set name, the model to start an engine for, or base_url"),
    ],
)
def test_models_that_a_source_cannot_use_are_refused(read, flags, message):
    with pytest.raises(ConfigInvalid) as raised:
        read("--models.teacher.name", "tiny", *flags)
    assert message in raised.value.message


def test_a_source_names_the_models_that_score_or_sample_it(read):
    (source,) = read("--models.big.name", "tiny", "--train.0.teacher", "big", "--train.0.algorithm.id", "opd").train
    assert (source.score_model, source.sampler_model) == ("big", None)
    (source,) = read("--models.big.name", "tiny", "--train.0.teacher", "big", "--train.0.algorithm.id", "sft").train
    assert (source.score_model, source.sampler_model) == (None, "big")
    config = read("--train.0.algorithm.beta", "0.1")
    assert config.train[0].score_model == "start" and config.all_models["start"].name == "tiny"
    assert not read().all_models
    assert not read("--train.0.algorithm.beta", "0.1", "--trainer.lora.rank", "16").all_models
