"""Plugin tables are checked in a subprocess."""

import base64

import pytest

from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.launch.plugin_check import check_plugin_tables
from ramify.orchestrate.run_config import RunConfig
from tests.support.images import make_square
from tests.support.interpreters import TASKSET, make_interpreter

TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}


def config(tmp_path, **more) -> RunConfig:
    return RunConfig(**{"name": "run", "output": tmp_path, "train": [TRAIN], **more})


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "max_rl", "turn_credit"])
@pytest.mark.usefixtures("check_plugins_in_process")
def test_groups_of_one_are_refused_if_the_algorithm_compares_attempts(tmp_path, algorithm):
    alone = {**TRAIN, "name": "alone", "group_size": 1, "algorithm": {"id": algorithm}}
    problem = f"1 gives the algorithm '{algorithm}' of train.1 nothing to compare; use at least 2, or opd, sft or rae"
    with pytest.raises(ConfigInvalid, match=rf"^train\.1\.group_size: {problem}$"):
        check_plugin_tables(config(tmp_path, train=[TRAIN, alone]))
    with pytest.raises(ConfigInvalid, match=r"orchestrator\.group_size: 1 gives the algorithm 'grpo' of train\.0"):
        check_plugin_tables(config(tmp_path, orchestrator={"group_size": 1}, train=[TRAIN]))


@pytest.mark.parametrize("algorithm", ["opd", "sft", "rae"])
@pytest.mark.usefixtures("check_plugins_in_process")
def test_groups_of_one_are_accepted_by_other_algorithms(tmp_path, algorithm):
    more = {} if algorithm == "rae" else {"teacher": "larger"}
    source = {**TRAIN, "group_size": 1, "algorithm": {"id": algorithm}, **more}
    assert check_plugin_tables(config(tmp_path, train=[source], models={"larger": {"base_url": ["http://h:1"]}}))


@pytest.mark.usefixtures("check_plugins_in_process")
def test_all_unknown_plugin_keys_are_reported_together(tmp_path):
    wrong = config(
        tmp_path,
        train=[
            {
                "taskset": {"id": "reverse-text", "max_char": 3},
                "algorithm": {"id": "grpo", "normalise": True},
                "harness": {"id": "chatt"},
                "runtime": {"id": "local", "workdir_rot": "/"},
            }
        ],
        eval=[{"taskset": {"id": "reverse-txt"}}],
        orchestrator={"filters": [{"id": "repetition", "windw": 3}]},
    )
    with pytest.raises(ConfigInvalid) as caught:
        check_plugin_tables(wrong)
    text = caught.value.message
    assert text.startswith("6 problems in the configuration:")
    assert "train.0.harness.id: unknown harness 'chatt'; did you mean 'chat'?" in text
    assert "train.0.runtime.workdir_rot: unknown key; did you mean train.0.runtime.workdir_root?" in text
    assert "train.0.taskset.max_char: unknown key; did you mean train.0.taskset.max_chars?" in text
    assert "train.0.algorithm.normalise: unknown key; did you mean train.0.algorithm.normalize?" in text
    assert "eval.0.taskset.id: unknown taskset 'reverse-txt'; did you mean 'reverse-text'?" in text
    assert "orchestrator.filters.0.windw: unknown key" in text


@pytest.mark.usefixtures("check_plugins_in_process")
def test_plugin_check_returns_environment_identities(tmp_path):
    checked = check_plugin_tables(config(tmp_path, eval=[{"name": "held-out", "taskset": {"id": "reverse-text"}}]))
    assert "ramify/env/tasksets/reverse_text.py" in checked["eval/held-out"]["code"]


@pytest.mark.usefixtures("check_plugins_in_process")
def test_taskset_without_reward_cannot_be_trained_on(tmp_path):
    (tmp_path / "silent.py").write_text(
        "import ramify as rf\nclass Silent(rf.Taskset):\n    def load(self):\n        yield rf.Task(prompt='say')\n"
    )
    silent = [{"taskset": {"id": str(tmp_path / "silent.py")}}]
    check_plugin_tables(config(tmp_path, eval=silent))
    with pytest.raises(ConfigInvalid, match=r"train.0.taskset: silent has no reward.*@rf.reward"):
        check_plugin_tables(config(tmp_path, train=silent, eval=[]))


IMAGE_TASKSET = """
import ramify as rf
class Looking(rf.Taskset):
    def load(self):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,%s"}}
        yield rf.Task(prompt=[{"role": "user", "content": [image]}])
    @rf.reward
    def nothing(self) -> float:
        return 0.0
"""


