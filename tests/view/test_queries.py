"""The queries of the page, on runs as an orchestrator and an eval write them."""

import json
import os
import threading

import msgspec
import pytest

from ramify.cli.app import main
from ramify.core.errors import ConfigInvalid
from ramify.run.store import Ledger, RunStore
from ramify.trace import Message, ToolCall
from ramify.view import run_summary
from ramify.view.queries import MAX_NODES, RunQueries
from ramify.view.rollout_filter import RolloutFilter
from ramify.view.rollout_index import RolloutIndex
from ramify.view.rollout_reader import list_messages
from ramify.view.rollout_view import MAX_MESSAGE_CHARS
from tests.support.sample_runs import (
    make_branching_trace,
    make_record,
    make_trace,
    write_eval_run,
    write_rl_run,
    write_token_stats,
)
from tests.support.status import WAITS, serve_status

DEADLINE = 20.0  # seconds for the index


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    write_rl_run(folder / "run", texts={(1, 0): "the quick brown fox", (2, 1): "<script>alert(1)</script>"})
    write_eval_run(folder / "eval")
    (folder / "planned").mkdir()
    (folder / "planned" / "config.toml").write_text('[[train]]\nname = "a"\n')
    (folder / "damaged" / "traces").mkdir(parents=True)
    (folder / "damaged" / "traces" / "000000.seg").write_bytes(b"data")
    (folder / "not a run").mkdir()
    return folder


@pytest.fixture
def queries(folder):
    queries = RunQueries(folder)
    yield queries
    queries.close()


def list_ids(queries, run="run", rollout_filter=None, **options):
    """Return the ids of a page, once the index is complete."""
    queries._get_index(queries.folder.find_run(run)).refresh(
        texts=bool(rollout_filter and rollout_filter.text), wait=DEADLINE
    )
    answer = queries.list_rollouts(run, rollout_filter, **options)
    assert answer["indexed"] == 1.0
    return [row["id"] for row in answer["rows"]]


def test_every_run_of_a_folder_is_listed_with_its_state(queries):
    runs = {run["name"]: run for run in queries.list_runs()}
    assert {name: run["state"] for name, run in runs.items()} == {
        "run": "finished",
        "eval": "ended",
        "planned": "planned",
        "damaged": "damaged",
    }
    run = runs["run"]
    assert (run["kind"], run["step"], run["max_steps"], run["reward"]) == ("rl", 3, 4, 0.7)
    assert run["curve"] == [0.5, 0.6, 0.7]
    assert "RunDamaged" in runs["damaged"]["problem"]


def test_a_folder_may_be_missing_empty_or_a_run(folder, tmp_path):
    assert [run["name"] for run in RunQueries(folder / "run").list_runs()] == ["run"]
    assert RunQueries(tmp_path).list_runs() == []
    assert RunQueries(tmp_path / "missing").list_runs() == []


@pytest.mark.parametrize("name", ["..", "../outputs", "", "/etc", "not a run"])
def test_only_runs_of_the_folder_can_be_named(queries, name):
    with pytest.raises(ConfigInvalid, match="has no run"):
        queries.get_run(name)
    with pytest.raises(ConfigInvalid, match=r"has no run 'runn'; did you mean 'run'\?"):
        queries.get_run("runn")


def test_a_run_has_the_flow_of_its_ledger_its_drops_and_its_failures(queries):
    run = queries.get_run("run")
    assert run["flow"] == {"trained": 3, "dropped": 1}
    assert run["drops"] == [{"reason": "filtered", "detail": "zero_advantage", "groups": 1}]
    [failure] = run["failures"]
    assert (failure["name"], failure["count"], failure["blame"], failure["message"]) == (
        "ProcessDied",
        2,
        "system",
        "exit code -9",
    )
    assert [event["kind"] for event in run["events"]] == ["started", "finished"]


def test_an_eval_has_scores_and_the_summary_that_show_prints(queries):
    assert queries.get_run("eval")["scores"][0]["name"] == "avg@2"
    summary = dict(queries.get_run("eval")["summary"])
    assert {"similarity", "exact", "truncated", "timing"} <= summary.keys()
    assert dict(queries.get_run("run")["summary"]) == {}


def test_a_row_has_the_rewards_and_metrics_of_the_taskset(queries):
    list_ids(queries)
    rows = {row["id"]: row for row in queries.list_rollouts("run")["rows"]}
    assert rows["1.0"]["rewards"] == {"similarity": 1.0}
    assert rows["1.1"]["metrics"] == {"exact": 0.0}
    assert queries.get_row("run", "1.0")["metrics"] == {"exact": 1.0}


