"""`ramify sft`: which tokens are trained, in which order, and that a killed run resumes exactly."""

import csv
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from ramify.cli import main
from ramify.core.errors import ConfigInvalid, TemplateRefused
from ramify.env.data_rows import read_rows
from ramify.model.render import load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.run.store import RunStore, open_run
from ramify.run.store.run_log import RunLog
from ramify.train.batch import Batch, PackSpec
from ramify.train.checkpoint_manifest import CheckpointManifest
from ramify.train.metrics import StepMetrics
from ramify.train.sft import run, run_sft
from ramify.train.sft.config import SftConfig, SftDataConfig
from ramify.train.sft.conversations import parse_conversations
from ramify.train.sft.forests import build_sft_forest
from ramify.train.sft.plan import ExampleOrder, build_sft_plan, split_held_out
from ramify.train.sft.run import BatchExamples, SftBatch, SftBatchBuilder
from ramify.train.trainer import PendingStep, Trainer
from tests.support.display import RecordingDisplay
from tests.support.runs import FULL
from tests.support.trainer import TIMEOUT, run_ranks, start_sft, write_model

EPOCHS, STEPS = (3, 22) if FULL else (1, 8)  # 36 examples, 5 in a batch
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "it is 2"},
]


@pytest.fixture(scope="module")
def renderer():
    return load_renderer(resolve_model_path("tiny"))


def make_data_config(**keys) -> SftDataConfig:
    return SftDataConfig(path="data", **keys)


def decode_trained(conversation, renderer, roles=("assistant",), seq_len=1000) -> list[str]:
    """Return the trained text, message by message."""
    forest = build_sft_forest([("a", conversation)], renderer, roles, seq_len)
    targets = forest.targets
    tokens = [targets.token[targets.call == i] for i in range(len(forest.calls))]
    return [renderer.tokenizer.decode(ids) for ids in tokens]


def test_replies_are_trained_with_their_tool_calls_and_the_stop_token(renderer):
    (conversation,) = parse_conversations([{"messages": MESSAGES, "tools": [TOOL]}], make_data_config())
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert decode_trained(conversation, renderer) == [f"yo{call}<|im_end|>", "it is 2<|im_end|>"]
    roles = ("user", "tool")
    assert decode_trained(conversation, renderer, roles) == ["hi<|im_end|>", "2</tool_response><|im_end|>"]


def test_the_trained_tokens_are_one_rendering_of_the_template(renderer):
    (conversation,) = parse_conversations([{"messages": MESSAGES, "tools": [TOOL]}], make_data_config())
    forest = build_sft_forest([("a", conversation)], renderer, ["assistant"], 1000)
    rendered = renderer.render(conversation.messages, conversation.tools, add_generation_prompt=False).token_ids
    np.testing.assert_array_equal(forest.token_ids, rendered[: len(forest.token_ids)])


def test_shared_prefixes_are_stored_once_and_long_examples_are_truncated(renderer):
    rows = [{"messages": [*MESSAGES[:2], {"role": "assistant", "content": text}]} for text in ("one", "two")]
    conversations = parse_conversations(rows, make_data_config())
    forest = build_sft_forest(list(zip("ab", conversations)), renderer, ["assistant"], 1000)
    assert forest.flat_tokens == sum(
        build_sft_forest([("a", conversation)], renderer, ["assistant"], 1000).num_tokens
        for conversation in conversations
    )
    assert forest.num_tokens < 0.7 * forest.flat_tokens
    short = build_sft_forest([("a", conversations[0])], renderer, ["assistant"], forest.num_tokens // 2 + 3)
    assert short.dropped.num_truncated_tokens > 0
    assert short.count_by_component()["ce"] + short.dropped.num_truncated_tokens == len("one") + 1


def test_conversations_that_share_only_the_start_of_the_template_are_not_merged(renderer):
    texts = ["".join(chr(97 + (seed * 7 + index * index) % 26) for index in range(400)) for seed in (1, 2)]
    rows = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]} for text in texts]
    conversations = parse_conversations(rows, make_data_config())
    forest = build_sft_forest(list(zip("ab", conversations)), renderer, ["assistant"], 1000)
    assert forest.num_tokens == forest.flat_tokens


