"""wiki-search: articles that agree, questions that need several, searches, own articles, and the example's agent."""

import json
from pathlib import Path
from statistics import fmean

import pytest

import ramify
from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.encyclopedia import Article, generate_articles
from ramify.env.tasksets.wiki_search import (
    ArticleIndex,
    WikiSearch,
    WikiSearchConfig,
    WikiSearchTask,
    normalize_answer,
    split_words,
)
from ramify.infer.gateway import Gateway
from ramify.model.render import load_renderer
from ramify.orchestrate.algorithms import get_trainable_nodes
from ramify.rollout import Environment, SourceConfig
from ramify.trace import Message
from tests.support.attempts import run_one, tool_call
from tests.support.scripted_agent import get_texts, make_tool_call, play

AGENT = Path(__file__).parents[3] / "examples" / "wiki_search" / "agent.py"
ARTICLES = {
    "Red Fox": "The Red Fox is an animal. It eats mice and lives in the forest, where the Red Fox is seldom seen.",
    "Oak": "The oak is a tree. In a hundred years, the oak grows as high as a church.",
    "River Otter": "An animal. It eats fish.",
}
TASK = WikiSearchTask(prompt="What does the fox eat?", answer="mice", gold_titles=("Red Fox", "Oak"), articles=ARTICLES)


async def play_task(*replies: str | Message):
    return await play(WikiSearch(), TASK, replies)


def read(title: str) -> Message:
    return make_tool_call("read", title=title)


# The encyclopedia.


def test_splits_share_no_entity_whatever_the_seeds():
    words = {
        split: {
            word
            for seed in (0, 7)
            for article in generate_articles(split, seed, 600)
            for word in article_words(article)
        }
        for split in ("train", "eval")
    }
    assert len(words["train"]) > 1000 and not words["train"] & words["eval"]


def article_words(article: Article) -> list[str]:
    """Return the made-up words of a title."""
    fixed = {"River", "Guild", "of"}
    names = [word for word in article.title.split() if word not in fixed]
    return [names[-1] if article.kind in ("person", "event") else names[0]]


def test_articles_agree_with_each_other():
    articles = generate_articles("train", 0, 2000)
    assert len({article.title for article in articles}) == 2000
    for article in articles:
        facts = article.facts
        if isinstance(mouth := facts.get("mouth"), Article):
            assert mouth.facts["river"] is article
        for role, year in (("founder", "since"), ("inventor", "invented"), ("leader", "year")):
            if isinstance(person := facts.get(role), Article):
                assert 20 <= int(facts[year]) - int(person.facts["born"]) <= 60


def test_questions_need_one_to_three_articles_and_name_only_the_first():
    taskset = WikiSearch(WikiSearchConfig(num_tasks=300))
    tasks = list(taskset.load())
    assert {len(task.gold_titles) for task in tasks} == {1, 2, 3}
    results = [taskset.index.search(task.prompt, 5) for task in tasks]
    assert fmean(task.gold_titles[0] in titles for task, titles in zip(tasks, results)) > 0.99
    later = [title in titles for task, titles in zip(tasks, results) for title in task.gold_titles[1:]]
    assert fmean(later) < 0.1
    for task in tasks:
        assert task.answer in taskset.index.articles[task.gold_titles[-1]]
        assert task.answer not in task.prompt and task.answer not in task.gold_titles


def test_a_task_of_the_easier_kind_has_ten_articles_and_is_found_only_by_a_search():
    taskset = WikiSearch(WikiSearchConfig(simple=True, num_tasks=50))
    renderer = load_renderer(Path(ramify.__file__).parent / "model" / "bundled" / "tiny")
    for task in taskset.load():
        (title,) = task.gold_titles
        assert len(task.articles) == 10 and len(title) == len(task.answer) == 4
        assert title not in task.prompt
        goods = split_words(task.prompt)[-1]
        assert ArticleIndex(task.articles).search(goods, 5) == [title]
        assert len(renderer.render([Message("system", task.system), Message("user", task.prompt)]).token_ids) < 100


# Tools and scores.


async def test_search_shows_titles_with_a_line_each_and_read_shows_the_article():
    trace = await play_task(
        make_tool_call("search", query="which animal eats fish"), read("red fox"), read("Elm"), "mice"
    )
    results, article, error = get_texts(trace, "tool")
    assert results.startswith("River Otter: It eats fish.\nRed Fox: The Red Fox is an animal.")
    assert article == ARTICLES["Red Fox"]
    assert error == "error: there is no article 'Elm'; search for one."
    assert trace.info["wiki"] == {"searches": 1, "read": ["Red Fox"]} and trace.metrics["searches"] == 1


async def test_a_search_returns_at_most_max_results():
    taskset = WikiSearch(WikiSearchConfig(max_results=1))
    trace = await play(taskset, TASK, [make_tool_call("search", query="animal"), make_tool_call("search", query="?!")])
    assert get_texts(trace, "tool") == ["River Otter: An animal.", "nothing found"]


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["mice"], 1.0),
        (["The Mice!"], 1.0),
        (["It eats mice"], 0.0),
        ([read("Red Fox"), "fish"], 0.1),
        ([read("Red Fox"), read("Oak"), "fish"], 0.2),
        ([read("Oak"), read("Red Fox")], 0.2),
        ([read("River Otter"), "fish"], 0.0),
    ],
)
async def test_the_answer_earns_one_and_reading_the_right_articles_a_little(replies, reward):
    assert (await play_task(*replies)).reward == reward


