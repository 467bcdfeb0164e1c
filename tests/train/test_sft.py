"""`ramify sft`: what is learned of a conversation, in which order, and that a run killed anywhere goes on exactly."""

import csv
import json
import os
import time
from pathlib import Path
from random import Random

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from ramify.cli import main
from ramify.errors import ConfigInvalid, TemplateRefused
from ramify.model.resolve import resolve_model_path
from ramify.render import load_renderer
from ramify.store import RunStore
from ramify.store.run_log import RunLog
from ramify.tasksets.data_files import read_rows
from ramify.train.batch import Batch
from ramify.train.metrics import StepMetrics
from ramify.train.sft import run, run_sft
from ramify.train.sft.config import SftConfig, SftDataConfig
from ramify.train.sft.conversations import parse_conversations
from ramify.train.sft.display import NullSftDisplay
from ramify.train.sft.example_order import ExampleOrder, split_held_out
from ramify.train.sft.forests import build_forest
from ramify.train.sft.plan import build_sft_plan
from ramify.train.trainer import PendingStep, Trainer
from tests.train.workers import DEADLINE, run_ranks, start_sft, write_model

KILLS = 10 if os.environ.get("RAMIFY_FULL") else 2
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "it is 2"},
]


@pytest.fixture(scope="module")
def renderer():
    return load_renderer(resolve_model_path("tiny"))


def data(**keys) -> SftDataConfig:
    return SftDataConfig(path="data", **keys)


def learned(chat, renderer, roles=("assistant",), seq_len=1000) -> list[str]:
    """What the loss is on, message by message."""
    forest = build_forest([("a", chat)], renderer, roles, seq_len)
    found = [forest.targets.token[forest.targets.sequence == each] for each in range(len(forest.sequences))]
    return [renderer.tokenizer.decode(tokens) for tokens in found]


def test_replies_are_learned_with_their_calls_and_the_token_that_ends_them(renderer):
    (chat,) = parse_conversations([{"messages": TALK, "tools": [TOOL]}], data())
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert learned(chat, renderer) == [f"yo{call}<|im_end|>", "it is 2<|im_end|>"]
    assert learned(chat, renderer, roles=("user", "tool")) == ["hi<|im_end|>", "2</tool_response><|im_end|>"]


def test_what_is_trained_is_the_template_rendered_once(renderer):
    (chat,) = parse_conversations([{"messages": TALK, "tools": [TOOL]}], data())
    forest = build_forest([("a", chat)], renderer, ["assistant"], 1000)
    whole = renderer.render(chat.messages, chat.tools, generate=False).ids
    np.testing.assert_array_equal(forest.token_ids, whole[: len(forest.token_ids)])