@pytest.mark.usefixtures("check_plugins_in_process")
def test_images_for_a_model_that_takes_none_are_refused(tmp_path):
    squares = [{"taskset": {"id": "color-codeword"}}]
    check_plugin_tables(config(tmp_path, train=squares, eval=[], model={"name": "tiny-vision"}))
    check_plugin_tables(config(tmp_path, train=squares, eval=[], model={"name": "not/on-this-machine"}))
    with pytest.raises(ConfigInvalid, match=r"train.0.taskset: .* takes images; tiny is a text model"):
        check_plugin_tables(config(tmp_path, train=squares, eval=[], model={"name": "tiny"}))
    with pytest.raises(ConfigInvalid, match=r"train.0.taskset: .*; images are not sent to vLLM"):
        check_plugin_tables(
            config(tmp_path, train=squares, model={"name": "tiny-vision"}, inference={"engine": "vllm"})
        )


@pytest.mark.usefixtures("check_plugins_in_process")
def test_images_that_another_model_would_have_to_score_are_refused(tmp_path):
    squares = {"taskset": {"id": "color-codeword"}, "algorithm": {"id": "grpo", "beta": 0.1}}
    vision = {"eval": [], "model": {"name": "tiny-vision"}}
    with pytest.raises(ConfigInvalid, match=r"train.0.algorithm: .*color-codeword has images.*'start'.*without beta"):
        check_plugin_tables(config(tmp_path, train=[squares], **vision))
    check_plugin_tables(config(tmp_path, train=[squares], trainer={"lora": {"enabled": True}}, **vision))
    image = base64.b64encode(make_square((255, 0, 0)).data).decode()
    (tmp_path / "looking.py").write_text(IMAGE_TASKSET % image)
    taught = {"taskset": {"id": str(tmp_path / "looking.py")}, "algorithm": {"id": "opd"}, "teacher": "larger"}
    models = {"larger": {"name": "tiny-vision"}}
    with pytest.raises(ConfigInvalid, match=r"train.0.algorithm: looking has images.*'larger'"):
        check_plugin_tables(config(tmp_path, train=[taught], models=models, **vision), include_start_checks=True)


@pytest.mark.usefixtures("check_plugins_in_process")
def test_a_first_task_with_an_image_is_refused_for_a_text_model(tmp_path):
    image = base64.b64encode(make_square((255, 0, 0)).data).decode()
    (tmp_path / "looking.py").write_text(IMAGE_TASKSET % image)
    looking = [{"taskset": {"id": str(tmp_path / "looking.py")}}]
    check_plugin_tables(
        config(tmp_path, train=looking, eval=[], model={"name": "tiny-vision"}), include_start_checks=True
    )
    with pytest.raises(ConfigInvalid, match=r"train.0.taskset: .*takes images; tiny is a text model"):
        check_plugin_tables(config(tmp_path, train=looking, eval=[], model={"name": "tiny"}), include_start_checks=True)


@pytest.mark.process
def test_plugin_that_exits_raises_environment_fault(tmp_path):
    (tmp_path / "rude.py").write_text("import os\nprint('bye', flush=True)\nos._exit(3)\n")
    with pytest.raises(EnvironmentFault, match="could not be checked:\nbye"):
        check_plugin_tables(config(tmp_path, train=[{"taskset": {"id": str(tmp_path / "rude.py")}}], eval=[]))


@pytest.mark.process
def test_source_is_checked_in_its_own_interpreter(tmp_path):
    python = make_interpreter(tmp_path / "other")
    (tmp_path / "only_there.py").write_text("import sys\nassert sys.prefix.endswith('other'), sys.prefix\n" + TASKSET)
    train = [{"taskset": {"id": str(tmp_path / "only_there.py")}, "python": str(python)}]
    checked = check_plugin_tables(
        config(tmp_path, train=train, eval=[{"name": "ours", "taskset": {"id": "reverse-text"}}])
    )
    assert set(checked) == {"only_there", "eval/ours"}


@pytest.mark.process
def test_missing_core_in_an_interpreter_names_source_and_venv(tmp_path):
    python = make_interpreter(tmp_path / "empty", with_packages=False)
    with pytest.raises(ConfigInvalid, match=r"train.0.python: .*/empty lacks the package ramify"):
        check_plugin_tables(config(tmp_path, train=[{**TRAIN, "python": str(python)}]))
