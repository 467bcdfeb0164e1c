"""`ramify data`: columns, lengths, a sample, and what the rows can be used for."""

import json
import tomllib

import pytest

from ramify.cli import main
from ramify.cli.data import DataColumns, describe_type, find_reward_shares
from tests.support.hub import serve_hub

SUMS = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(1, 5)]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_questions_with_answers_are_described_for_rl_and_sft(tmp_path, capsys):
    path = write(tmp_path / "sums.jsonl", [*SUMS, {"question": "And none?", "answer": None}])
    assert main(["data", path, "--rows", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "5 rows, described by the first 4"
    assert any(line.split() == ["answer", "text", "0", "It", "is", "2.\\n####", "2"] for line in lines)
    table = f'taskset = {{ id = "dataset", path = "{path}", prompt_column = "question", reward = "boxed" }}'
    assert lines[lines.index(table) - 1].endswith("boxed 100%, math-verify 100%, exact 0%")
    assert lines[lines.index(table) + 1].startswith("prompts in tokens of tiny: 50% up to ")
    assert "What is 1 + 1?<|im_end|>" in lines
    assert f'data = {{ path = "{path}", prompt_column = "question", completion_column = "answer" }}' in lines
    assert "#### 2<|im_end|>" in lines


def test_conversations_are_described_for_sft(tmp_path, capsys):
    assert main(["data", write(tmp_path / "chats.jsonl", [{"messages": CHAT}])]) == 0
    out = capsys.readouterr().out
    assert "messages  list of messages  0" in out
    assert "ramify rl: no prompt" in out
    assert f'ramify sft: messages\ndata = {{ path = "{tmp_path / "chats.jsonl"}" }}' in out
    assert "yo<|im_end|>" in out


def test_printed_tables_can_be_copied_for_any_path(tmp_path, capsys):
    path = write(tmp_path / 'my "chats" \\ ü.jsonl', [{"messages": CHAT}])
    assert main(["data", path]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data = ")]
    assert tomllib.loads(line) == {"data": {"path": path}}


def test_rows_that_are_no_conversation_are_reported(tmp_path, capsys):
    assert main(["data", write(tmp_path / "a.jsonl", [{"messages": [{"from": "a"}]}])]) == 0
    assert "not possible: data: row 1" in capsys.readouterr().out
    assert main(["data", write(tmp_path / "empty.jsonl", [])]) == 2
    assert "has no rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "reward"),
    [
        ([{"prompt": "Add.", "tests": ["assert add(1, 2) == 3"], "code": "..."}], "tests"),
        ([{"problem": "1/2?", "solution": "\\boxed{\\frac{1}{2}}"}], "boxed"),
        ([{"problem": "root?", "solution": "\\boxed{\\sqrt{2}}"}], "math-verify"),
        ([{"prompt": "Capital of France?", "answer": "Paris"}], "exact"),
    ],
)
def test_first_reward_that_fits_is_suggested(rows, reward):
    shares = find_reward_shares(rows, DataColumns.guess(rows[0]))
    assert next(name for name, share in shares.items() if share >= 0.9) == reward


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "integer"),
        (True, "boolean"),
        ([], "list"),
        ([1, "a"], "list of integers or texts"),
        ({"bytes": b""}, "image"),
    ],
)
def test_types_are_described_in_words(value, text):
    assert describe_type(value) == text


def test_dataset_of_the_hub_is_downloaded_and_its_subsets_are_listed(tmp_path, monkeypatch, capsys):
    rows = b"".join(json.dumps(row).encode() + b"\n" for row in SUMS)
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files: {name}/*\n" for name in ("main", "socratic")
    )
    files = {"README.md": f"{card}---\n".encode(), "main/train.jsonl": rows, "socratic/train.jsonl": rows}
    with serve_hub() as hub:
        commit = hub.add("datasets", "org/sums", files).refs["main"]
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        assert main(["data", "org/sums"]) == 2
        assert "has the subsets main, socratic; set `subset`" in capsys.readouterr().err
        assert main(["data", "org/sums", "--subset", "main"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"org/sums, subset main, commit {commit[:12]}\n4 rows")
    assert "downloading org/sums from" in output.err
