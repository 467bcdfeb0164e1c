"""dataset: rows of files in several formats, columns and rewards by name."""

import csv
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.dataset import BOXED_INSTRUCTIONS, Dataset, DatasetConfig, extract_final_answer
from tests.support.images import make_media
from tests.support.scripted_agent import play

ROWS = [{"question": f"What is {n} + {n}?", "answer": f"{n} and {n} are {2 * n}.\n#### {2 * n}"} for n in range(50)]
GSM8K = {"prompt_column": "question", "reward": "boxed"}


def write_jsonl(path: Path, rows=ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_dataset(path: object, **settings: Any) -> Dataset:
    return Dataset(DatasetConfig(path=str(path), **settings))


def load_prompts(taskset: Dataset) -> list[str]:
    return [str(task.prompt) for task in taskset.load()]


async def test_gsm8k_file_needs_no_code(tmp_path):
    taskset = make_dataset(write_jsonl(tmp_path / "rows.jsonl"), eval_share=0, **GSM8K)
    tasks = list(taskset.load())
    assert [task.prompt for task in tasks] == [row["question"] for row in ROWS]
    assert {task.system for task in tasks} == {BOXED_INSTRUCTIONS}
    assert (await play(taskset, tasks[3], taskset.gold(tasks[3]) or "")).reward == 1.0
    assert (await play(taskset, tasks[3], "\\boxed{6.0}")).reward == 1.0
    assert (await play(taskset, tasks[3], "\\boxed{7}")).reward == 0.0
    assert (await play(taskset, tasks[3], "6")).reward == 0.0


async def test_math_solution_is_scored_by_its_boxed_answer(tmp_path):
    row = {"problem": "Half of one?", "solution": "So it is $\\boxed{\\frac{1}{2}}$."}
    taskset = make_dataset(
        write_jsonl(tmp_path / "rows.jsonl", [row]),
        prompt_column="problem",
        answer_column="solution",
        reward="boxed",
        eval_share=0,
    )
    (task,) = taskset.load()
    assert (await play(taskset, task, "\\boxed{0.5}")).reward == 1.0


@pytest.mark.parametrize(("answer", "result"), [("a\n#### 7", "7"), ("so \\boxed{7}", "7"), (" 7 ", "7")])
def test_extract_final_answer(answer, result):
    assert extract_final_answer(answer) == result


async def test_score_exact_compares_the_whole_reply(tmp_path):
    rows = [{"prompt": "Say yes.", "answer": "yes", "how": "Be brief."}]
    taskset = make_dataset(write_jsonl(tmp_path / "rows.jsonl", rows), system_column="how", eval_share=0)
    (task,) = taskset.load()
    assert task.system == "Be brief."
    assert [(await play(taskset, task, reply)).reward for reply in ("yes", " yes\n", "Yes", "yes!", "")] == [
        1,
        1,
        0,
        0,
        0,
    ]
    assert taskset.gold(task) == "yes"


async def test_custom_reward_receives_task_row_and_trace(tmp_path):
    code = "def longer(task, trace):\n    return float(len(trace.last_reply) > task.row['length'])\n"
    (tmp_path / "mine.py").write_text(code)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "Talk.", "answer": None, "length": 3}])
    taskset = make_dataset(path, reward=f"{tmp_path}/mine.py:longer", eval_share=0)
    (task,) = taskset.load()
    assert [(await play(taskset, task, reply)).reward for reply in ("abc", "abcd")] == [0.0, 1.0]
    assert taskset.gold(task) is None


@pytest.mark.parametrize(
    ("reward", "message"), [("nowhere.py:f", "file nowhere.py does not exist"), ("{}:g", "no function 'g'")]
)
def test_missing_custom_reward_is_an_error(tmp_path, reward, message):
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(ConfigInvalid, match=message):
        make_dataset("rows.jsonl", reward=reward.format(tmp_path / "mine.py"))


def test_unknown_reward_is_refused():
    with pytest.raises(ValidationError, match="'exact', 'boxed', 'math-verify', 'tests' or"):
        DatasetConfig(path="rows.jsonl", reward="exakt")


@given(count=st.integers(1, 60), share=st.floats(0, 1))
def test_rows_are_split_by_their_prompt(tmp_path_factory, count, share):
    rows = [{"prompt": f"Row {n}", "answer": n} for n in range(count)]
    path = write_jsonl(tmp_path_factory.getbasetemp() / "split.jsonl", rows)
    train, held = (load_prompts(make_dataset(path, split=split, eval_share=share)) for split in ("train", "eval"))
    assert sorted(train + held) == sorted(row["prompt"] for row in rows)


def test_messages_prompt_and_duplicate_rows(tmp_path, capsys):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "Go"},
    ]
    rows = [{"prompt": messages, "answer": "x"}, {"prompt": messages, "answer": "x"}]
    (task,) = make_dataset(write_jsonl(tmp_path / "rows.jsonl", rows), eval_share=0).load()
    assert task.prompt == tuple(messages)
    assert "rows.jsonl: 1 of 2 rows repeat an earlier one, and are left out" in capsys.readouterr().err


