"""`[sampling]`, `[harness]` and `[runtime]` at the top of a run's configuration reach every source."""

import tomllib
from pathlib import Path

import pytest

from ramify.core.config import add_origins, dump_toml, parse
from ramify.core.errors import ConfigInvalid, ConfigProblem
from ramify.infer.gateway.config import SamplingConfig
from ramify.orchestrate.run_config import RunConfig, TrainSourceConfig
from ramify.rollout.envserver.config import StaticPoolConfig

SHARED = """
[sampling]
temperature = 0.8
max_tokens = 64

[harness]
id = "bash"
timeout = 100

[runtime]
id = "sandbox"
memory_mb = 512

[[train]]
taskset = { id = "reverse-text" }

[[train]]
name = "other"
taskset = { id = "reverse-text" }
sampling = { max_tokens = 128 }
harness = { timeout = 50 }
runtime = { id = "local" }

[[eval]]
taskset = { id = "reverse-text" }
sampling = { top_p = 0.9 }
harness = { id = "chat" }
"""


def parse_text(tmp_path: Path, text: str, *args: str) -> RunConfig:
    (tmp_path / "run.toml").write_text(text)
    return parse(RunConfig, ["@", str(tmp_path / "run.toml"), *args])


def test_sources_inherit_the_shared_tables_and_override_them_key_by_key(tmp_path):
    config = parse_text(tmp_path, SHARED)
    dumped = tomllib.loads(dump_toml(config))
    first, other, held_out = [*dumped["train"], *dumped["eval"]]
    sampling = [(source["sampling"]["temperature"], source["sampling"]["max_tokens"]) for source in (first, other)]
    assert sampling == [(0.8, 64), (0.8, 128)]
    assert held_out["sampling"]["top_p"] == 0.9
    assert held_out["sampling"]["max_tokens"] == 64
    assert [source["harness"] for source in (first, other)] == [
        {"id": "bash", "timeout": 100},
        {"id": "bash", "timeout": 50},
    ]
    assert held_out["harness"] == {"id": "chat"}  # another harness has other keys
    assert [source["runtime"]["id"] for source in (first, other, held_out)] == ["sandbox", "local", "sandbox"]
    assert parse_text(tmp_path, dump_toml(config)) == config


def test_a_shared_table_without_id_applies_to_the_harness_of_each_source(tmp_path):
    config = parse_text(tmp_path, '[harness]\ntimeout = 9\n[[train]]\ntaskset.id = "a"\nharness.id = "bash"')
    assert config.train[0].harness == {"id": "bash", "timeout": 9}


def test_sources_of_the_python_api_inherit_too():
    taskset = {"id": "reverse-text"}
    train = [
        TrainSourceConfig(taskset=taskset, sampling=SamplingConfig(temperature=0.5)),
        TrainSourceConfig(name="other", taskset=taskset, pool=StaticPoolConfig(workers=3)),
    ]
    config = RunConfig(train=train, sampling=SamplingConfig(max_tokens=7, temperature=0.8), harness={"timeout": 9})
    assert [source.sampling.max_tokens for source in config.train] == [7, 7]
    assert [source.sampling.temperature for source in config.train] == [0.5, 0.8]
    assert {source.harness["timeout"] for source in config.train} == {9}
    assert config.train[1].pool == train[1].pool


def test_flags_set_shared_tables(tmp_path):
    config = parse_text(tmp_path, SHARED, "--sampling.max_tokens", "32", "--train.0.sampling.temperature", "0.5")
    assert [source.sampling.max_tokens for source in (*config.train, *config.eval)] == [32, 128, 32]
    assert [source.sampling.temperature for source in (*config.train, *config.eval)] == [0.5, 0.8, 0.8]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("temprature = 1", r"^sampling\.temprature: unknown key; did you mean sampling\.temperature\?"),
        ('temperature = "hot"', r"^sampling\.temperature: expected a valid number, got 'hot' \(\S*run.toml\)$"),
        ("top_p = 0.5", r"^sampling\.top_p: 0\.5 cannot be trained on, expected 1 \(\S*run.toml\)$"),
    ],
)
def test_wrong_shared_key_is_reported_once(tmp_path, line, message):
    with pytest.raises(ConfigInvalid, match=message):
        parse_text(tmp_path, f'[sampling]\n{line}\n[[train]]\ntaskset.id = "reverse-text"')


@pytest.mark.parametrize("value", ["2", "0.5"])  # no source accepts the first
def test_a_shared_value_that_sources_refuse_is_reported_with_its_flag(tmp_path, value):
    sources = '[[train]]\ntaskset.id = "reverse-text"\n' + '[[train]]\nname = "b"\ntaskset.id = "reverse-text"\n'
    with pytest.raises(ConfigInvalid) as info:
        parse_text(tmp_path, f"[sampling]\ntop_k = 0\n{sources}", "--sampling.top_p", value)
    assert [(problem.key, problem.origin) for problem in info.value.problems] == [
        ("sampling.top_p", "--sampling.top_p")
    ]


def test_a_refused_value_that_a_source_sets_itself_keeps_its_key(tmp_path):
    text = '[sampling]\ntop_p = 1.0\n[[train]]\ntaskset.id = "reverse-text"\nsampling.top_p = 0.5\n'
    with pytest.raises(ConfigInvalid) as info:
        parse_text(tmp_path, text)
    assert [problem.key for problem in info.value.problems] == ["train.0.sampling.top_p"]


def test_a_plugin_that_refuses_a_shared_value_names_the_shared_key(tmp_path):
    source = '[[train]]\ntaskset.id = "reverse-text"\n'
    (tmp_path / "run.toml").write_text(f'{source}[[eval]]\ntaskset.id = "reverse-text"\nharness.id = "chat"\n')
    args = ["@", str(tmp_path / "run.toml"), "--harness.id", "bash", "--harness.timeout", "9"]
    refused = [("train.0.harness.timeout", "too short"), ("eval.0.harness.timeout", "too short")]
    with pytest.raises(ConfigInvalid) as info, add_origins(RunConfig, args, args):
        raise ConfigInvalid(problems=[ConfigProblem(*problem) for problem in refused])
    keys = [(problem.key, problem.origin) for problem in info.value.problems]
    assert keys[0] == ("harness.timeout", "--harness.timeout")
    assert keys[1][0] == "eval.0.harness.timeout"  # another harness inherits nothing


def test_example_for_slurm_adds_to_the_example_for_two_gpus():
    math = Path(__file__).parents[2] / "examples" / "math"
    config = parse(
        RunConfig, ["@", str(math / "rl_gpu.toml"), "@", str(math / "slurm.toml"), "--cluster.launcher", "ray"]
    )
    assert {source.sampling.max_tokens for source in (*config.train, *config.eval)} == {1024}
    assert config.cluster.slurm.partition == "gpu"
    assert [sink.type for sink in config.monitor.sinks] == ["tensorboard"]
    assert config.launch.env.get_variables("trainer") == {"NCCL_DEBUG": "WARN"}
