"""Evals whose environment changed after rollouts were sampled: the change is refused, or accepted and recorded."""

import re

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentChanged
from ramify.env.tasksets.color_codeword import make_square
from ramify.rollout.evals import EvalConfig
from ramify.rollout.evals.report import build_report
from ramify.run.store import RunLog, RunStore
from tests.support.engine import ScriptedEngine, reverse_some, run_engine

pytestmark = pytest.mark.process

ENVIRONMENT = """
import ramify as rf
from scoring import FULL_MARKS

class Words(rf.Taskset):
    def load(self):
        for number, word in enumerate({words!r}):
            yield rf.Task(prompt=word, key=f"task-{{number}}")

    @rf.reward
    def any(self, trace):
        return {reward}
"""
IMAGE_ENVIRONMENT = """
import ramify as rf

class Squares(rf.Taskset):
    def load(self):
        for url in {urls}:
            parts = [{{"type": "image_url", "image_url": {{"url": url}}}}]
            messages = [{{"role": "user", "content": parts}}, {{"role": "user", "content": "Which colour?"}}]
            yield rf.Task(prompt=messages, key=url.rpartition("/")[2])

    @rf.reward
    def any(self, trace):
        return 1.0
"""
WORDS = ("one", "two", "three", "four")


@pytest.fixture(scope="module")
def engine():
    with run_engine(ScriptedEngine(reverse_some)) as engine:
        yield engine


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Return a function that writes an environment next to a module it imports."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scoring.py").write_text("FULL_MARKS = 1.0\n")

    def write(reward: str = "FULL_MARKS", words: tuple[str, ...] = WORDS):
        path = tmp_path / "words.py"
        path.write_text(ENVIRONMENT.format(reward=reward, words=words))
        return path

    return write


@pytest.fixture
def evaluate(engine, tmp_path):
    def run(path, num_tasks: int = 2, accept_changes: bool = False, **more):
        base = {
            "taskset": {"id": str(path)},
            "inference": {"engine": "external", "base_url": [engine.url]},
            "output": tmp_path / "outputs",
            "name": "run",
            "num_tasks": num_tasks,
            "repetitions": 1,
            "max_tries": 1,
        }
        return rf.evaluate(EvalConfig.model_validate({**base, **more}), accept_changes=accept_changes)

    return run


def rewards(result) -> list[float | None]:
    return [row.reward for row in result.rows]


def text_of(result) -> str:
    from ramify.core.console import make_console

    console = make_console()
    with console.capture() as captured:
        console.print(build_report(result.rows, pass_threshold=1.0))
    return captured.get()


def test_changed_reward_is_refused_and_names_the_file(environment, evaluate, engine):
    evaluate(environment())
    engine.requests.clear()
    with pytest.raises(EnvironmentChanged, match=r"words\.py has changed") as refused:
        evaluate(environment(reward="0.5"))
    assert "--fresh" in refused.value.message
    assert "--accept-changes" in refused.value.message
    assert engine.requests == []
    assert rewards(evaluate(environment())) == [1.0, 1.0]  # restored, so the run continues


def test_changed_setting_of_the_runtime_is_refused(environment, evaluate, tmp_path):
    env = {"id": "local", "env": {"MODE": "a"}}
    evaluate(environment(), runtime=env)
    with pytest.raises(EnvironmentChanged, match=r"runtime\.env\.MODE: was 'a', now 'b'"):
        evaluate(environment(), runtime={**env, "env": {"MODE": "b"}})
    assert evaluate(environment(), runtime={**env, "workdir_root": str(tmp_path)}).num_run == 0  # says only where


def test_module_next_to_the_environment_is_part_of_it(environment, evaluate, tmp_path):
    path = environment()
    evaluate(path)
    (tmp_path / "scoring.py").write_text("FULL_MARKS = 0.25\n")
    environment(reward="FULL_MARKS * 1")  # a changed file, so that its imports are read again
    with pytest.raises(EnvironmentChanged, match=r"scoring\.py has changed"):
        evaluate(path)


