"""Properties of every taskset: reproducible tasks, disjoint splits, gold replies that score 1."""

import json
import os
import subprocess
import sys
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.env import plugin
from ramify.infer.gateway import TokenPolicy
from ramify.rollout import Environment, SourceConfig, run_attempt
from tests.support.engine import ScriptedClient
from tests.support.renderers import renderer
from tests.support.scripted_agent import play

EXAMPLES = max(4, settings.default.max_examples // 8) if settings.default else 4

SIZES = {
    "reverse-text": {"max_chars": st.integers(8, 40)},
    "alphabet-sort": {"max_turns": st.integers(1, 4), "max_names": st.integers(1, 6)},
    "wikispeedia": {"max_dist": st.integers(3, 9), "num_articles": st.sampled_from([200, 400])},
    "wiki-search": {"max_hops": st.integers(1, 3), "num_articles": st.sampled_from([300, 2000])},
    "wordle": {},
    "arithmetic": {"max_steps": st.integers(2, 5), "max_number": st.integers(5, 50)},
    "general-agent": {"max_goals": st.integers(1, 3), "num_rows": st.integers(4, 8)},
}


def load_first_tasks(id: str, count: int = 20, **settings: object) -> list:
    return list(islice(plugin.build_plugin("taskset", {"id": id, **settings}).load(), count))


def split_text(id: str, task) -> str:
    """Return the text that must not be in both splits."""
    return str({"alphabet-sort": getattr(task, "turns", ""), "wordle": task.answer}.get(id, task.prompt))


@pytest.mark.process
def test_tasks_do_not_depend_on_the_hash_seed():
    code = (
        "import json, sys; from itertools import islice; from ramify.env import plugin;"
        "tasks = {id: islice(plugin.build_plugin('taskset', {'id': id}).load(), 20) for id in sys.argv[1:]};"
        "print(json.dumps({id: [task.to_wire() for task in tasks[id]] for id in tasks}))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "17"}
    result = subprocess.run([sys.executable, "-c", code, *SIZES], env=environment, stdout=subprocess.PIPE, timeout=60)
    assert json.loads(result.stdout) == {id: [task.to_wire() for task in load_first_tasks(id)] for id in SIZES}


@pytest.mark.parametrize("id", SIZES)
@given(data=st.data(), seeds=st.tuples(st.integers(0, 99), st.integers(0, 99)))
@settings(max_examples=EXAMPLES)
def test_train_and_eval_splits_are_disjoint_for_any_config(id, data, seeds):
    sizes = [{name: data.draw(values) for name, values in SIZES[id].items()} for _ in range(2)]
    train = {split_text(id, task) for task in load_first_tasks(id, 40, seed=seeds[0], **sizes[0])}
    eval_tasks = {split_text(id, task) for task in load_first_tasks(id, 40, seed=seeds[1], split="eval", **sizes[1])}
    assert len(train) == len(eval_tasks) == 40
    assert not train & eval_tasks


@pytest.mark.parametrize("id", SIZES)
@pytest.mark.parametrize("split", ["train", "eval"])
async def test_gold_replies_score_one(id, split):
    taskset = plugin.build_plugin("taskset", {"id": id, "split": split})
    for task in islice(taskset.load(), 12):
        assert (await play(taskset, task, taskset.gold(task))).reward == 1.0


@pytest.mark.parametrize("id", SIZES)
def test_seed_changes_tasks_and_num_tasks_takes_a_prefix(id):
    assert load_first_tasks(id, num_tasks=10) == load_first_tasks(id, num_tasks=15)[:10]
    assert load_first_tasks(id, num_tasks=10) != load_first_tasks(id, num_tasks=10, seed=1)


@pytest.mark.parametrize("id", SIZES)
def test_tasks_are_distinct_and_survive_serialization(id):
    tasks = load_first_tasks(id, 100)
    assert len({task.identity for task in tasks}) == 100
    kind = plugin.build_plugin("taskset", {"id": id}).task_type
    assert [kind.from_wire(task.to_wire()) for task in tasks] == tasks


@pytest.mark.parametrize(
    ("settings", "before"), [({"id": "alphabet-sort", "min_turns": 3}, []), ({"id": "wordle"}, ["[about]", "hm"])]
)
async def test_reply_counts_once_when_the_template_rewrites_history(settings, before):
    qwen = renderer("qwen3")
    env = Environment.load(SourceConfig(taskset=settings))
    task = next(env.iter_tasks())
    script = [f"<think>\nhm\n</think>\n\n{reply}" for reply in [*before, *env.taskset.gold(task)]]
    policy = TokenPolicy(ScriptedClient(script, qwen), qwen, "qwen")
    (trace,) = (await run_attempt(env, task, policy=policy, id="r1")).traces
    assert trace.metrics["render/breaks"] > 0 and len(trace.sampled_nodes) == len(script)
    assert trace.reward == 1


@pytest.mark.parametrize("id", SIZES)
async def test_empty_reply_scores_zero(id):
    taskset = plugin.build_plugin("taskset", {"id": id})
    for task in islice(taskset.load(), 5):
        assert (await play(taskset, task, "")).reward == 0.0