def test_shared_prefixes_exist_once_and_a_long_example_loses_its_end(renderer):
    same = [{"messages": [*TALK[:2], {"role": "assistant", "content": text}]} for text in ("one", "two")]
    chats = parse_conversations(same, data())
    forest = build_forest(list(zip("ab", chats)), renderer, ["assistant"], 1000)
    assert forest.flat_tokens == sum(
        build_forest([("a", chat)], renderer, ["assistant"], 1000).num_tokens for chat in chats
    )
    assert forest.num_tokens < 0.7 * forest.flat_tokens
    short = build_forest([("a", chats[0])], renderer, ["assistant"], forest.num_tokens // 2 + 3)
    assert short.dropped.num_truncated_tokens > 0
    assert short.count_by_component()["ce"] + short.dropped.num_truncated_tokens == len("one") + 1


THINKING = """{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.last and message.reasoning_content -%}
<think>{{ message.reasoning_content }}</think>
{%- endif -%}{{ message.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_a_template_that_hides_earlier_thinking_makes_the_conversation_a_tree(tmp_path):
    model = write_model(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": THINKING}))
    renderer = load_renderer(model)
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "so"},
    ]
    (chat,) = parse_conversations([{"messages": talk}], data())
    assert learned(chat, renderer) == ["<think>hm</think>b<|im_end|>", "<think>so</think>d<|im_end|>"]
    forest = build_forest([("a", chat)], renderer, ["assistant"], 1000)
    for at in np.flatnonzero(forest.targets.sequence == 1)[:1]:  # the second reply never saw the first one's thinking
        source = forest.targets.logits_index[at]
        path = forest.token_ids[: source + 1][forest.build_attention_mask()[source, : source + 1]]
        assert "hm" not in renderer.tokenizer.decode(path)


def test_files_in_every_form_say_the_same(tmp_path):
    plain = [{"messages": TALK, "tools": [TOOL]}, {"messages": TALK[1:2] + TALK[4:], "tools": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, plain)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain), tmp_path / "a.parquet")
    table = pyarrow.Table.from_pylist(plain)
    (tmp_path / "hub" / "train").mkdir(parents=True)
    with pyarrow.ipc.new_stream(str(tmp_path / "hub" / "train" / "data-0.arrow"), table.schema) as writer:
        writer.write_table(table)
    text = [{"messages": json.dumps(TALK), "tools": json.dumps([TOOL])}, {"prompt": "hi", "completion": "it is 2"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, text)))
    (tmp_path / "a.json").write_text(json.dumps(plain))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["messages", "tools", "prompt", "completion"])
        writer.writeheader()
        writer.writerows(text)
    names = ("a.jsonl", "a.parquet", "hub", "b.jsonl", "a.json", "a.csv")
    found = [parse_conversations(read_rows(str(tmp_path / name)), data()) for name in names]
    assert all(chats == found[0] for chats in found)


def test_a_null_that_somebody_wrote_is_learned_and_one_for_nothing_is_not_there(tmp_path):
    call = {"id": None, "function": {"name": "add", "arguments": {"a": None, "b": 1}}}
    said = {"role": "assistant", "content": None, "reasoning": None, "reasoning_content": "hm", "tool_calls": [call]}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{**said, "tool_call_id": None}]}))
    (chat,) = parse_conversations(read_rows(str(tmp_path / "a.jsonl")), data())
    (message,) = chat.messages
    assert json.loads(message.tool_calls[0].arguments) == {"a": None, "b": 1}
    assert (message.content, message.reasoning, message.tool_call_id) == ("", "hm", None)


@pytest.mark.parametrize(
    "row",
    [
        {"text": "hi"},
        {"messages": [{"content": "x"}]},
        {"messages": TALK[:2]},
        {"prompt": "half of a pair: \ud83d", "completion": "hi"},
        {"messages": [{"role": "assistant", "content": "hi", "reasoning": ["hm"]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 7, "function": {"name": "add"}}]}]},
    ],
    ids=str,
)
def test_a_row_that_is_no_conversation_is_named(row):
    with pytest.raises(ConfigInvalid, match="row 2 of data"):
        parse_conversations([{"messages": TALK}, row], data())


def test_a_conversation_that_the_template_refuses_is_named(tmp_path):
    model = write_model(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ raise_exception('not ' + messages[1].content) if messages | length > 1 }}" + (config["chat_template"])
    )
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "alone"}]}))
    (tmp_path / "apart.jsonl").write_text("\n".join([json.dumps({"prompt": "hi", "completion": "this"})] * 2))
    said = {"model": {"name": str(model)}, "data": {"path": str(tmp_path / "data.jsonl")}}
    said |= {"validation": {"path": str(tmp_path / "apart.jsonl")}}
    plan = build_sft_plan(SftConfig.model_validate(said))
    with pytest.raises(TemplateRefused, match=r"row 2 of .*apart\.jsonl: .*not this"):
        build_forest([("a", plan.validation[1])], plan.renderer, ["assistant"], 100)


def test_every_example_comes_once_an_epoch_whatever_the_batch_size():
    stream = ExampleOrder(7, 3, seed=1)
    order = [at for start in range(0, 21, 4) for at in stream.indices_at(start, 4)]
    assert order == [at for start in range(0, 21, 5) for at in stream.indices_at(start, 5)]
    assert [sorted(order[at : at + 7]) for at in (0, 7, 14)] == [list(range(7))] * 3
    assert order[:7] != order[7:14]
    assert order != [at for start in range(0, 21, 7) for at in ExampleOrder(7, 3, seed=2).indices_at(start, 7)]
    train, apart = split_held_out(20, 0.25, 0)
    assert len(apart) == 5
    assert sorted(train + apart) == list(range(20))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    write_model(folder / "model")
    rng = Random(0)
    with (folder / "data.jsonl").open("w") as file:
        for _ in range(40):
            text = "".join(rng.choices("abcdef", k=rng.randint(2, 9)))
            file.write(json.dumps({"prompt": text, "completion": text[::-1]}) + "\n")
    return folder


def settings(world: Path, name: str, **more) -> dict:
    return {
        "name": name,
        "output": str(world / "runs"),
        "model": {"name": str(world / "model")},
        "data": {"path": str(world / "data.jsonl")},
        "validation": {"share": 0.1, "interval": 5},
        "batch_size": 5,
        "epochs": 3,
        "seq_len": 64,
        "trainer": {"threads": 1, "pack_tokens": 128, "optim": {"lr": 3e-3, "schedule": {"type": "cosine"}}, **more},
        "checkpoint": {"interval": 3},
    }


def finish(config: dict) -> tuple[int, int]:
    """Run to the end: all steps, and those that ran now."""
    process, pipe = start_sft(config)
    try:
        while pipe.poll(DEADLINE):
            said = pipe.recv()
            if isinstance(said, tuple):
                return said[1], said[2]
    except EOFError:
        process.join(DEADLINE)
    finally:
        process.kill()
        process.join()
    raise AssertionError(f"the run ended with {process.exitcode}")


def kill_after(config: dict, step: int, delay: float) -> None:
    """Kill the run at some moment after it has done `step`."""
    process, pipe = start_sft(config)
    while pipe.poll(DEADLINE):
        if (said := pipe.recv()) == step:
            time.sleep(delay)  # any moment will do
            process.kill()
            process.join()
            return
        assert not isinstance(said, tuple), "the run ended before it was killed"
    raise AssertionError(f"step {step} never came")


def stop_after(config: dict, step: int) -> None:
    """Ask the run to stop once it has done `step`: it ends with a checkpoint of the step that ran."""
    process, pipe = start_sft(config)
    said = None
    while not isinstance(said, tuple) and pipe.poll(DEADLINE):
        if (said := pipe.recv()) == step:
            process.terminate()
    process.join(DEADLINE)
    assert process.exitcode == 0
    assert step <= said[1] < 22
    path = Path(config["output"]) / config["name"] / "checkpoints" / f"step_{said[1]:06}"
    assert (path / "checkpoint.json").exists()


def curve(path: Path) -> dict[str, list[tuple[int, float]]]:
    with RunStore.open(path, write=False) as store:
        found = RunLog(store).metrics()
    names = ("train/loss", "train/grad_norm", "train/lr", "data/examples", "validation/loss")
    return {name: [(metric.step, metric.value) for metric in found if metric.name == name] for name in names}


def weights(path: Path) -> bytes:
    (file,) = path.glob("weights/*/model.safetensors")
    return file.read_bytes()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_killed_anywhere_goes_on_as_if_nothing_had_happened(world, lora):
    more = {"lora": {"enabled": True, "rank": 4}} if lora else {}
    name = "lora" if lora else "full"
    assert finish(settings(world, f"{name}-whole", **more)) == (22, 22)
    whole = curve(world / "runs" / f"{name}-whole")
    seen = [value for _, value in whole["data/examples"]]
    assert seen == [*range(5, 106, 5), 108]  # 3 epochs of 36, none twice and none missing
    assert [step for step, _ in whole["validation/loss"]] == [0, 5, 10, 15, 20, 22]
    losses = [value for _, value in whole["train/loss"]]
    assert sum(losses[-5:]) < sum(losses[:5])  # it learns

    rng = Random(7)
    config = settings(world, f"{name}-killed", **more)
    kills = 1 if lora and KILLS == 2 else KILLS
    at = 0
    for _ in range(kills):
        at = min(at + rng.randint(1, 8 if kills < 5 else 3), 19)
        kill_after(config, at, rng.uniform(0, 0.05))
        at = max((int(path.name[5:]) for path in (world / f"runs/{name}-killed/checkpoints").glob("step_*")), default=0)
    stop_after(config, at + 1)
    finish(config)
    assert curve(world / "runs" / f"{name}-killed") == whole
    assert weights(world / "runs" / f"{name}-killed") == weights(world / "runs" / f"{name}-whole")
    assert finish(config) == (22, 0)  # the same command again says it is finished


class Heard(NullSftDisplay):
    """Which steps were begun and told, in their order."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def step(self, metrics, pace) -> None:
        self.order.append(f"told {metrics.step}")


def test_a_step_begun_before_the_last_one_is_told_changes_nothing(world, monkeypatch):
    order, begin = [], Trainer.start_step

    def begun(trainer: Trainer, batch: Batch) -> PendingStep:
        order.append(f"begun {batch.step}")
        return begin(trainer, batch)

    monkeypatch.setattr(Trainer, "begin", begun)
    run_sft(SftConfig.model_validate(settings(world, "at-once") | {"max_steps": 4}), display=Heard(order))
    assert order == [f"{what} {step}" for step in range(4) for what in ("begun", "told")]
    order.clear()
    monkeypatch.setitem(run.STEPS_IN_FLIGHT, "cpu", 1)
    run_sft(SftConfig.model_validate(settings(world, "ahead") | {"max_steps": 4}), display=Heard(order))
    saved = ["begun 0", "begun 1", "told 0", "begun 2", "told 1", "told 2"]  # a checkpoint knows all before it
    assert order == [*saved, "begun 3", "told 3"]
    assert curve(world / "runs" / "at-once") == curve(world / "runs" / "ahead")
    assert weights(world / "runs" / "at-once") == weights(world / "runs" / "ahead")


def failing(call, step: int, failure: type[Exception] = OSError):
    """`call`, but for the batch of one step."""

    def called(*args):
        if any(isinstance(each, Batch) and each.step == step for each in args):
            raise failure("the next one fails")
        return call(*args)

    return called


@pytest.mark.parametrize(("owner", "name"), [(run, "shares"), (Trainer, "begin")], ids=["made", "begun"])
def test_a_step_that_cannot_be_begun_leaves_the_ones_before_it_recorded(world, monkeypatch, owner, name):
    monkeypatch.setitem(run.STEPS_IN_FLIGHT, "cpu", 1)
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), 2))
    with pytest.raises(OSError, match="the next one fails"):
        run_sft(SftConfig.model_validate(settings(world, f"before-{name}")))
    found = curve(world / "runs" / f"before-{name}")
    assert found["data/examples"] == [(0, 5), (1, 10)]
    assert [step for step, _ in found["train/loss"]] == [0, 1]


