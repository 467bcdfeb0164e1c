"""`ramify export --to sft`: the best rollouts of a run become conversations with the same tokens."""

import json
from collections import Counter

import pytest

from ramify.cli import main
from ramify.core.errors import ConfigInvalid
from ramify.env.data_rows import read_rows
from ramify.env.tasksets.color_codeword import make_square
from ramify.infer.gateway import ModelRequest
from ramify.model.render import load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.run.store import RolloutRecord, RunStore
from ramify.trace import Branch, Media, MediaPart, Message, TextPart
from ramify.train.sft.config import SftDataConfig
from ramify.train.sft.conversations import parse_conversations
from ramify.train.sft.export import export_conversations, find_trained_paths
from ramify.train.sft.forests import build_annotated_trace, build_sft_forest
from tests.support.attempts import tool_call
from tests.support.scenario import make_session
from tests.support.traces import make_rollout

pytestmark = pytest.mark.promise  # exact tokens

VISION = load_renderer(resolve_model_path("tiny-vision"))
ROLES = ["assistant"]
SQUARE = Media.from_bytes(make_square((255, 0, 0)), "image/png")
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},)
SYSTEM = Message("system", "Look first.")
QUESTION = Message("user", (TextPart("Which letter?"), MediaPart(SQUARE.hash)))


async def sample_tree():
    """Return a trace with a tool call, an image, a reply that was cut, a reply of no policy, and three branches."""
    session, _ = make_session([tool_call("look"), "AB", "ABC", "too long a reply", "C"], renderer=VISION)

    async def ask(*messages, parent=None, **fields):
        media = {SQUARE.hash: SQUARE} if QUESTION in messages else {}
        return await session.generate(ModelRequest(messages, TOOLS, media=media, parent_node=parent, **fields))

    call = await ask(SYSTEM, QUESTION)
    result = Message("tool", "a red square", tool_call_id=call.message.tool_calls[0].id)
    first = await ask(result, parent=call.node)
    await ask(Message("user", "Again."), parent=first.node)
    await ask(Message("user", "Longer."), parent=first.node, sampling_overrides={"max_tokens": 5})
    await ask(SYSTEM, Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "Which letter?"))
    trace = session.trace
    trace.id = trace.episode = "e0"
    trace.group, trace.rewards = "g0", {"score": (1.0, 1.0)}
    return trace


def open_run(path, model):
    path.mkdir()
    (path / "config.toml").write_text(f'[model]\nname = "{model}"\n')
    return RunStore.open(path)


def read_conversations(path):
    return parse_conversations(read_rows(str(path)), SftDataConfig(path=str(path)))


def list_trained(trace, annotated=None):
    """Return every trained token with the tokens before it: of a rollout what was sampled, else what is annotated."""
    if annotated is None:
        spans = [(node, trace.nodes[node].sampled_span) for node in trace.sampled_nodes]
    else:
        spans = [(annotation.node, annotation.span) for annotation in annotated.annotations]
    trained = Counter()
    for node, (start, stop) in spans:
        tokens = Branch(trace, node).token_ids.tolist()
        depth = len(tokens) - len(trace.nodes[node].token_ids)
        trained.update(tuple(tokens[: depth + index + 1]) for index in range(start, stop))
    return trained


async def test_sft_sees_the_tokens_of_the_rollout_and_trains_each_sampled_one_once(tmp_path):
    expected = await sample_tree()
    with open_run(tmp_path / "run", "tiny-vision") as store:
        await store.add_rollout(RolloutRecord("g0.0", "0", source="env", reward=1.0), [await sample_tree()])
        assert export_conversations(store, tmp_path / "sft.jsonl") == 3
    conversations = read_conversations(tmp_path / "sft.jsonl")
    annotated = [build_annotated_trace(str(i), item, VISION, ROLES) for i, item in enumerate(conversations)]
    for (leaf, _), item, conversation in zip(find_trained_paths(expected), annotated, conversations, strict=True):
        (branch,) = item.trace.branches
        assert branch.token_ids.tolist() == Branch(expected, leaf).token_ids.tolist()
        assert branch.messages == list(conversation.messages) == Branch(expected, leaf).messages
        assert item.trace.graph.path_media(branch.leaf) == expected.graph.path_media(leaf)
        assert conversation.tools == TOOLS
    assert sum((list_trained(item.trace, item) for item in annotated), Counter()) == list_trained(expected)
    assert set(list_trained(expected).values()) == {1}
    assert [len(conversation.media) for conversation in conversations] == [1, 1, 0]
    forest = build_sft_forest(list(zip("abc", conversations)), VISION, ROLES, 4096)
    assert forest.count_by_component()["ce"] == expected.completion_len
    assert forest.num_tokens <= expected.total_tokens < forest.flat_tokens  # branches share their prefix again


