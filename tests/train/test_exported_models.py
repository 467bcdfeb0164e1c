"""`run:NAME@STEP`: a model that another run has trained, wherever a model is named."""

import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ramify.core.config import write_toml
from ramify.core.errors import ModelNotFound
from ramify.infer.config import ModelConfig, NamedModelConfig, ServeConfig
from ramify.model.resolve import fetch_model
from ramify.model.weights_manifest import Manifest
from ramify.run.store import RunStore
from ramify.trace.version import PolicyVersion
from ramify.train.config import find_best_step
from ramify.train.exported_models import export_model
from tests.support.trained_runs import write_trained_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run `outputs/first` with the weights of steps 2 and 4, of which step 2 has the higher reward."""
    monkeypatch.chdir(tmp_path)
    return write_trained_run(tmp_path / "outputs" / "first")


@pytest.mark.process
def test_a_config_names_the_directory_of_the_step(run, tmp_path):
    config = ServeConfig(model=ModelConfig(name="run:first"))
    assert config.model.name == "outputs/first/models/first-000004"
    assert ServeConfig(model=ModelConfig(name="run:first@best:eval/held-out/avg")).model.name.endswith("first-000002")
    assert NamedModelConfig(name="run:outputs/first@2").name == "outputs/first/models/first-000002"
    directory = fetch_model("run:first@2")
    assert directory == run / "models" / "first-000002"
    assert Manifest.read(directory).version == PolicyVersion("first", 0, 2)
    write_toml(config, tmp_path / "serve.toml")  # the processes of a run, and a resumed run, get the same step
    assert tomllib.loads((tmp_path / "serve.toml").read_text())["model"]["name"] == config.model.name


def test_processes_that_export_the_same_step_at_once_get_the_same_model(run):
    barrier = threading.Barrier(4)

    def export() -> Path:
        with RunStore.open(run, write=False) as store:
            barrier.wait(timeout=30)
            return export_model(store, step="2").directory

    with ThreadPoolExecutor(4) as executor:
        exports = [executor.submit(export) for _ in range(4)]
        assert {item.result().name for item in exports} == {"first-000002"}
    assert [path.name for path in (run / "models").iterdir()] == ["first-000002"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run:fist", "model 'run:fist': no run 'fist'; did you mean 'first'?"),
        ("run:first@3", "model 'run:first@3': expected one of the available steps or best:METRIC, got '3'"),
        ("run:first@best:reward", "model 'run:first@best:reward': the run has no metric 'reward'"),
    ],
)
def test_a_missing_run_step_or_metric_is_named(run, name, message):
    with pytest.raises(ModelNotFound) as info:
        ModelConfig(name=name)
    assert info.value.message.startswith(message)


def test_the_best_step_has_the_highest_value_or_the_lowest_loss():
    values = {1: 0.5, 2: 0.9, 3: 0.9, 4: 1.0}
    assert find_best_step("eval/avg", values, [1, 2, 3]) == 3  # of equal values, the last
    assert find_best_step("validation/loss", values, [1, 2, 4]) == 1
    assert find_best_step("eval/avg", values, [7]) is None
