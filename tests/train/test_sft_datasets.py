"""`ramify sft` on several datasets: shares of an epoch, columns and roles of each, and datasets of the hub."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.config import CONFIG_FILE, dump_toml, parse, write_toml
from ramify.core.errors import ConfigInvalid
from ramify.train.sft.config import SftConfig
from ramify.train.sft.pinned_data import get_sft_path, pin_sft_datasets
from ramify.train.sft.plan import (
    ExampleOrder,
    build_sft_plan,
    describe_plan,
    divide_by_weight,
)
from tests.support.hub import serve_hub


def write_pairs(path: Path, count: int, **columns: str) -> str:
    names = {"prompt": "prompt", "completion": "completion", **columns}
    rows = [{names["prompt"]: f"{path.stem} {n}", names["completion"]: "yes"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_config(tmp_path: Path, datasets: list[dict] | dict, **keys) -> SftConfig:
    return SftConfig(model={"name": "tiny"}, output=tmp_path / "runs", data=datasets, batch_size=4, **keys)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.1, 10)), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(0, 3),
)
def test_each_dataset_has_its_share_and_all_its_examples_are_used_equally_often(datasets, epochs, seed):
    sizes, weights = zip(*datasets)
    order = ExampleOrder(sizes, epochs, seed, weights)
    indices = order.indices_at(0, len(order))
    assert len(indices) == epochs * sum(sizes)
    assert indices == [index for start in range(0, len(order), 3) for index in order.indices_at(start, 3)]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    for start, size, weight in zip(starts, sizes, weights):
        own = [index for index in indices if start <= index < start + size]
        assert abs(len(own) - len(order) * weight / sum(weights)) < epochs
        counts = Counter(dict.fromkeys(range(start, start + size), 0))
        counts.update(own)
        assert max(counts.values()) - min(counts.values()) <= 1


@given(st.integers(0, 100), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_add_up(count, weights):
    shares = divide_by_weight(count, weights)
    assert sum(shares) == count
    assert all(abs(share - count * weight / sum(weights)) < 1 for share, weight in zip(shares, weights))


def test_one_dataset_is_read_by_the_same_code_as_several(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", 6)
    one, several = make_config(tmp_path, {"path": path}), make_config(tmp_path, [{"path": path}])
    assert one.datasets == several.datasets
    plans = [build_sft_plan(config) for config in (one, several)]
    assert plans[0].conversations == plans[1].conversations
    assert plans[0].order.indices_at(0, 6) == plans[1].order.indices_at(0, 6)


def test_datasets_are_mixed_by_weight_with_their_own_columns_and_roles(tmp_path):
    plain = {"path": write_pairs(tmp_path / "plain.jsonl", 12), "weight": 1}
    named = {
        "path": write_pairs(tmp_path / "named.jsonl", 4, prompt="question", completion="solution"),
        "prompt_column": "question",
        "completion_column": "solution",
        "train_on_roles": ["user", "assistant"],
        "weight": 3,
    }
    config = make_config(tmp_path, [plain, named])
    plan = build_sft_plan(config)
    assert plan.order.shares == [4, 12]
    assert "examples of an epoch: " in describe_plan(plan, config)[2]
    assert "25% (4 from 12)" in describe_plan(plan, config)[2]
    trained = {
        str(conversation.messages[0].content).split()[0]: [
            conversation.is_trained(index, config.trained_roles) for index in range(2)
        ]
        for conversation in plan.conversations
    }
    assert trained == {"plain": [False, True], "named": [True, True]}


def test_a_row_that_moves_to_a_neighbouring_dataset_changes_the_identity_of_a_weighted_run(tmp_path):
    def build_identity(sizes: tuple[int, int], **keys: float) -> dict:
        rows = [json.dumps({"prompt": str(number), "completion": "yes"}) + "\n" for number in range(10)]
        (tmp_path / "a.jsonl").write_text("".join(rows[: sizes[0]]))
        (tmp_path / "b.jsonl").write_text("".join(rows[sizes[0] :]))
        datasets = [{"path": str(tmp_path / name), **keys} for name in ("a.jsonl", "b.jsonl")]
        return build_sft_plan(make_config(tmp_path, datasets)).identity

    assert build_identity((4, 6), weight=1) == build_identity((4, 6), weight=1)
    assert build_identity((4, 6), weight=1) != build_identity((5, 5), weight=1)
    assert build_identity((4, 6)) == build_identity((5, 5))  # one shuffled list, whatever its parts


def test_system_prompt_comes_from_its_column(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", 1)
    row = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps({**row, "rules": "Be short."}))
    plan = build_sft_plan(make_config(tmp_path, {"path": path, "system_column": "rules"}))
    assert [message.role for message in plan.conversations[0].messages] == ["system", "user", "assistant"]
    assert plan.conversations[0].messages[0].content == "Be short."


def test_files_and_flags_set_one_dataset_or_several(tmp_path):
    (tmp_path / "one.toml").write_text('[data]\npath = "a.jsonl"\n')
    tables = [f'[[data]]\npath = "{name}.jsonl"\nweight = {weight}\n' for name, weight in (("a", 1), ("b", 2))]
    (tmp_path / "two.toml").write_text("".join(tables))
    one = parse(SftConfig, ["@", str(tmp_path / "one.toml"), "--data.part", "7"])
    assert (one.data.path, one.data.part) == ("a.jsonl", "7")
    assert parse(SftConfig, ["--data.path", "c.jsonl"]).datasets[0].path == "c.jsonl"
    two = parse(SftConfig, ["@", str(tmp_path / "two.toml"), "--data.1.weight", "5"])
    assert [(dataset.path, dataset.weight) for dataset in two.datasets] == [("a.jsonl", 1), ("b.jsonl", 5)]
    (tmp_path / "dump.toml").write_text(dump_toml(two))
    assert parse(SftConfig, ["@", str(tmp_path / "dump.toml")]) == two


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[data]\npath = "a"\nsplit = "train"', r"data\.split: unknown key; did you mean data\.part\?"),
        ('[[data]]\npath = "a"\nwieght = 1', r"data\.0\.wieght: unknown key; did you mean data\.0\.weight\?"),
        ('[[data]]\npath = "a"\nweight = 1\n[[data]]\npath = "b"', r"data: some datasets have a `weight`"),
        ("data = []", r"data: names no dataset"),
        ('data = "a.jsonl"', r"data: expected a table, got 'a.jsonl'"),
    ],
)
def test_wrong_tables_are_reported_with_their_keys(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigInvalid, match=message):
        parse(SftConfig, ["@", str(tmp_path / "run.toml")])


def make_chats(word: str) -> bytes:
    rows = [{"prompt": f"{word} {number}", "completion": "yes"} for number in range(4)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_datasets_of_the_hub_are_pinned_for_training_validation_and_evals(tmp_path, monkeypatch):
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        repo = hub.add(
            "datasets", "org/chats", {f"{part}.jsonl": make_chats(part) for part in ("train", "test", "dev")}
        )
        first = repo.refs["main"]
        config = make_config(
            tmp_path,
            {"path": "org/chats", "part": "train"},
            validation={"path": "org/chats", "part": "dev"},
            eval=[{"taskset": {"id": "dataset", "path": "org/chats", "part": "test"}}],
        )
        with pytest.raises(ConfigInvalid, match="'ramify data org/chats' downloads"):
            build_sft_plan(pin_sft_datasets(config, fresh=False, log=None))
        pinned = pin_sft_datasets(config, fresh=False, log=lambda line: None)
        assert sorted(hub.sent) == ["dev.jsonl", "test.jsonl", "train.jsonl"]
        assert pinned.datasets[0].revision == pinned.validation.revision == pinned.eval[0].taskset["revision"] == first
        plan = build_sft_plan(pinned)
        assert plan.path == get_sft_path(config)
        assert plan.validation[0].messages[0].content == "dev 0"
        write_toml(pinned, plan.path / CONFIG_FILE)

        second = repo.commit({"train.jsonl": make_chats("new"), "dev.jsonl": make_chats("new"), "test.jsonl": b""})
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
        assert pin_sft_datasets(config, fresh=False, log=lambda line: None) == pinned
        moved = config.model_copy(
            update={"name": plan.path.name, "data": config.data.model_copy(update={"revision": "main"})}
        )
        with pytest.raises(ConfigInvalid, match=f"data.revision: org/chats at 'main' is now {second[:12]}"):
            pin_sft_datasets(moved, fresh=False, log=lambda line: None)
        assert pin_sft_datasets(moved, fresh=True, log=lambda line: None).datasets[0].revision == second


def test_evals_inherit_shared_tables(tmp_path):
    config = make_config(tmp_path, {"path": "a"}, sampling={"max_tokens": 8}, eval=[{"taskset": {"id": "wordle"}}])
    assert config.eval[0].sampling.max_tokens == 8


def test_a_seq_len_that_cuts_all_trained_tokens_is_refused(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", 3)
    with pytest.raises(ConfigInvalid, match=r"seq_len: none of 3 conversations has a trained token in its first 5 tok"):
        build_sft_plan(make_config(tmp_path, {"path": path}, seq_len=5))


def test_a_file_has_no_parts_and_no_subsets(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", 3)
    with pytest.raises(ConfigInvalid, match=r"a\.jsonl is a file, which has no parts or subsets; remove `part`"):
        build_sft_plan(make_config(tmp_path, {"path": path, "part": "train"}))


def test_a_dataset_with_other_columns_names_the_keys_to_set(tmp_path):
    path = write_pairs(tmp_path / "a.jsonl", 3, prompt="input")
    with pytest.raises(ConfigInvalid, match=r"it has input, completion: set the keys `\.\.\._column` of the dataset"):
        build_sft_plan(make_config(tmp_path, {"path": path}))