REASONING_TEMPLATE = """{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.last and message.reasoning_content -%}
<think>{{ message.reasoning_content }}</think>
{%- endif -%}{{ message.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_a_template_that_hides_earlier_reasoning_makes_the_conversation_a_tree(tmp_path):
    model = write_model(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": REASONING_TEMPLATE}))
    renderer = load_renderer(model)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "so"},
    ]
    (conversation,) = parse_conversations([{"messages": messages}], make_data_config())
    assert decode_trained(conversation, renderer) == ["<think>hm</think>b<|im_end|>", "<think>so</think>d<|im_end|>"]
    forest = build_sft_forest([("a", conversation)], renderer, ["assistant"], 1000)
    first = np.flatnonzero(forest.targets.call == 1)[0]
    stop = forest.targets.logits_index[first] + 1
    visible = forest.token_ids[:stop][forest.build_attention_mask()[stop - 1, :stop]]
    assert "hm" not in renderer.tokenizer.decode(visible)  # the second reply never saw the first one's reasoning


def test_every_file_format_gives_the_same_conversations(tmp_path):
    plain = [{"messages": MESSAGES, "tools": [TOOL]}, {"messages": MESSAGES[1:2] + MESSAGES[4:], "tools": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, plain)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain), tmp_path / "a.parquet")
    table = pyarrow.Table.from_pylist(plain)
    (tmp_path / "hub" / "train").mkdir(parents=True)
    with pyarrow.ipc.new_stream(str(tmp_path / "hub" / "train" / "data-0.arrow"), table.schema) as writer:
        writer.write_table(table)
    text = [{"messages": json.dumps(MESSAGES), "tools": json.dumps([TOOL])}, {"prompt": "hi", "completion": "it is 2"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, text)))
    (tmp_path / "a.json").write_text(json.dumps(plain))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["messages", "tools", "prompt", "completion"])
        writer.writeheader()
        writer.writerows(text)
    names = ("a.jsonl", "a.parquet", "hub", "b.jsonl", "a.json", "a.csv")
    parsed = [parse_conversations(read_rows(str(tmp_path / name)), make_data_config()) for name in names]
    assert all(conversations == parsed[0] for conversations in parsed)


def test_nulls_in_arguments_are_kept_and_nulls_of_absent_keys_are_ignored(tmp_path):
    call = {"id": None, "function": {"name": "add", "arguments": {"a": None, "b": 1}}}
    message = {"role": "assistant", "content": None, "reasoning": None, "reasoning_content": "hm", "tool_calls": [call]}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{**message, "tool_call_id": None}]}))
    (conversation,) = parse_conversations(read_rows(str(tmp_path / "a.jsonl")), make_data_config())
    (message,) = conversation.messages
    assert json.loads(message.tool_calls[0].arguments) == {"a": None, "b": 1}
    assert (message.content, message.reasoning, message.tool_call_id) == ("", "hm", None)


@pytest.mark.parametrize(
    "row",
    [
        {"text": "hi"},
        {"messages": [{"content": "x"}]},
        {"messages": MESSAGES[:2]},
        {"prompt": "half of a pair: \ud83d", "completion": "hi"},
        {"messages": [{"role": "assistant", "content": "hi", "reasoning": ["hm"]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 7, "function": {"name": "add"}}]}]},
    ],
    ids=str,
)
def test_a_row_that_is_not_a_conversation_is_refused(row):
    with pytest.raises(ConfigInvalid, match="row 2 of data"):
        parse_conversations([{"messages": MESSAGES}, row], make_data_config())


def test_a_conversation_that_the_template_refuses_is_reported_by_its_row(tmp_path):
    model = write_model(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ raise_exception('not ' + messages[1].content) if messages | length > 1 }}" + (config["chat_template"])
    )
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "alone"}]}))
    (tmp_path / "validation.jsonl").write_text("\n".join([json.dumps({"prompt": "hi", "completion": "this"})] * 2))
    config = {"model": {"name": str(model)}, "data": {"path": str(tmp_path / "data.jsonl")}}
    config |= {"validation": {"path": str(tmp_path / "validation.jsonl")}}
    plan = build_sft_plan(SftConfig.model_validate(config))
    with pytest.raises(TemplateRefused, match=r"row 2 of .*validation\.jsonl: .*not this"):
        build_sft_forest([("a", plan.validation[1])], plan.renderer, ["assistant"], 100)


@pytest.mark.parametrize("trainer", [{"loss": {"id": "ppo"}}, {"record_token_stats": True}])
def test_trainer_settings_of_reinforcement_learning_are_refused(trainer):
    with pytest.raises(ValidationError, match=f"trainer.{next(iter(trainer))}: is "):
        SftConfig.model_validate({"data": {"path": "rows.jsonl"}, "trainer": trainer})


def test_every_example_comes_once_per_epoch_for_any_batch_size():
    example_order = ExampleOrder([7], 3, seed=1)
    order = [index for start in range(0, 21, 4) for index in example_order.indices_at(start, 4)]
    assert order == [index for start in range(0, 21, 5) for index in example_order.indices_at(start, 5)]
    assert [sorted(order[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert order[:7] != order[7:14]
    assert order != [index for start in range(0, 21, 7) for index in ExampleOrder([7], 3, seed=2).indices_at(start, 7)]
    train, held_out = split_held_out(20, 0.25, 0)
    assert len(held_out) == 5
    assert sorted(train + held_out) == list(range(20))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("sft")
    write_model(directory / "model")
    rng = Random(0)
    with (directory / "data.jsonl").open("w") as file:
        for _ in range(40):
            text = "".join(rng.choices("abcdef", k=rng.randint(2, 9)))
            file.write(json.dumps({"prompt": text, "completion": text[::-1]}) + "\n")
    return directory


def settings(world: Path, name: str, **trainer) -> dict:
    return {
        "name": name,
        "output": str(world / "runs"),
        "model": {"name": str(world / "model")},
        "data": {"path": str(world / "data.jsonl")},
        "validation": {"fraction": 0.1, "interval": 5},
        "batch_size": 5,
        "epochs": EPOCHS,
        "seq_len": 64,
        "trainer": {
            "device": "cpu",
            "threads": 1,
            "pack_tokens": 128,
            "optim": {"lr": 3e-3, "schedule": {"type": "cosine"}},
            **trainer,
        },
        "checkpoint": {"interval": 3},
    }


def finish(config: dict) -> tuple[int, int]:
    """Run to the end; returns the number of all steps and of those that ran now."""
    process, pipe, _ = start_sft(config)
    try:
        while pipe.poll(TIMEOUT):
            message = pipe.recv()
            if isinstance(message, tuple):
                return message[1], message[2]
    except EOFError:
        process.join(TIMEOUT)
    finally:
        process.kill()
        process.join()
    raise AssertionError(f"the run ended with {process.exitcode}")


def kill_after(config: dict, step: int, delay: float) -> None:
    """Kill the run `delay` seconds after `step` steps are done, and before it ends."""
    process, pipe, _ = start_sft(config, last_step=min(step + 3, STEPS - 1))
    while pipe.poll(TIMEOUT):
        if (message := pipe.recv()) == step:
            time.sleep(delay)  # any moment will do
            process.kill()
            process.join()
            return
        assert not isinstance(message, tuple), "the run ended before it was killed"
    raise AssertionError(f"step {step} was not reached")


def stop_after(config: dict, step: int) -> None:
    """Stop the run after `step` steps: it ends with a checkpoint of the current step."""
    process, pipe, may_continue = start_sft(config, last_step=step)
    message = None
    while not isinstance(message, tuple) and pipe.poll(TIMEOUT):
        if (message := pipe.recv()) == step:
            process.terminate()
            may_continue.set()
    process.join(TIMEOUT)
    assert process.exitcode == 0
    assert isinstance(message, tuple) and step <= message[1] < STEPS
    path = Path(config["output"]) / config["name"] / "checkpoints" / f"step_{message[1]:06}"
    assert (path / "checkpoint.json").exists()


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    with RunStore.open(path, write=False) as store:
        metrics = RunLog(store).metrics()
    names = ("train/loss", "train/grad_norm", "train/lr", "data/examples", "validation/loss")
    return {name: [(metric.step, metric.value) for metric in metrics if metric.name == name] for name in names}


def read_weights(path: Path) -> bytes:
    (file,) = path.glob("weights/*/model.safetensors")
    return file.read_bytes()


@pytest.mark.process
@pytest.mark.promise
@pytest.mark.parametrize(
    "lora",
    [pytest.param(False, marks=pytest.mark.full("LoRA is killed, too")), True],
    ids=["full", "lora"],
)
def test_a_killed_run_resumes_exactly(world, lora):
    trainer = {"lora": {"enabled": True, "rank": 4}} if lora else {}
    name = "lora" if lora else "full"
    assert finish(settings(world, f"{name}-undisturbed", **trainer)) == (STEPS, STEPS)
    expected = read_metrics(world / "runs" / f"{name}-undisturbed")
    examples = [value for _, value in expected["data/examples"]]
    assert examples == [*range(5, 36 * EPOCHS, 5), 36 * EPOCHS]  # none twice and none missing
    assert [step for step, _ in expected["validation/loss"]] == [*range(0, STEPS, 5), STEPS]
    losses = [value for _, value in expected["train/loss"]]
    assert sum(losses[-3:]) < sum(losses[:3])  # training lowers the loss

    rng = Random(7)
    config = settings(world, f"{name}-killed", **trainer)
    step = 0
    for _ in range(10 if FULL else 1):
        step = min(step + rng.randint(1, 3), STEPS - 3)
        kill_after(config, step, rng.uniform(0, 0.05))
        checkpoints = (world / f"runs/{name}-killed/checkpoints").glob("step_*")
        step = max((int(path.name[5:]) for path in checkpoints), default=0)
    stop_after(config, step + 1)
    finish(config)
    assert read_metrics(world / "runs" / f"{name}-killed") == expected
    assert read_weights(world / "runs" / f"{name}-killed") == read_weights(world / "runs" / f"{name}-undisturbed")
    assert finish(config) == (STEPS, 0)  # a finished run runs no more steps


def test_starting_a_step_before_the_last_one_is_recorded_changes_nothing(world, monkeypatch):
    order, start_step = [], Trainer.start_step
    display = RecordingDisplay(lambda progress: order.append(f"shown {progress.metrics.step}"))

    def recording_start_step(trainer: Trainer, batch: Batch) -> PendingStep:
        order.append(f"started {batch.step}")
        return start_step(trainer, batch)

    monkeypatch.setattr(Trainer, "start_step", recording_start_step)
    run_sft(SftConfig.model_validate(settings(world, "at-once") | {"max_steps": 4}), display=display)
    assert order == [f"{what} {step}" for step in range(4) for what in ("started", "shown")]
    order.clear()
    monkeypatch.setitem(run.STEPS_IN_FLIGHT, "cpu", 1)
    run_sft(SftConfig.model_validate(settings(world, "ahead") | {"max_steps": 4}), display=display)
    # A checkpoint after step 2 waits for all steps before it.
    until_checkpoint = ["started 0", "started 1", "shown 0", "started 2", "shown 1", "shown 2"]
    assert order == [*until_checkpoint, "started 3", "shown 3"]
    assert read_metrics(world / "runs" / "at-once") == read_metrics(world / "runs" / "ahead")
    assert read_weights(world / "runs" / "at-once") == read_weights(world / "runs" / "ahead")


def fail_at_step(call: Any, step: int, failure: type[Exception] = OSError) -> Any:
    """Wrap `call` so that it fails for the batch of one step."""

    def wrapper(*args):
        if any(isinstance(arg, Batch) and arg.step == step for arg in args):
            raise failure("the next step fails")
        return call(*args)

    return wrapper


def has_builder_thread() -> bool:
    return any(thread.name.startswith("sft-batches") for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("owner", "name"), [(run, "split_across_ranks"), (Trainer, "start_step")], ids=["prepare", "start"]
)
def test_pending_steps_are_recorded_if_the_next_one_cannot_start(world, monkeypatch, owner, name):
    monkeypatch.setitem(run.STEPS_IN_FLIGHT, "cpu", 1)
    monkeypatch.setattr(owner, name, fail_at_step(getattr(owner, name), 2))
    with pytest.raises(OSError, match="the next step fails"):
        run_sft(SftConfig.model_validate(settings(world, f"before-{name}")))
    metrics = read_metrics(world / "runs" / f"before-{name}")
    assert metrics["data/examples"] == [(0, 5), (1, 10)]
    assert [step for step, _ in metrics["train/loss"]] == [0, 1]
    assert not has_builder_thread()


def test_a_pending_step_that_fails_too_does_not_hide_the_first_failure(world, monkeypatch):
    def fail(_: PendingStep) -> StepMetrics:
        raise ValueError("the GPU is gone")

    monkeypatch.setitem(run.STEPS_IN_FLIGHT, "cpu", 1)
    monkeypatch.setattr(Trainer, "start_step", fail_at_step(Trainer.start_step, 1))
    monkeypatch.setattr(PendingStep, "wait_for_metrics", fail)
    with pytest.raises(OSError, match="the next step fails") as caught:
        run_sft(SftConfig.model_validate(settings(world, "unrecorded")))
    assert caught.value.__notes__ == ["step 0, started before, was not recorded: ValueError: the GPU is gone"]


@pytest.fixture
def built_batches(monkeypatch) -> queue.SimpleQueue[tuple[int, int]]:
    """A queue with step and position of every batch that was built."""
    built, build = queue.SimpleQueue(), SftBatchBuilder._build

    def recording_build(builder: SftBatchBuilder, batch_examples: BatchExamples) -> SftBatch:
        sft_batch = build(builder, batch_examples)
        built.put((batch_examples.step, batch_examples.start_position))
        return sft_batch

    monkeypatch.setattr(SftBatchBuilder, "_build", recording_build)
    return built


def test_the_next_batch_is_built_before_a_step_ends(world, monkeypatch, built_batches):
    config = SftConfig.model_validate(settings(world, "built-ahead") | {"max_steps": 4, "validation": {"fraction": 0}})
    start_step, switch_interval = Trainer.start_step, sys.getswitchinterval()

    def wait_for_next_batch(trainer: Trainer, batch: Batch) -> PendingStep:
        if batch.step == 0:
            assert built_batches.get(timeout=TIMEOUT) == (0, 0)
        if batch.step < 3:
            assert built_batches.get(timeout=TIMEOUT) == (batch.step + 1, 5 * (batch.step + 1))
        return start_step(trainer, batch)

    monkeypatch.setattr(Trainer, "start_step", wait_for_next_batch)
    assert run_sft(config).steps == 4
    assert built_batches.empty()
    assert not has_builder_thread()
    assert sys.getswitchinterval() == switch_interval


def test_an_error_while_examples_are_selected_is_that_of_their_batch(world, monkeypatch):
    config = SftConfig.model_validate(settings(world, "unselected"))
    plan, select = build_sft_plan(config), ExampleOrder.indices_at

    def fail_to_select_second_batch(order: ExampleOrder, position: int, batch_size: int) -> list[int]:
        if position == 5:
            raise OSError("the examples are gone")
        return select(order, position, batch_size)

    monkeypatch.setattr(ExampleOrder, "indices_at", fail_to_select_second_batch)
    with SftBatchBuilder(config, plan, PackSpec(), rank=0, world_size=1) as builder:
        sft_batches = builder.training_batches(first_step=0, position=0, total_steps=3)
        assert next(sft_batches).rank_batch.step == 0
        with pytest.raises(OSError, match="the examples are gone"):
            next(sft_batches)


def test_a_batch_built_ahead_of_a_stop_is_built_again_by_the_resumed_run(world, monkeypatch, built_batches):
    config = SftConfig.model_validate(settings(world, "stopped-ahead") | {"max_steps": 4})
    start_step = Trainer.start_step

    def stop_when_next_batch_is_built(trainer: Trainer, batch: Batch) -> PendingStep:
        if batch.step == 1:
            while built_batches.get(timeout=TIMEOUT) != (2, 10):
                pass
            signal.raise_signal(signal.SIGTERM)
        return start_step(trainer, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "start_step", stop_when_next_batch_is_built)
        assert run_sft(config).steps == 2
    assert not has_builder_thread()
    assert run_sft(config).steps_run == 2
    run_sft(SftConfig.model_validate(settings(world, "not-stopped") | {"max_steps": 4}))
    assert read_metrics(world / "runs" / "stopped-ahead") == read_metrics(world / "runs" / "not-stopped")
    assert read_weights(world / "runs" / "stopped-ahead") == read_weights(world / "runs" / "not-stopped")


def fail_to_start_as_rank(config: dict, directory: Path) -> None:
    run.STEPS_IN_FLIGHT["cpu"] = 1
    if os.environ["RANK"] == "1":
        Trainer.start_step = fail_at_step(Trainer.start_step, 2)
    with pytest.raises((OSError, RuntimeError)) as caught:
        run_sft(SftConfig.model_validate(config))
    (directory / os.environ["RANK"]).write_text(str(caught.value))


@pytest.mark.process
def test_a_rank_that_fails_alone_does_not_wait_for_the_others(world, tmp_path):
    run_ranks(2, fail_to_start_as_rank, settings(world, "alone"), tmp_path)
    assert (tmp_path / "1").read_text() == "the next step fails"
    assert [step for step, _ in read_metrics(world / "runs" / "alone")["train/loss"]] == [0]


def fail_to_prepare_as_rank(config: dict, directory: Path) -> None:
    run.STEPS_IN_FLIGHT["cpu"] = 1
    if os.environ["RANK"] == "1":
        run.split_across_ranks = fail_at_step(run.split_across_ranks, 2, TemplateRefused)
    with pytest.raises(TemplateRefused) as caught:
        run_sft(SftConfig.model_validate(config))
    (directory / os.environ["RANK"]).write_text(str(caught.value))


@pytest.mark.process
def test_a_step_that_one_rank_cannot_prepare_fails_on_all_and_pending_steps_are_recorded(world, tmp_path):
    run_ranks(2, fail_to_prepare_as_rank, settings(world, "unprepared"), tmp_path)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["the next step fails"] * 2
    assert [step for step, _ in read_metrics(world / "runs" / "unprepared")["train/loss"]] == [0, 1]


def test_truncated_tokens_are_counted(world, tmp_path):
    rows = [{"prompt": "a" * length, "completion": "bb"} for length in (100, 1)]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = settings(world, "long") | {
        "data": {"path": str(tmp_path / "long.jsonl")},
        "validation": {"fraction": 0},
        "epochs": 1,
    }
    display = RecordingDisplay()
    run_sft(SftConfig.model_validate(config), display=display)
    assert "3 trained tokens beyond seq_len = 64 were cut off" in display.lines


def test_a_validation_share_that_leaves_no_examples_is_refused(world):
    for share, problem in ((0.99, "none to train on"), (0.01, "none to validate on")):
        config = SftConfig.model_validate(settings(world, "share") | {"validation": {"fraction": share}})
        with pytest.raises(ConfigInvalid, match=problem):
            build_sft_plan(config)


def test_a_run_does_not_resume_with_other_conversations(world, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_bytes((world / "data.jsonl").read_bytes())
    flags = ["-m", str(world / "model"), "-d", str(data), "-o", str(tmp_path), "--name", "x", "--batch_size", "8"]
    assert main(["sft", *flags, "--max_steps", "1"]) == 0
    with data.open("a") as file:
        file.write(json.dumps({"prompt": "one", "completion": "more"}))
    assert main(["sft", *flags, "--max_steps", "2"]) == 2
    assert "conversations.count: was 40, now 41" in capsys.readouterr().err


def test_a_dry_run_describes_the_plan_and_another_identity_is_refused(world, capsys, tmp_path):
    flags = ["-m", str(world / "model"), "-d", str(world / "data.jsonl"), "-o", str(tmp_path), "--name", "x"]
    assert main(["sft", *flags, "--batch_size", "8", "--dry-run"]) == 0
    assert "5 steps with batch size 8" in capsys.readouterr().out
    assert main(["sft", *flags, "--trainer.loss.id", "ppo", "--dry-run"]) == 2
    capsys.readouterr()
    assert main(["sft", *flags, "--validation.interval", "50", "--dry-run"]) == 2  # the default, but it is set
    assert "set path or fraction" in capsys.readouterr().err
    open_run(tmp_path / "x", build_sft_plan(SftConfig.model_validate(settings(world, "x"))).identity).close()
    for more in ([], ["--dry-run"]):
        assert main(["sft", *flags, "--seed", "3", "--max_steps", "1", *more]) == 2
        assert "seed: was 0, now 3" in capsys.readouterr().err
    assert main(["sft", *flags, "--seed", "3", "--dry-run", "--fresh"]) == 0


def test_a_dry_run_refuses_what_the_trainer_refuses(world, capsys, tmp_path):
    flags = ["-m", str(world / "model"), "-d", str(world / "data.jsonl"), "-o", str(tmp_path), "--name", "x"]
    checkpoint = tmp_path / "x" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    CheckpointManifest(step=1, optimizer="muon", note={}, files={}).write(checkpoint)
    assert main(["sft", *flags, "--dry-run"]) == 2
    assert "trainer.optim.type: expected 'muon', as in the run's checkpoints" in capsys.readouterr().err
    assert main(["sft", *flags, "--dry-run", "--fresh"]) == 0
    shutil.copytree(world / "model", tmp_path / "bert")
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    assert main(["sft", *flags, "-m", str(tmp_path / "bert"), "--dry-run"]) == 1
    assert "ModelUnsupported: bert is an encoder" in capsys.readouterr().err