async def test_a_run_is_summarized_again_only_after_it_changed(tmp_path, monkeypatch):
    write_eval_run(tmp_path / "other")
    path = write_rl_run(tmp_path / "run")
    summarized, summarize = [], run_summary.summarize_run
    monkeypatch.setattr(
        "ramify.view.queries.summarize_run", lambda name, path: summarized.append(name) or summarize(name, path)
    )
    queries = RunQueries(tmp_path)
    first = queries.list_runs()
    assert queries.list_runs() == first
    assert sorted(summarized) == ["other", "run"]
    with RunStore.open(path) as store:
        trace = make_trace("late", 0, [50, 2], 0.25)
        await store.add_rollout(make_record("late", "9", 0, "reverse", [trace]), [trace])
        assert {run["name"]: run["state"] for run in queries.list_runs()} == {"run": "starting", "other": "ended"}
    [run] = [run for run in queries.list_runs() if run["name"] == "run"]
    assert (run["state"], run["rollouts"]) == ("finished", 13)
    assert summarized[2:] == ["run", "run"]


def test_metrics_are_read_by_name_and_only_the_new_ones_on_request(queries):
    answer = queries.get_metrics("run", ["entropy"])
    assert answer["points"] == {"entropy": [(0, 1.0), (1, 0.5), (2, 1 / 3)]}
    assert "reward/all/mean" in answer["all_names"]
    assert queries.get_metrics("run", ["entropy"], answer["last"])["points"] == {}
    assert queries.get_metrics("eval") == {"last": 0, "points": {}, "all_names": []}


def test_rollouts_are_sorted_filtered_and_paged(queries):
    assert len(list_ids(queries)) == 12
    assert set(list_ids(queries, sort="reward", descending=False)[:4]) == {"0.2", "1.2", "2.2", "3.2"}
    assert list_ids(queries, rollout_filter=RolloutFilter(step=1), sort="reward") == ["1.0", "1.1", "1.2"]
    assert list_ids(queries, rollout_filter=RolloutFilter(min_reward=0.4, max_reward=0.6, group=2)) == ["2.1"]
    assert list_ids(queries, rollout_filter=RolloutFilter(state="dropped"), descending=False) == ["3.0", "3.1", "3.2"]
    assert list_ids(queries, rollout_filter=RolloutFilter(source="nothing")) == []
    assert list_ids(queries, page=2) == []


def test_rollouts_of_an_eval_are_filtered_by_error(queries):
    assert list_ids(queries, "eval", RolloutFilter(error="MalformedCall")) == ["task-0.0"]
    assert list_ids(queries, "eval", RolloutFilter(error="any")) == ["task-0.0"]
    assert list_ids(queries, "eval", RolloutFilter(error="M_lformedCal%")) == []  # a name, not a pattern
    assert queries.list_rollouts("eval")["facets"]["errors"] == {"MalformedCall": 1}
    assert [queries.list_rollouts(run)["has_groups"] for run in ("run", "eval")] == [True, False]


@pytest.mark.parametrize(
    ("text", "ids"),
    [("brown fox", ["1.0"]), ("bro", ["1.0"]), ("alert", ["2.1"]), ('"', []), ("fox AND", []), ("nowhere", [])],
)
def test_messages_are_searched_by_words(queries, text, ids):
    assert list_ids(queries, rollout_filter=RolloutFilter(text=text)) == ids


async def test_the_index_follows_a_run_that_is_being_written(tmp_path):
    path = write_rl_run(tmp_path / "run", num_groups=2)
    index = RolloutIndex(path)
    assert index.refresh(wait=DEADLINE) == 1.0
    with RunStore.open(path) as store:  # holds the lock, as a running orchestrator does
        trace = make_trace("late", 0, [50, 2], 0.25, text="a late rollout")
        await store.add_rollout(make_record("late", "9", 0, "reverse", [trace]), [trace])
        replaced = make_trace("0.0", 0, [50, 2], 0.125, text="a second try")
        await store.add_rollout(make_record("0.0", "0", 0, "reverse", [replaced]), [replaced])
        assert index.refresh(texts=True, wait=DEADLINE) == 1.0
    total, rows = index.select(RolloutFilter(), sort="newest", descending=True, offset=0, limit=2)
    assert (total, [row["id"] for row in rows]) == (7, ["0.0", "late"])
    assert rows[0]["reward"] == 0.125
    assert index.select(RolloutFilter(text="second try"), sort="newest", descending=True, offset=0, limit=9)[0] == 1
    index.close()