def test_answers_are_compared_without_case_punctuation_and_articles():
    assert normalize_answer(" The  River-Otter. ") == normalize_answer("river otter")
    assert normalize_answer("1,630") != normalize_answer("1630")


# Your own articles.


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(params=["directory", "jsonl"])
def corpus(request, tmp_path) -> Path:
    """The articles above, as files or as rows."""
    if request.param == "jsonl":
        return write_jsonl(tmp_path / "a.jsonl", [{"title": title, "text": text} for title, text in ARTICLES.items()])
    (tmp_path / "wiki" / "plants").mkdir(parents=True)
    for name, title in (("Red_Fox.md", "Red Fox"), ("plants/Oak.txt", "Oak"), ("River Otter.md", "River Otter")):
        (tmp_path / "wiki" / name).write_text(ARTICLES[title])
    (tmp_path / "wiki" / "image.png").write_bytes(b"\x89PNG")
    return tmp_path / "wiki"


async def test_questions_about_your_own_articles_quote_a_sentence(corpus):
    tasks = [
        task for split in ("train", "eval") for task in WikiSearch(WikiSearchConfig(path=corpus, split=split)).load()
    ]
    assert sorted(task.answer for task in tasks) == [
        "Oak",
        "Red Fox",
    ]  # other sentences are short, or without the title
    for task in tasks:
        assert "___" in task.prompt and task.answer.lower() not in task.prompt.lower()
        taskset = WikiSearch(WikiSearchConfig(path=corpus))
        assert (await play(taskset, task, taskset.gold(task))).reward == 1.0


def test_your_own_questions(corpus, tmp_path):
    rows = [{"question": "What does the otter eat?", "answer": "fish", "articles": ["River Otter"]}]
    rows += [{"question": f"Question {number}?", "answer": "yes"} for number in range(20)]
    questions = write_jsonl(tmp_path / "q.jsonl", rows)
    tasks = {
        split: list(WikiSearch(WikiSearchConfig(path=corpus, questions=questions, split=split)).load())
        for split in ("train", "eval")
    }
    assert len(tasks["train"]) + len(tasks["eval"]) == 21 and tasks["eval"]
    otter = next(task for task in [*tasks["train"], *tasks["eval"]] if task.answer == "fish")
    assert otter.gold_titles == ("River Otter",) and otter.articles == {}


def test_wrong_files_are_refused(tmp_path):
    def load(**config) -> None:
        list(WikiSearch(WikiSearchConfig(**config)).load())

    articles = write_jsonl(tmp_path / "a.jsonl", [{"title": "Oak", "text": "x"}])
    questions = write_jsonl(tmp_path / "q.jsonl", [{"question": "?", "answer": "x", "articles": ["Elm"]}])
    (tmp_path / "empty").mkdir()
    for config, message in [
        ({"questions": questions}, "questions needs path"),
        ({"path": articles, "questions": questions}, "names the article 'Elm'"),
        ({"path": tmp_path / "empty"}, "has no articles"),
        ({"path": questions}, "has no 'title'; it has question"),
        ({"path": write_jsonl(tmp_path / "b.jsonl", [{"title": "Oak", "text": "x"}] * 2)}, "two articles 'Oak'"),
    ]:
        with pytest.raises(ConfigInvalid, match=message):
            load(**config)


# The example's agent, which makes plain chat calls.


async def test_the_agent_records_its_summaries_and_does_not_train_on_them():
    source = {"taskset": {"id": "wiki-search"}, "harness": {"id": str(AGENT), "summary_chars": 60}}
    script = [tool_call("search", query="oak"), tool_call("read", title="Red Fox"), "It eats mice.", "mice"]
    async with Gateway() as gateway:
        trace = await run_one(Environment.load(SourceConfig(**source)), script, TASK, gateway=gateway)
    assert (trace.reward, trace.stop) == (1.0, "done")
    assert get_texts(trace, "tool") == ["Oak: The oak is a tree.", "It eats mice."]
    calls = [index for index, node in enumerate(trace.nodes) if node.call is not None]
    trained = [trace.nodes[index].message.text for index in get_trainable_nodes(trace)]
    assert len(calls) == 4 and len(trained) == 3 and trained[-1] == "mice" and "It eats mice." not in trained
    (summary,) = trace.info["untrained"]
    assert "offers no tools" in summary["reason"]


async def test_the_agent_ends_at_the_limit_of_turns():
    source = {"taskset": {"id": "wiki-search"}, "harness": {"id": str(AGENT)}, "max_turns": 2}
    async with Gateway() as gateway:
        env = Environment.load(SourceConfig(**source))
        trace = await run_one(env, [tool_call("search", query="oak")] * 3, TASK, gateway=gateway)
    assert (trace.reward, trace.stop) == (0.0, "max_turns")