def test_a_step_that_cannot_be_told_either_hides_no_failure(world, monkeypatch):
    def metrics(_: PendingStep) -> StepMetrics:
        raise ValueError("the GPU is gone")

    monkeypatch.setitem(run.STEPS_IN_FLIGHT, "cpu", 1)
    monkeypatch.setattr(Trainer, "begin", failing(Trainer.start_step, 1))
    monkeypatch.setattr(PendingStep, "metrics", metrics)
    with pytest.raises(OSError, match="the next one fails") as caught:
        run_sft(SftConfig.model_validate(settings(world, "untold")))
    assert caught.value.__notes__ == ["and step 0, begun before it, cannot be told: ValueError: the GPU is gone"]


def as_one_that_fails(config: dict, folder: Path) -> None:
    run.STEPS_IN_FLIGHT["cpu"] = 1
    if os.environ["RANK"] == "1":
        Trainer.start_step = failing(Trainer.start_step, 2)
    with pytest.raises((OSError, RuntimeError)) as caught:
        run_sft(SftConfig.model_validate(config))
    (folder / os.environ["RANK"]).write_text(str(caught.value))


def test_a_rank_that_fails_alone_does_not_wait_for_the_others_to_tell(world, tmp_path):
    run_ranks(2, as_one_that_fails, settings(world, "alone"), tmp_path)
    assert (tmp_path / "1").read_text() == "the next one fails"
    assert [step for step, _ in curve(world / "runs" / "alone")["train/loss"]] == [0]