def test_a_run_that_cannot_be_written_is_shown_and_nothing_is_stored_with_it(tmp_path, monkeypatch):
    path = write_rl_run(tmp_path / "run")
    files = {file.name for file in path.iterdir()}
    monkeypatch.setattr("os.access", lambda *_: False)
    queries = RunQueries(tmp_path)
    assert len(list_ids(queries)) == 12
    assert queries.get_run("run")["state"] == "finished"
    queries.close()
    assert {file.name for file in path.iterdir()} == files


def test_a_rollout_has_its_messages_as_a_tree(queries):
    rollout = queries.get_rollout("eval", "task-0.0")
    [trace] = rollout["traces"]
    assert [node["parent"] for node in trace["nodes"]] == [-1, 0, 1, 2, 3, 3, 3]
    assert trace["nodes"][2]["calls"][0]["name"] == "read_file"
    assert trace["nodes"][5]["fork"]["reason"] == "retry"
    assert trace["nodes"][3]["media"][0]["mime"] == "image/png"
    assert trace["rewards"] == {"tests": [0.25, 2.0], "style": [0.5, 0.5]}
    json.dumps(rollout)


def test_a_long_message_is_read_in_parts_that_miss_no_character(tmp_path):
    """The positions count code points, as Python does; JavaScript counts an emoji as two."""
    text = "🎉é" * MAX_MESSAGE_CHARS
    write_rl_run(tmp_path / "run", num_groups=1, texts={(0, 0): text})
    queries = RunQueries(tmp_path)
    node = queries.get_rollout("run", "0.0")["traces"][0]["nodes"][1]
    parts, stop = [node["text"]], node["shown"]
    assert (node["chars"], stop) == (len(text), MAX_MESSAGE_CHARS)
    while stop < node["chars"]:
        part = queries.get_message("run", "0.0", 0, 1, stop, 7001)
        parts.append(part["text"])
        stop = part["stop"]
    assert "".join(parts) == text
    assert queries.get_message("run", "0.0", 0, 1, len(text) + 5, 7)["stop"] == len(text)


async def test_long_reasoning_and_arguments_end_with_an_ellipsis(tmp_path):
    trace = make_trace("0.0", 0, [50, 2], 1.0)
    call = ToolCall("c", "write", "a" * (MAX_MESSAGE_CHARS + 1))
    trace.graph.add_node(1, Message("assistant", "", "r" * (MAX_MESSAGE_CHARS + 1), (call,)), [5])
    with RunStore.open(tmp_path / "run") as store:
        await store.add_rollout(make_record("0.0", "0", 0, "", [trace]), [trace])
    node = RunQueries(tmp_path).get_rollout("run", "0.0")["traces"][0]["nodes"][2]
    assert node["reasoning"] == "r" * MAX_MESSAGE_CHARS + "…"
    assert node["calls"][0]["arguments"] == "a" * MAX_MESSAGE_CHARS + "…"


def test_tokens_have_the_values_that_are_stored_for_them(queries):
    [node] = queries.get_tokens("run", "1.1", 0, [1])
    assert node["ids"] == [1, 50, 51, 53, 2]
    assert node["sampled"] == [1, 5]
    assert node["values"]["advantage"] == [None, 0.0, 0.0, 0.0, 0.0]
    assert node["values"]["logprob"] == [None, -0.1, -0.2, -0.3, -0.4]
    assert node["values"]["version"] == [None, 1.0, 1.0, 1.0, 1.0]


def test_tokens_of_many_nodes_are_read_in_parts(queries):
    nodes = [0, 1] * MAX_NODES
    assert [entry["node"] for entry in queries.iter_tokens("run", "1.1", 0, nodes)] == nodes
    with pytest.raises(ConfigInvalid, match="at most 60 nodes"):
        queries.get_tokens("run", "1.1", 0, nodes)


def test_trained_tokens_have_the_values_of_the_trainer(queries):
    [node] = queries.get_tokens("run", "1.1", 0, [1])
    assert node["values"]["entropy"] == [None, 0.0, 0.5, 1.0, 1.5]
    assert node["values"]["mismatch"] == pytest.approx([None, 0.0, -0.01, -0.02, -0.03], abs=1e-6)
    measures = {entry["name"]: entry for entry in queries.get_rollout("run", "1.1")["traces"][0]["measures"]}
    assert [entry["token"] for entry in measures["entropy"]["extremes"]] == [4, 3, 2, 1]
    assert [entry["token"] for entry in measures["mismatch"]["extremes"]] == [4, 3, 2, 1]
    assert "sampler" in measures["mismatch"]["description"]