async def test_another_tokenizer_trains_on_the_messages_by_their_weights(tmp_path):
    with open_run(tmp_path / "run", "tiny-vision") as store:
        await store.add_rollout(RolloutRecord("g0.0", "0", source="env", reward=1.0), [await sample_tree()])
        export_conversations(store, tmp_path / "sft.jsonl")
    *_, conversation = read_conversations(tmp_path / "sft.jsonl")  # it has no image
    other = load_renderer(resolve_model_path("tiny"))
    assert other.tokenizer.digest != VISION.tokenizer.digest
    item = build_annotated_trace("a", conversation, other, ROLES)
    rendered = other.render(conversation.messages, conversation.tools, add_generation_prompt=False)
    assert item.trace.branches[0].token_ids.tolist() == rendered.token_ids.tolist()
    assert [item.trace.nodes[entry.node].message.text for entry in item.annotations] == ["C"]  # not "2"


async def test_messages_of_all_roles_that_branches_share_are_trained_once(tmp_path):
    with open_run(tmp_path / "run", "tiny-vision") as store:
        await store.add_rollout(RolloutRecord("g0.0", "0", source="env", reward=1.0), [await sample_tree()])
        export_conversations(store, tmp_path / "sft.jsonl")
    roles = ["system", "user", "tool", "assistant"]
    trained, everywhere = Counter(), Counter()
    for conversation in read_conversations(tmp_path / "sft.jsonl"):
        for index in range(len(conversation.messages)):
            path = conversation.messages[: index + 1]
            everywhere[path] += 1
            trained[path] += conversation.is_trained(index, roles)
    assert max(everywhere.values()) == 3
    assert sorted(trained.values()) == [0] + [1] * (len(trained) - 1)  # the reply "2" was not sampled


async def test_a_system_column_is_refused_for_exported_rows(tmp_path):
    path = tmp_path / "sft.jsonl"
    with open_run(tmp_path / "run", "tiny") as store:
        await add_rollouts(store, [0.5, 0.9])
        export_conversations(store, path)
    config = SftDataConfig(path=str(path), system_column="rules")
    rows = list(read_rows(str(path)))
    for changed in (rows, [{**row, "rules": "Be short."} for row in rows]):
        with pytest.raises(
            ConfigInvalid, match=r"data\.system_column is 'rules', but the row was exported from a rollout"
        ):
            parse_conversations(changed, config)
    assert len(parse_conversations([{**row, "rules": ""} for row in rows], config)) == len(rows)


async def add_rollouts(store, rewards, source="env"):
    """Store rollouts of two groups: even and odd numbers."""
    for number, reward in enumerate(rewards):
        _, (trace,) = make_rollout(number)
        trace.episode, trace.group = f"{source}{number}", f"g{number % 2}"
        trace.rewards = {"score": None if reward is None else (reward, 1.0)}
        record = RolloutRecord(f"{source}{number}", str(number % 2), number // 2, source, reward)
        await store.add_rollout(record, [trace])


async def test_the_best_rollouts_of_each_group_are_chosen(tmp_path):
    path = tmp_path / "sft.jsonl"

    def read_rollouts():
        return [json.loads(line)["rollout"] for line in path.read_text().splitlines()]

    with open_run(tmp_path / "run", "tiny") as store:
        await add_rollouts(store, [0.5, 0.9, 0.9, None, 0.9, 0.2])
        await add_rollouts(store, [1.0, 1.0], source="eval/held-out")  # tasks that must not be trained on
        failed, traces = make_rollout(9, reward=1.0, failure="ProcessDied")
        await store.add_rollout(failed, traces)
        export_conversations(store, path)
        assert read_rollouts() == ["env2", "env1"]
        export_conversations(store, path, best=2)
        assert read_rollouts() == ["env2", "env4", "env1", "env5"]
        export_conversations(store, path, best=9, min_reward=0.5)
        assert read_rollouts() == ["env2", "env4", "env0", "env1"]
        with pytest.raises(ConfigInvalid, match=r"no rollout with a reward of at least 0.95 \(--min-reward\)"):
            export_conversations(store, path, min_reward=0.95)
    assert len(read_rollouts()) == 4  # the file is replaced only by a complete one


async def test_the_command_writes_beside_the_run_and_says_how_to_train(tmp_path, capsys):
    with open_run(tmp_path / "run", "tiny") as store:
        await add_rollouts(store, [0.5, 0.9])
    run = str(tmp_path / "run")
    assert main(["export", run, "--to", "sft", "--best", "1", "--min-reward", "0.9"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"1 conversation in {run}/sft.jsonl; train on them with: ramify sft -d {run}/sft.jsonl"
    ]
    assert main(["export", run, "--to", "jsonl", "--best", "1"]) == 2
    assert "--best and --min-reward choose the rollouts of --to sft" in capsys.readouterr().err