def as_one_that_cannot_make_a_step(config: dict, folder: Path) -> None:
    run.STEPS_IN_FLIGHT["cpu"] = 1
    if os.environ["RANK"] == "1":
        run.split_across_ranks = failing(run.split_across_ranks, 2, TemplateRefused)
    with pytest.raises(TemplateRefused) as caught:
        run_sft(SftConfig.model_validate(config))
    (folder / os.environ["RANK"]).write_text(str(caught.value))


def test_a_step_that_one_rank_cannot_make_fails_on_all_and_leaves_the_ones_before_it_recorded(world, tmp_path):
    run_ranks(2, as_one_that_cannot_make_a_step, settings(world, "unmade"), tmp_path)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["the next one fails"] * 2
    assert [step for step, _ in curve(world / "runs" / "unmade")["train/loss"]] == [0, 1]


class Listening(NullSftDisplay):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def test_conversations_that_lose_all_of_their_end_are_counted(world, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * 100, "completion": "bb"}))
    config = settings(world, "long") | {"data": {"path": str(tmp_path / "long.jsonl")}, "validation": {}, "epochs": 1}
    heard = Listening()
    run_sft(SftConfig.model_validate(config), display=heard)
    assert "3 tokens to learn lay beyond seq_len = 64 and were cut off" in heard.lines