def read_served(path):
    with RunStore.open(path, write=False) as store:
        return Ledger.open_readonly(store).served_batches()


def test_values_of_the_trainer_are_shown_only_where_they_were_recorded(tmp_path):
    path = write_rl_run(tmp_path / "run", num_groups=3)
    stats = sorted((path / "token_stats").iterdir())
    stats[0].unlink()
    stats[1].write_bytes(b"damaged")
    queries = RunQueries(tmp_path)
    for id in ("0.0", "1.0", "2.0"):  # not recorded; damaged; a group that was dropped
        names = [entry["name"] for entry in queries.get_rollout("run", id)["traces"][0]["measures"]]
        assert "logprob" in names
        assert not {"entropy", "mismatch"} & set(names)
    [trainer] = {incarnation for incarnation, _, _ in read_served(path)}
    write_token_stats(path, 0, trainer + 1, [make_trace("0.0", 0, [50, 51, 52, 2], 1.0)])  # one that does not count
    assert "entropy" not in queries.get_tokens("run", "0.0", 0, [1])[0]["values"]
    write_token_stats(path, 0, trainer, [make_trace("0.0", 0, [50, 51, 52, 2], 1.0)])
    assert "entropy" in queries.get_tokens("run", "0.0", 0, [1])[0]["values"]
    queries.close()


def test_the_reward_changes_where_attempts_part(queries):
    """Attempts 0 and 1 share two tokens: attempt 2 loses at its first token, attempt 1 at its third."""
    [node] = queries.get_tokens("run", "1.1", 0, [1])
    assert node["values"]["reward_change"] == [None, 0.25, 0.0, -0.25, 0.0]
    measures = {entry["name"]: entry for entry in queries.get_rollout("run", "1.2")["traces"][0]["measures"]}
    [extreme] = measures["reward_change"]["extremes"]
    assert (extreme["node"], extreme["token"], extreme["value"]) == (1, 1, -0.5)


async def test_the_reward_changes_follow_a_group_whose_attempts_come_in(tmp_path):
    path = write_eval_run(tmp_path / "run")
    queries = RunQueries(tmp_path)
    before = queries.get_tokens("run", "task-1.0", 0, [1])[0]["values"]["reward_change"]
    with RunStore.open(path) as store:
        trace = make_trace("late", 0, [60, 2], 1.0)
        await store.add_rollout(make_record("task-1.2", "task-1", 2, "", [trace]), [trace])
    after = queries.get_tokens("run", "task-1.0", 0, [1])[0]["values"]["reward_change"]
    assert before == [None, 0.0, 0.0]
    assert after == [None, -0.125, 0.0]  # from the mean of 0.5, 0.75 and 1.0 to the mean of the first two


def test_a_dropped_rollout_says_why_it_is_not_trained(queries):
    node = queries.get_rollout("run", "3.0")["traces"][0]["nodes"][1]
    assert node["untrained"] == "dropped: filtered (zero_advantage)"
    assert queries.get_rollout("run", "1.0")["traces"][0]["nodes"][1]["untrained"] == ""


def test_a_group_shows_its_attempts_side_by_side(queries):
    group = queries.get_group("run", 1)
    assert group["group"]["state"] == "trained"
    assert group["prompt"] == "abc"
    assert group["attempts"][0]["messages"] == [
        {"agent": "", "role": "assistant", "text": "the quick brown fox", "calls": [], "is_cut": False}
    ]
    assert [(entry["id"], entry["reward"], entry["advantage"]) for entry in group["attempts"]] == [
        ("1.0", 1.0, 0.5),
        ("1.1", 0.5, 0.0),
        ("1.2", 0.0, -0.5),
    ]
    assert [entry["id"] for entry in queries.get_group("eval", None, "", "task-1")["attempts"]] == [
        "task-1.0",
        "task-1.1",
    ]


def test_a_group_shows_all_turns_of_an_attempt():
    messages = list_messages([make_branching_trace()], 40)
    assert [(entry["role"], entry["text"], entry["calls"]) for entry in messages] == [
        ("assistant", "I look at the file.", ["read_file"]),
        ("tool", "def add(a, b):\n    re", []),
        ("assistant", "", []),
    ]
    assert [entry["is_cut"] for entry in messages] == [False, True, True]


