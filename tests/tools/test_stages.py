"""`python -m tools.tiny`: the training data of `tiny`, and its stages, which are ordinary runs of `ramify sft`."""

import json
import sys
from dataclasses import replace
from itertools import islice

import pytest
from safetensors.numpy import load_file

from ramify.env.data_rows import read_rows
from ramify.env.tasksets.reversal import SYSTEM as REVERSING
from ramify.env.tasksets.splits import assign_split
from ramify.env.tasksets.wikispeedia import SYSTEM as WALKING
from ramify.train.sft import run_sft
from ramify.train.sft.conversations import parse_conversations
from tools.tiny.__main__ import main
from tools.tiny.corpus import CorpusMix, draw_conversations
from tools.tiny.drills import draw_drills
from tools.tiny.stages import STAGES, SftStage, build_sft_config, write_stage_data
from tools.tiny.weights import write_bfloat16_model, write_initial_model


def run_command(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tools.tiny", *arguments])
    return main()


def test_build_does_not_overwrite(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    assert run_command(monkeypatch, "build", "-o", str(tmp_path)) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_measuring_a_model_that_is_missing_says_so(tmp_path, monkeypatch, capsys):
    assert run_command(monkeypatch, "measure", str(tmp_path / "absent")) == 2
    assert "ModelNotFound" in capsys.readouterr().err


def test_no_training_conversation_is_from_an_eval_split():
    seen = set[str]()
    for conversation in islice(draw_conversations(7, CorpusMix()), 150):
        first = conversation.messages[0].text
        user_texts = [message.text for message in conversation.messages if message.role == "user"]
        if first == REVERSING:
            assert {assign_split(text) for text in user_texts} == {"train"}
        elif first == WALKING:
            target, source = user_texts[0].removeprefix("Target: ").split("\n")[:2]
            assert assign_split(f"{source} -> {target}") == "train"
        else:
            continue
        seen.add(first)
    assert seen == {REVERSING, WALKING}


SAME_KINDS = pytest.mark.full("has the kinds of `everything` in other shares")
OTHER_SHARES = ("formats", "reversals", "calls", "last")


@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, id=stage.name, marks=[SAME_KINDS] if stage.name in OTHER_SHARES else []) for stage in STAGES],
)
def test_stage_data_round_trips(stage, tmp_path):
    short = replace(stage, steps=2, batch_size=8)
    write_stage_data(short, tmp_path / "rows.jsonl", seed=3)
    config = build_sft_config(short, tmp_path / "rows.jsonl", tmp_path, tmp_path, seed=3)
    chats = parse_conversations(read_rows(config.data.path), config.data)
    drawn = list(islice(stage.draw(3), 16))
    assert [chat.messages for chat in chats] == [tuple(conversation.messages) for conversation in drawn]
    assert [list(chat.tools) for chat in chats] == [list(conversation.tools) for conversation in drawn]


def test_stages_pass_float32_weights_and_are_reproducible(tmp_path):
    stage = SftStage("short", draw_drills, steps=2, batch_size=2, warmup_steps=1)
    write_initial_model(tmp_path / "start", seed=0)
    write_stage_data(stage, tmp_path / "rows.jsonl", seed=0)
    weights: list[bytes] = []
    for output in (tmp_path / "a", tmp_path / "b"):
        result = run_sft(build_sft_config(stage, tmp_path / "rows.jsonl", tmp_path / "start", output, seed=0))
        assert result.steps == 2
        assert result.weights is not None
        assert {str(value.dtype) for value in load_file(result.weights / "model.safetensors").values()} == {"float32"}
        write_bfloat16_model(result.weights, output / "model")
        assert json.loads((output / "model" / "config.json").read_text())["dtype"] == "bfloat16"
        assert not (output / "model" / "manifest.json").exists()
        weights.append((output / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
