"""wikispeedia: connected graphs, tools that follow links only, correct distances."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ramify
from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.wikispeedia import (
    ArticleGraph,
    Wikispeedia,
    WikispeediaConfig,
    build_graph,
    compute_distances,
    find_shortest_path,
    load_snap_graph,
    match_title,
)
from ramify.model.render import load_renderer
from ramify.trace import Message
from tests.support.scripted_agent import get_texts, make_tool_call, play

SMALL = {"num_articles": 24, "num_topics": 4, "max_links": 6, "min_dist": 1, "max_dist": 3, "num_tasks": 40}
TITLES = "abcdefgh"
GRAPHS = st.fixed_dictionaries({title: st.sets(st.sampled_from(TITLES), max_size=3) for title in TITLES})

LINKS = """\
# a comment, as in the published file

A_Tale\tBread
Bread\tCaf%C3%A9
Caf%C3%A9\tDoor
Door\tA_Tale
Bread\tA_Tale
"""


def brute_force_distances(links: dict[str, set[str]], source: str) -> dict[str, int]:
    """Return all distances by relaxing every edge until nothing changes."""
    distances = {source: 0}
    for _ in links:
        for title in [title for title in links if title in distances]:
            for target in links[title]:
                distances[target] = min(distances.get(target, 99), distances[title] + 1)
    return distances


@given(links=GRAPHS)
def test_distances_and_paths_match_brute_force(links):
    graph = ArticleGraph({title: tuple(sorted(targets)) for title, targets in links.items()}, {})
    expected = brute_force_distances(links, "a")
    assert compute_distances(graph, "a") == expected
    for target in TITLES:
        path = find_shortest_path(graph, "a", target)
        assert len(path) - 1 == expected.get(target, -1)
        assert all(following in links[title] for title, following in pairwise(path))


@given(topics=st.integers(1, 16), size=st.integers(4, 26), max_links=st.integers(3, 30))
def test_generated_graphs_are_connected_within_the_link_limits(topics, size, max_links):
    graph = build_graph(topics * size, topics, max_links)
    assert len(graph.links) == topics * size
    for title, links in graph.links.items():
        assert 3 <= len(links) <= max_links
        assert list(links) == sorted(set(links) - {title})
    assert all(len(compute_distances(graph, title)) == len(graph.links) for title in list(graph.links)[:5])


def test_default_graph_has_long_paths():
    taskset = Wikispeedia()
    tasks = list(taskset.load())
    assert {task.shortest for task in tasks} == set(range(3, 9))
    for task in tasks[:50]:
        assert compute_distances(taskset.graph, task.source)[task.target] == task.shortest


@pytest.mark.parametrize("sizes", [(10, 4), (500, 16), (40, 17)])
def test_sizes_beyond_the_topics_are_refused(sizes):
    with pytest.raises(ConfigInvalid, match=f"got {sizes[0]}"):
        build_graph(*sizes, 30)


def test_too_many_pairs_is_an_error():
    with pytest.raises(ConfigInvalid, match="at distances 1 to 3"):
        list(Wikispeedia(WikispeediaConfig(**SMALL | {"num_tasks": 2000})).load())


@pytest.mark.parametrize("name", ["Bronze Age", "Bronze_Age", "bronze age", "BRONZE_AGE", " Bronze Age"])
def test_match_title_ignores_underscores_and_case(name):
    assert match_title(name, ("Bread", "Bronze Age")) == "Bronze Age"


def test_exact_title_wins_over_other_case():
    assert match_title("turkey", ("Turkey", "turkey")) == "turkey"
    assert match_title("Bronze", ("Bronze Age",)) is None


@pytest.fixture
def snap(tmp_path: Path) -> Wikispeedia:
    (tmp_path / "articles.tsv").write_text("# names\n\nA_Tale\nBread\nCaf%C3%A9\nDoor\n")
    (tmp_path / "links.tsv").write_text(LINKS)
    return Wikispeedia(WikispeediaConfig(path=tmp_path, num_tasks=1, min_dist=3, max_dist=3))


@pytest.fixture
def tale(snap):
    task = next(task for task in load_all_tasks(snap) if task.source == "A Tale")
    assert (task.target, task.shortest) == ("Door", 3)
    return task


def load_all_tasks(taskset):
    """Yield the tasks of both splits under many seeds."""
    for split in ("train", "eval"):
        for seed in range(20):
            config = taskset.config.model_copy(update={"split": split, "seed": seed})
            yield from Wikispeedia(config).load()


def test_snap_files_are_read_with_escapes_and_comments(snap):
    assert snap.graph.links == {
        "A Tale": ("Bread",),
        "Bread": ("A Tale", "Café"),
        "Café": ("Door",),
        "Door": ("A Tale",),
    }


def test_page_shows_title_sorted_links_and_optional_text(snap, tmp_path):
    assert snap.render_page("Bread") == "Bread\nLinks:\nA Tale\nCafé"
    (tmp_path / "plaintext_articles").mkdir()
    (tmp_path / "plaintext_articles" / "Bread.txt").write_text("Bread is\n baked.")
    assert load_snap_graph(tmp_path, with_texts=True).texts["Bread"] == "Bread is baked."
    config = snap.config.model_copy(update={"text_chars": 8})
    assert Wikispeedia(config).render_page("Bread") == "Bread\nBread is\nLinks:\nA Tale\nCafé"


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigInvalid, match=r"articles\.tsv"):
        load_snap_graph(tmp_path, with_texts=False)


async def test_shortest_path_has_efficiency_one(snap, tale):
    trace = await play(snap, tale, [make_tool_call("click_link", article=title) for title in ("bread", "Café", "Door")])
    assert trace.reward == 1.0
    assert trace.metrics == {"clicks": 3.0, "shortest": 3.0, "efficiency": 1.0}
    assert get_texts(trace, "tool")[-1] == "You have reached Door."


async def test_unknown_link_lists_the_links_and_does_not_move(snap, tale):
    trace = await play(
        snap, tale, [make_tool_call("click_link", article="Door"), make_tool_call("click_link", article="Bread")]
    )
    assert get_texts(trace, "tool")[0] == "error: A Tale has no link 'Door'. Links:\nBread"
    assert trace.info["walk"] == {"path": ["A Tale", "Bread"], "clicks": 1, "turns": 2}
    assert (trace.reward, trace.metrics["efficiency"]) == (0.0, 0.0)


async def test_detours_cost_clicks(snap, tale):
    way = [("click_link", "Bread"), ("go_back", None), ("go_back", None), ("click_link", "Bread")]
    way += [("click_link", "A Tale"), ("click_link", "Bread"), ("click_link", "Café"), ("click_link", "Door")]
    replies = [make_tool_call(name, **({"article": title} if title else {})) for name, title in way]
    trace = await play(snap, tale, replies)
    assert "is the first page" in get_texts(trace, "tool")[2]
    assert trace.metrics == {"clicks": 6.0, "shortest": 3.0, "efficiency": 0.5}


async def test_reaching_the_target_ends_the_walk_within_a_reply(snap, tale):
    three = [make_tool_call("click_link", article=title).tool_calls[0] for title in ("Bread", "Café", "Door", "A Tale")]
    back = make_tool_call("go_back").tool_calls[0]
    trace = await play(snap, tale, [Message("assistant", tool_calls=(*three, back)), "never sent"])
    assert (trace.reward, trace.metrics["clicks"]) == (1.0, 3.0)
    assert len(get_texts(trace, "assistant")) == 1


async def test_walk_ends_after_max_turns(snap, tale):
    snap.config = snap.config.model_copy(update={"max_turns": 2})
    three = [make_tool_call("click_link", article=title) for title in ("Bread", "Café", "Door")]
    at_once = Message("assistant", tool_calls=tuple(call for reply in three for call in reply.tool_calls))
    for replies in (three, [at_once]):
        trace = await play(snap, tale, replies)
        assert (trace.reward, trace.metrics["clicks"]) == (0.0, 2.0)


@pytest.mark.parametrize(
    "reply", ["I click Bread.", make_tool_call("click", article="Bread"), make_tool_call("click_link", page="x")]
)
async def test_malformed_reply_does_not_move(snap, tale, reply):
    trace = await play(snap, tale, [reply])
    assert trace.info["walk"]["path"] == ["A Tale"]
    assert trace.reward == 0.0


async def test_gold_walk_in_the_small_graph_fits_tiny():
    renderer = load_renderer(Path(ramify.__file__).parent / "model" / "bundled" / "tiny")
    taskset = Wikispeedia(WikispeediaConfig(**SMALL))
    pages = [taskset.render_page(title) for title in taskset.graph.links]
    assert max(map(len, pages)) < 100
    for task in list(taskset.load())[:5]:
        trace = await play(taskset, task, taskset.gold(task))
        messages = [Message("system", task.system), *(node.message for node in trace.nodes)]
        assert len(renderer.render(messages).token_ids) < 1024