def test_changed_task_with_the_same_key_is_refused_and_named(environment, evaluate, tmp_path):
    data = tmp_path / "words.txt"
    data.write_text("one two three")
    path = tmp_path / "filed.py"
    path.write_text(
        ENVIRONMENT.format(reward="FULL_MARKS", words=()).replace(
            "()", f"__import__('pathlib').Path({str(data)!r}).read_text().split()"
        )
    )
    evaluate(path)
    data.write_text("one 2 three")
    with pytest.raises(EnvironmentChanged, match=r"task 1 \(task-1\) has changed"):
        evaluate(path)
    data.write_text("one")
    with pytest.raises(EnvironmentChanged, match=r"task 1 is gone"):
        evaluate(path)
    data.write_text("one two three four five")
    assert len(evaluate(path, num_tasks=5).rows) == 5


def test_accepted_change_keeps_rollouts_and_is_recorded(environment, evaluate):
    evaluate(environment())
    result = evaluate(environment(reward="0.5"), num_tasks=4, accept_changes=True)
    assert rewards(result) == [1.0, 1.0, 0.5, 0.5]
    assert re.search(r"revisions\s+2 of revision 1, 2 of revision 2", text_of(result))
    with RunStore.open(result.path, write=False) as store:
        (event,) = RunLog(store).events("changes accepted")
        assert any("words.py has changed" in line for line in event.fields["changes"])
    second = evaluate(environment(reward="0.5"), num_tasks=4)
    assert (second.num_run, rewards(second)) == (0, rewards(result))


def test_changed_taskset_key_can_be_accepted_but_not_another_model(evaluate, engine):
    from tests.rollout.evals.environments import __file__ as file

    evaluate(f"{file}:Echo")
    changed = {"taskset": {"id": f"{file}:Echo", "size": 5}}
    with pytest.raises(ConfigInvalid, match=r"taskset\.size: was not set, now 5"):
        evaluate("", **changed)
    assert len(evaluate("", accept_changes=True, **changed).rows) == 2
    with pytest.raises(ConfigInvalid, match=r"model: was 'tiny', now 'other'"):
        evaluate("", accept_changes=True, model={"name": "other"}, **changed)


def test_changed_image_file_of_a_task_is_refused(evaluate, tmp_path):
    image, path = tmp_path / "square.png", tmp_path / "squares.py"
    path.write_text(IMAGE_ENVIRONMENT.format(urls=[f"file://{image}"]))
    image.write_bytes(make_square((255, 0, 0)))
    evaluate(path, num_tasks=1, client_type="chat")
    image.write_bytes(make_square((0, 0, 255)))
    with pytest.raises(EnvironmentChanged, match=r"task 0 \(square\.png\) has changed"):
        evaluate(path, num_tasks=1, repetitions=2, client_type="chat")


def test_finished_eval_is_returned_after_its_image_was_deleted(evaluate, tmp_path):
    image, path = tmp_path / "square.png", tmp_path / "squares.py"
    path.write_text(IMAGE_ENVIRONMENT.format(urls=[f"file://{image}"]))
    image.write_bytes(make_square((255, 0, 0)))
    finished = evaluate(path, num_tasks=1, client_type="chat")
    image.unlink()
    assert rewards(evaluate(path, num_tasks=1, client_type="chat", accept_changes=True)) == rewards(finished)


def test_resumed_eval_refuses_an_image_of_a_task_that_has_not_run(evaluate, engine, tmp_path):
    images, path = [tmp_path / "red.png", tmp_path / "blue.png"], tmp_path / "squares.py"
    path.write_text(IMAGE_ENVIRONMENT.format(urls=[f"file://{image}" for image in images]))
    images[0].write_bytes(make_square((255, 0, 0)))
    evaluate(path, num_tasks=1, client_type="chat")
    engine.requests.clear()
    for accept_changes in (False, True):
        with pytest.raises(ConfigInvalid, match=r"taskset: .*blue\.png"):
            evaluate(path, num_tasks=2, client_type="chat", accept_changes=accept_changes)
    assert engine.requests == []
    images[1].write_bytes(make_square((0, 0, 255)))
    assert evaluate(path, num_tasks=2, client_type="chat").num_run == 1


def test_eval_with_an_unusable_image_is_returned_again(evaluate, tmp_path):
    image, path = tmp_path / "red.png", tmp_path / "squares.py"
    path.write_text(IMAGE_ENVIRONMENT.format(urls=[f"file://{image}", f"file://{tmp_path}/missing.png"]))
    image.write_bytes(make_square((255, 0, 0)))
    for num_run in (2, 1):
        result = evaluate(path, num_tasks=2, client_type="chat")
        assert (result.num_run, [row.failure for row in result.rows]) == (num_run, [None, "EnvironmentFault"])