def test_parquet_files_and_saved_datasets_are_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(ROWS)
    data = tmp_path / "downloaded" / "data"
    data.mkdir(parents=True)
    pytest.importorskip("pyarrow.parquet").write_table(table, data / "train-00000-of-00001.parquet")
    saved = tmp_path / "saved" / "test"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text("{\n}")
    with (
        pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    (saved / "cache-1f2e3d.arrow").write_bytes(
        (saved / "data-00000-of-00001.arrow").read_bytes()
    )  # written by `Dataset.map`
    expected = [row["question"] for row in ROWS]
    assert load_prompts(make_dataset(data / "train-00000-of-00001.parquet", eval_share=0, **GSM8K)) == expected
    assert load_prompts(make_dataset(tmp_path / "downloaded", part="train", eval_share=0, **GSM8K)) == expected
    assert load_prompts(make_dataset(tmp_path / "saved", part="test", eval_share=0, **GSM8K)) == expected
    with pytest.raises(ConfigInvalid, match="no part 'validation'"):
        load_prompts(make_dataset(tmp_path / "saved", part="validation", **GSM8K))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.arrow"])
def test_file_with_the_wrong_suffix_is_named(tmp_path, name):
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(b"\xff\xfe not rows at all")
    with pytest.raises(ConfigInvalid, match=name):
        load_prompts(make_dataset(tmp_path / name, eval_share=0, **GSM8K))


def test_dataset_id_is_looked_up_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    entry = tmp_path / "datasets--some--rows"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("abc")
    (entry / "snapshots" / "abc").mkdir(parents=True)
    write_jsonl(entry / "snapshots" / "abc" / "test.jsonl")
    assert len(load_prompts(make_dataset("some/rows", part="test", eval_share=0, **GSM8K))) == len(ROWS)
    with pytest.raises(ConfigInvalid, match="'ramify data other/rows' downloads"):
        load_prompts(make_dataset("other/rows", **GSM8K))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"', r"rows\.jsonl:1 is not JSON"),
        ("[1]", r"rows\.jsonl:1 is not a JSON object"),
        ('{"question": "a"}', "no column 'prompt'; it has question"),
        ('{"prompt": 7}', "neither text nor messages"),
    ],
)
def test_invalid_rows_are_named(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigInvalid, match=message):
        load_prompts(make_dataset(tmp_path / "rows.jsonl", eval_share=0))


def test_num_tasks_takes_the_first_rows(tmp_path):
    taskset = make_dataset(write_jsonl(tmp_path / "rows.jsonl"), eval_share=0, num_tasks=3, **GSM8K)
    assert load_prompts(taskset) == [row["question"] for row in ROWS[:3]]


# -- csv and json ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "lines.json"])
def test_csv_and_json_files_are_read(tmp_path, name):
    path = tmp_path / name
    if name == "rows.csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:  # with the byte order mark of spreadsheets
            writer = csv.DictWriter(file, ["question", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif name == "rows.json":
        path.write_text(json.dumps(ROWS, indent=2))
    else:
        write_jsonl(path)
    tasks = list(make_dataset(path, eval_share=0, **GSM8K).load())
    assert [(task.prompt, task.answer) for task in tasks] == [(row["question"], row["answer"]) for row in ROWS]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.csv", "prompt,answer\na,b\nc\n", r"rows.csv:3 has 1 field, the header has 2"),
        ("rows.csv", "prompt,answer\na,b,c\n", r"rows.csv:2 has 3 fields, the header has 2"),
        ("rows.csv", "prompt,prompt\na,b\n", r"rows.csv has the column 'prompt' twice"),
        ("rows.csv", "", r"rows.csv is empty: its first line must name the columns"),
        ("rows.json", '{"data": [{"prompt": "a"}]}', r"rows.json has no rows: expected a list of objects"),
        ("rows.json", '["a", {"prompt": "b"}]', r"rows.json: row 1 is not an object"),
        ("rows.json", '[{"prompt": "a"}', r"rows.json is not JSON"),
    ],
)
def test_invalid_csv_or_json_file_is_refused_with_its_position(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigInvalid, match=message):
        list(make_dataset(tmp_path / name, eval_share=0).load())


def test_long_csv_field_is_read(tmp_path):
    (tmp_path / "rows.csv").write_text(f"prompt,answer\n{'a' * 200_000},b\n")
    (task,) = make_dataset(tmp_path / "rows.csv", eval_share=0).load()
    assert task.prompt == "a" * 200_000


def test_metadata_files_in_a_directory_are_not_read_as_rows(tmp_path):
    write_jsonl(tmp_path / "train.jsonl")
    (tmp_path / "dataset_info.json").write_text('[{"question": "no", "answer": "no"}]')
    (tmp_path / "index.csv").write_text("question,answer\nno,no\n")
    assert load_prompts(make_dataset(tmp_path, eval_share=0, **GSM8K)) == [row["question"] for row in ROWS]


def test_images_of_a_column_are_put_into_the_parts_that_refer_to_them(tmp_path):
    image = make_media(8, 8).data
    (tmp_path / "red.png").write_bytes(image)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}]
    rows = [{"prompt": messages, "answer": "red", "images": [name]} for name in ("red.png", "../red.png")]
    tasks = make_dataset(write_jsonl(tmp_path / "rows.jsonl", rows), eval_share=0).load()
    url = f"data:image/png;base64,{b64encode(image).decode()}"
    assert next(tasks).prompt[0]["content"][0] == {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(ConfigInvalid, match="row 2: image: expected a file below the directory"):
        next(tasks)


def test_images_to_which_no_prompt_refers_are_refused(tmp_path):
    row = {"prompt": "Which colour?", "answer": "red", "images": ["red.png"]}
    taskset = make_dataset(write_jsonl(tmp_path / "rows.jsonl", [{**row, "images": []}, row]), eval_share=0)
    with pytest.raises(ConfigInvalid, match=r"row 2 has images in its column 'images', but its prompt refers to none"):
        list(taskset.load())


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "image", "image": "data:"}]
)
def test_images_column_is_ignored_if_the_messages_have_images(tmp_path, part):
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "Which colour?"}]}]
    row = {"prompt": messages, "answer": "red", "images": ["red.png"]}
    taskset = make_dataset(write_jsonl(tmp_path / "rows.jsonl", [row]), eval_share=0)
    assert [task.prompt for task in taskset.load()] == [tuple(messages)]
