"""`run:NAME@STEP`: a model that another run has trained, wherever a model is named."""

import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ramify.core.config import parse_section, write_toml
from ramify.core.errors import ConfigInvalid, ModelNotFound
from ramify.infer.config import ModelConfig, NamedModelConfig, ServeConfig, expand_run_models
from ramify.launch.run_checks import find_run_problems, list_model_notes
from ramify.model.resolve import fetch_model
from ramify.model.weights_manifest import Manifest
from ramify.orchestrate.run_config import RunConfig, TrainSourceConfig
from ramify.run.store import RunStore
from ramify.trace.version import PolicyVersion
from ramify.train.config import TrainedModelConfig, find_best_step
from ramify.train.exported_models import export_model
from tests.support.trained_runs import write_trained_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run `outputs/first` with the weights of steps 2 and 4, of which step 2 has the higher reward."""
    monkeypatch.chdir(tmp_path)
    return write_trained_run(tmp_path / "outputs" / "first")


def test_parsing_a_config_reads_and_exports_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run:missing", "run:missing@7", "run:missing@best:eval/held-out/avg"):
        assert ServeConfig(model=ModelConfig(name=name)).model.name == name
        assert NamedModelConfig(name=name).name == name


@pytest.mark.parametrize("name", ["run:", "run:@2", "run:first@", "run:first@last", "run:first@best:"])
def test_a_malformed_name_is_refused_by_the_config(name):
    with pytest.raises(ConfigInvalid, match=r"expected run:NAME, run:NAME@STEP or run:NAME@best:METRIC, got"):
        parse_section(ModelConfig, {"name": name}, key="model")


@pytest.mark.process
def test_a_start_names_the_directory_of_the_step_and_loading_exports_it(run, tmp_path):
    source = TrainSourceConfig(taskset={"id": "reverse-text"}, algorithm={"id": "opd"}, teacher="best")
    models = {"best": NamedModelConfig(name="run:first@best:eval/held-out/avg")}
    run_config = RunConfig(model=TrainedModelConfig(name="run:first"), models=models, train=[source])
    run_config = expand_run_models(run_config)
    assert run_config.model.name == "outputs/first/models/first-000004"
    best = run_config.models["best"].name
    assert best == "outputs/first/models/first-000002"
    assert not (run / "models").exists()
    for name in (best, "run:first@2"):
        directory = fetch_model(name)
        assert directory == run / "models" / "first-000002"
        assert Manifest.read(directory).version == PolicyVersion("first", 0, 2)
    config = expand_run_models(ServeConfig(model=ModelConfig(name="run:outputs/first@2")))
    write_toml(config, tmp_path / "serve.toml")  # the processes of a run, and a resumed run, get the same step
    assert tomllib.loads((tmp_path / "serve.toml").read_text())["model"]["name"] == "outputs/first/models/first-000002"


def test_a_dry_run_notes_the_models_that_the_run_would_export(run):
    last = "outputs/first/models/first-000004"
    source = TrainSourceConfig(taskset={"id": "reverse-text"}, algorithm={"id": "opd"}, teacher="old")
    models = {"old": NamedModelConfig(name=last.replace("000004", "000002"))}
    config = RunConfig(model=TrainedModelConfig(name=last), models=models, train=[source])
    assert find_run_problems(config, dry_run=True) == []
    notes = [note for note in list_model_notes(config) if "exports" in note]
    note = f"note: model.name: the run exports {last} when it starts; to do it now: 'ramify model fetch {last}'"
    assert notes == [note, note.replace("model.name", "models.old.name").replace("000004", "000002")]
    assert not (run / "models").exists()


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
        pytest.param(
            "run:first@best:reward",
            "model 'run:first@best:reward': the run has no metric 'reward'",
            marks=pytest.mark.full("reads the run in a process as the case above"),
        ),
    ],
)
def test_a_missing_run_step_or_metric_is_named(run, name, message):
    with pytest.raises(ModelNotFound) as info:
        expand_run_models(ServeConfig(model=ModelConfig(name=name)))
    assert info.value.message.startswith(message)


def test_the_best_step_has_the_highest_value_or_the_lowest_loss():
    values = {1: 0.5, 2: 0.9, 3: 0.9, 4: 1.0}
    assert find_best_step("eval/avg", values, [1, 2, 3]) == 3  # of equal values, the last
    assert find_best_step("validation/loss", values, [1, 2, 4]) == 1
    assert find_best_step("eval/avg", values, [7]) is None
