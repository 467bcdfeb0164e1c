"""reasoning-gym: every dataset validates with its own answers, and two are trained on."""

import json
import subprocess
from pathlib import Path

from ramify.env.adapters.reasoning_gym import REFUSALS
from ramify.env.tasksets.reversal import SYSTEM
from tests.env.adapters.training import train

MIN_DATASETS = 95
NUM_TASKS = 2  # of each dataset
NUM_STEPS = 10
VALIDATE_DEADLINE = 3600  # seconds
# tiny writes text backwards, in these tags
READABLE = {"instructions": SYSTEM, "answer_tag": "reversed_text"}
TRAINED = {"spell_backward": {"max_word_len": 4}, "palindrome_generation": {"max_length": 5}}
EVERY_GROUP = {"filters": []}  # also those whose attempts earn equal rewards
VALIDATE_SCRIPT = """
import asyncio, json, sys
from itertools import islice
from ramify.core.errors import RamifyError
from ramify.rollout import Environment, SourceConfig, validate_task
from reasoning_gym.factory import DATASETS

NONSENSE = ("", "x", "[[1,2],[3]]", "1 2 3", "{}", "0", "a b\\nc", "1/0", "(((", "null", "[]", "True")

def check(name):
    table = {"id": "reasoning-gym", "dataset": name, "size": 20}
    env = Environment.load(SourceConfig(taskset=table))
    tasks = list(islice(env.iter_tasks(), int(sys.argv[1])))
    for task in tasks:
        result = asyncio.run(validate_task(env, task))
        if result.problem or not result.has_gold:
            return result.problem or "no gold"
        entry = env.taskset.get_entry(task.index)
        for reply in NONSENSE:
            score = env.taskset._dataset.score_answer(reply, entry)
            if score >= 1 and reply != "0" and reply not in str(entry["answer"]):
                return f"the reply {reply!r} scores {score}, the answer is {entry['answer']!r}"
    return None if tasks else "no tasks"

for name in sorted(DATASETS):
    try:
        problem = check(name)
    except RamifyError as error:
        problem = "refused: " + error.message
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    print(json.dumps([name, problem]), flush=True)
"""


def check(python: Path, output: Path) -> None:
    command = [str(python), "-c", VALIDATE_SCRIPT, str(NUM_TASKS)]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=VALIDATE_DEADLINE).stdout
    problems = dict(json.loads(line) for line in shown.splitlines() if line.startswith('["'))
    valid = [name for name, problem in problems.items() if problem is None]
    refused = [name for name, problem in problems.items() if problem and problem.startswith("refused: ")]
    print(f"   {len(valid)} datasets of {len(problems)} validate, {len(refused)} are refused", flush=True)
    failed = {name: problem for name, problem in problems.items() if problem and name not in refused}
    assert not failed, failed
    assert set(refused) == set(REFUSALS), refused
    assert len(valid) >= MIN_DATASETS
    for dataset, parameters in TRAINED.items():
        taskset = {"id": "reasoning-gym", "dataset": dataset, "parameters": parameters, **READABLE}
        traces = train(
            output, dataset, {"taskset": taskset, "python": str(python)}, steps=NUM_STEPS, orchestrator=EVERY_GROUP
        )
        rewards = [trace.reward for trace in traces if trace.reward is not None]
        print(f"   {dataset}: {NUM_STEPS} steps, mean reward {sum(rewards) / len(rewards):.3f}", flush=True)