def test_a_forest_holds_shared_tokens_once(queries):
    forest = queries.get_forest("run", 1)
    # The prompt and the role token once, then 50 51 shared by two attempts.
    assert forest["flat_tokens"] == 3 * 8
    assert forest["tokens"] == 4 + 4 + 2 + 2 + 2
    assert sorted(tuple(segment["attempts"]) for segment in forest["segments"]) == [(0,), (0, 1), (0, 1, 2), (1,), (2,)]
    shared = next(segment for segment in forest["segments"] if segment["attempts"] == [0, 1])
    assert shared["values"] == [0.25, 0.25]
    assert queries.get_forest("run", 3)["segments"]  # of a group that is in no batch


def test_a_rollout_is_exported_as_markdown_and_json(queries):
    text = queries.export_rollout("eval", "task-0.0", "md")
    assert "### [4] assistant" in text
    assert "````\nHere it is:" in text  # the fence is longer than the one in the message
    assert json.loads(queries.export_rollout("run", "1.0", "json"))["traces"][0]["reward"] == 1.0


def test_an_exported_rollout_says_where_it_was_trained(queries):
    text = queries.export_rollout("run", "1.2", "md")
    for line in ("- source: `reverse`", "- task: `1`", "- group: 1, trained in step 1", "- advantage: -0.5"):
        assert line in text.splitlines()
    assert "- group: 3, dropped: filtered (`zero_advantage`)" in queries.export_rollout("run", "3.2", "md")
    assert "group:" not in queries.export_rollout("eval", "task-0.0", "md")
    data = json.loads(queries.export_rollout("run", "1.2", "json"))
    assert (data["group"]["number"], data["group"]["step"], data["advantage"]) == (1, 1, -0.5)
    assert json.loads(queries.export_rollout("eval", "task-0.0", "json"))["group"] is None


async def test_nothing_that_a_model_wrote_changes_the_markdown(tmp_path):
    trace = make_trace("0.0", 0, [50, 2], 1.0, text="`" * 300_000)
    call = ToolCall("c", "x`\n# A heading\n![](http://evil.example/)", "{}")
    trace.graph.add_node(1, Message("assistant", "", tool_calls=(call,)), [5])
    trace.agent = "a\n# b"
    with RunStore.open(tmp_path / "run") as store:
        await store.add_rollout(make_record("0.0", "0", 0, "", [trace]), [trace])
    lines = RunQueries(tmp_path).export_rollout("run", "0.0", "md").splitlines()
    assert "Call of `x # A heading ![](http://evil.example/)`:" in lines
    assert [line for line in lines if line.startswith("#")] == [
        "# Rollout `0.0`",
        "## `a # b`",
        "### [0] user",
        "### [1] assistant",
        "### [2] assistant",
    ]
    assert max(map(len, lines)) == 300_001


def test_a_run_whose_name_is_not_text_is_listed(tmp_path):
    name = os.fsdecode(b"run-\xff")
    try:
        write_rl_run(tmp_path / name, num_groups=1)
    except OSError:
        pytest.skip("the file system has only names in UTF-8")
    queries = RunQueries(tmp_path)
    [run] = queries.list_runs()
    assert msgspec.json.encode(run["name"]) == b'"run-\\\\udcff"'
    assert queries.get_run(run["name"])["state"] == "finished"


def test_a_live_run_is_asked_what_it_waits_for(tmp_path):
    path = write_rl_run(tmp_path / "run")
    with RunStore.open(path), serve_status(path, step=7):
        run = RunQueries(tmp_path).get_run("run")
    assert (run["state"], run["step"]) == ("running", 7)
    assert run["wait_list"] == msgspec.to_builtins(WAITS)
    assert run["flow"] == {"trained": 3, "dropped": 1}


def test_queries_can_be_made_from_many_threads(folder):
    queries, errors = RunQueries(folder), []

    def ask():
        try:
            for _ in range(5):
                list_ids(queries)
                queries.get_rollout("run", "1.1")
        except BaseException as error:  # noqa: BLE001 - the test must see what a thread raised
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    queries.close()
    assert errors == []


def test_show_prints_tokens_and_checks_that_trained_tokens_were_sampled(folder, capsys):
    assert main(["show", str(folder / "run"), "--tokens"]) == 0
    assert "36 trained entries in 3 batches: each is the token that was sampled" in capsys.readouterr().out
    assert main(["show", str(folder / "run"), "1.1", "--tokens"]) == 0
    assert "logprob=-0.3" in capsys.readouterr().out