def test_a_share_that_leaves_nothing_is_refused(world):
    for share, nothing in ((0.99, "none to train on"), (0.01, "none to measure")):
        config = SftConfig.model_validate(settings(world, "share") | {"validation": {"share": share}})
        with pytest.raises(ConfigInvalid, match=nothing):
            build_sft_plan(config)


def test_a_run_does_not_go_on_with_other_conversations(world, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_bytes((world / "data.jsonl").read_bytes())
    flags = ["-m", str(world / "model"), "-d", str(data), "-o", str(tmp_path), "--name", "x", "--batch_size", "8"]
    assert main(["sft", *flags, "--max_steps", "1"]) == 0
    with data.open("a") as file:
        file.write(json.dumps({"prompt": "one", "completion": "more"}))
    assert main(["sft", *flags, "--max_steps", "2"]) == 2
    assert "conversations.count: was 40, now 41" in capsys.readouterr().err


def test_a_dry_run_says_what_it_would_do_and_another_identity_is_refused(world, capsys, tmp_path):
    flags = ["-m", str(world / "model"), "-d", str(world / "data.jsonl"), "-o", str(tmp_path), "--name", "x"]
    assert main(["sft", *flags, "--batch_size", "8", "--dry-run"]) == 0
    assert "5 steps of 8" in capsys.readouterr().out
    assert main(["sft", *flags, "--trainer.loss.id", "ppo", "--dry-run"]) == 2
    assert main(["sft", *flags, "--trainer.lora.rank", "8", "--dry-run"]) == 2
    assert "lora.enabled" in capsys.readouterr().err
    from ramify.store import open_run

    open_run(tmp_path / "x", build_sft_plan(SftConfig.model_validate(settings(world, "x"))).identity).close()
    assert main(["sft", *flags, "--seed", "3", "--max_steps", "1"]) == 2
    assert "seed: was 0, now 3" in capsys.readouterr().err
