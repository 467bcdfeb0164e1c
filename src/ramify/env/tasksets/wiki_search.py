"""wiki-search: answer questions by searching an encyclopedia and reading its articles.

The encyclopedia is generated, or your own. Searches rank articles by BM25. The titles that the agent has read are in
`trace.info["wiki"]`, so the reward, a replay and a reader of the saved trace see the same.
"""

import random
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from pydantic import Field

import ramify as rf
from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets import encyclopedia
from ramify.env.tasksets.answers import build_tool_call_replies
from ramify.env.tasksets.encyclopedia import Question
from ramify.env.tasksets.splits import RangesConfig, Split, draw_distinct
from ramify.env.tasksets.wikispeedia import match_title

SYSTEM = "Answer the question with the encyclopedia: search it, read articles, then reply with the answer alone."
SIMPLE_SYSTEM = "Search, read, answer."
QUOTE_QUESTION = "Which article has this sentence, with its title in place of ___?\n"
ALL_READ_REWARD, SOME_READ_REWARD = 0.2, 0.1
LINE_CHARS = 200  # of an article in the results of a search
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
MIN_QUOTE_CHARS = 30  # of a sentence that a question quotes
TEXT_SUFFIXES = (".md", ".txt")


class WikiSearchConfig(RangesConfig, rf.TasksetConfig):
    """The encyclopedia, and how many articles a question needs."""

    num_tasks: int = Field(default=1000, ge=1)
    num_articles: int = Field(default=2000, ge=60)
    min_hops: int = Field(default=1, ge=1)
    """Minimum number of articles that a question needs."""
    max_hops: int = Field(default=3, ge=1, le=3)
    max_results: int = Field(default=5, ge=1)
    """Number of articles that a search returns."""
    max_chars: int = Field(default=8000, ge=1)
    """Number of characters of an article that are shown."""
    simple: bool = False
    """An easier kind for very small models: each task has ten articles of its own, with short names, and needs one."""
    path: Path | None = None
    """Your own articles instead of generated ones: a directory of .md and .txt files, whose names are the titles, or a
    jsonl file of rows with `title` and `text`."""
    questions: Path | None = None
    """A jsonl file of rows with `question`, `answer` and perhaps `articles`, the titles that are needed. Without it,
    questions about your own articles quote a sentence and ask for the title."""
    seed: int = 0


class WikiSearchTask(rf.Task):
    """A question. `gold_titles` are the articles that it needs; `articles` are the task's own ones, text by title."""

    gold_titles: tuple[str, ...] = ()
    articles: dict[str, str] = {}


class ArticleIndex:
    """Articles by title, and their ranking by BM25."""

    def __init__(self, articles: Mapping[str, str]) -> None:
        try:
            import bm25s  # here, because it takes a tenth of a second, and most processes only read the config
        except ImportError as error:
            raise ConfigInvalid("wiki-search: the package bm25s is missing; run: pip install bm25s") from error
        self.articles = articles
        self.titles = tuple(articles)
        self._ranking = bm25s.BM25()
        self._ranking.index([split_words(f"{title} {text}") for title, text in articles.items()], show_progress=False)

    def search(self, query: str, max_results: int) -> list[str]:
        """Return the titles with a word of the query, best first; equally good ones in the order of the articles."""
        if not (words := split_words(query)):
            return []
        scores: list[float] = self._ranking.get_scores(words).tolist()
        ranks = sorted((-score, number) for number, score in enumerate(scores) if score > 0)
        return [self.titles[number] for _, number in ranks[:max_results]]


class WikiSearch(rf.Taskset):
    """Answer questions by searching and reading articles."""

    config: WikiSearchConfig
    task_type = WikiSearchTask

    @cached_property
    def generated_articles(self) -> list[encyclopedia.Article]:
        """The generated encyclopedia."""
        return encyclopedia.generate_articles(self.config.split, self.config.seed, self.config.num_articles)

    @cached_property
    def index(self) -> ArticleIndex:
        """The articles that all tasks share."""
        if self.config.path is not None:
            return ArticleIndex(load_articles(self.config.path))
        return ArticleIndex({article.title: article.text for article in self.generated_articles})

    def load(self) -> Iterator[WikiSearchTask]:
        """Yield `num_tasks` distinct questions of the split."""
        if self.config.questions is not None and self.config.path is None:
            raise ConfigInvalid("wiki-search: questions needs path, the articles that the questions are about")
        too_few_message = (
            "wiki-search: num_tasks is {count}, but only {found} questions were found; take fewer, or more articles"
        )
        return draw_distinct(
            self._draw_tasks(), self.config.split, self.config.num_tasks, describe_task, too_few_message
        )

    def setup(self, trace: rf.Trace) -> None:
        """Start without anything read."""
        trace.info["wiki"] = {"searches": 0, "read": []}

    @rf.tool
    def search(self, query: str, task: WikiSearchTask, trace: rf.Trace) -> str:
        """Find articles."""
        trace.info["wiki"]["searches"] += 1
        index = self._get_index(task)
        titles = index.search(query, self.config.max_results)
        return "\n".join(format_result(title, index.articles[title], query) for title in titles) or "nothing found"

    @rf.tool
    def read(self, title: str, task: WikiSearchTask, trace: rf.Trace) -> str:
        """Read an article."""
        index = self._get_index(task)
        matched_title = match_title(title, index.titles)
        if matched_title is None:
            return f"error: there is no article {title!r}; search for one."
        if matched_title not in trace.info["wiki"]["read"]:
            trace.info["wiki"]["read"].append(matched_title)
        return index.articles[matched_title][: self.config.max_chars]

    @rf.reward
    def answered(self, task: WikiSearchTask, trace: rf.Trace) -> float:
        """1 for the answer, else 0.2 if all needed articles were read, and 0.1 if one was."""
        if self.exact(task, trace):
            return 1.0
        num_read = sum(title in trace.info["wiki"]["read"] for title in task.gold_titles)
        return 0.0 if not num_read else ALL_READ_REWARD if num_read == len(task.gold_titles) else SOME_READ_REWARD

    @rf.metric
    def exact(self, task: WikiSearchTask, trace: rf.Trace) -> float:
        """1 if the last reply is the answer, without regard to case, punctuation and articles, else 0."""
        return float(normalize_answer(trace.last_reply) == normalize_answer(str(task.answer)))

    @rf.metric
    def searches(self, trace: rf.Trace) -> float:
        """The number of searches."""
        return float(trace.info["wiki"]["searches"])

    def gold(self, task: WikiSearchTask) -> list[str | rf.Message]:
        """Return a search and a read for each needed article, and the answer."""
        tools = {"search": "query", "read": "title"}
        calls = [(tool, {name: title}) for title in task.gold_titles for tool, name in tools.items()]
        return [*build_tool_call_replies(calls), str(task.answer)]

    def _get_index(self, task: WikiSearchTask) -> ArticleIndex:
        return ArticleIndex(task.articles) if task.articles else self.index

    def _draw_tasks(self) -> Iterator[WikiSearchTask]:
        config = self.config
        rng = random.Random(f"wiki-search {config.split} {config.seed}")
        if config.questions is not None:
            return map(build_task, load_questions(config.questions, self.index))
        if config.path is not None:
            return map(build_task, draw_quotes(self.index.articles, rng))
        if config.simple:
            return draw_simple_tasks(rng, config.split)
        return map(
            build_task,
            encyclopedia.draw_questions(self.generated_articles, rng, config.min_hops, config.max_hops),
        )


def build_task(question: Question) -> WikiSearchTask:
    """Return the task of a question about the articles that all tasks share."""
    return WikiSearchTask(prompt=question.text, system=SYSTEM, answer=question.answer, gold_titles=question.articles)


def draw_simple_tasks(rng: random.Random, split: Split) -> Iterator[WikiSearchTask]:
    """Draw tasks of the easier kind without end."""
    while True:
        villages = encyclopedia.draw_villages(rng, split)
        question = rng.choice(villages).question
        yield WikiSearchTask(
            prompt=question.text,
            system=SIMPLE_SYSTEM,
            answer=question.answer,
            gold_titles=question.articles,
            articles={village.title: village.text for village in villages},
        )


def describe_task(task: WikiSearchTask) -> str:
    """Return the text by which tasks are told apart."""
    return "\n".join([str(task.prompt), *task.articles])


def split_words(text: str) -> list[str]:
    """Return the words of a text as they are searched."""
    return re.findall(r"\w+", text.lower())


def format_result(title: str, text: str, query: str) -> str:
    """Return an article as one line: its title and the first sentence with the most words of the query."""
    words = set(split_words(query))
    sentence = max(SENTENCE_END.split(text.strip()), key=lambda sentence: len(words & set(split_words(sentence))))
    return f"{title}: {' '.join(sentence.split())[:LINE_CHARS]}"


def normalize_answer(text: str) -> str:
    """Return an answer in lower case, without punctuation and articles."""
    return " ".join(word for word in split_words(text) if word not in ("a", "an", "the"))


# Your own articles and questions.


def load_articles(path: Path) -> dict[str, str]:
    """Read articles by title from a directory of text files or a jsonl file."""
    if not path.exists():
        raise ConfigInvalid(
            f"taskset.path: {path} does not exist; expected a directory of {' or '.join(TEXT_SUFFIXES)} files, or a "
            "jsonl file with the columns title and text; without path, the articles are generated"
        )
    pairs = _read_directory(path) if path.is_dir() else _read_columns(path, "title", "text")
    articles: dict[str, str] = {}
    for title, text in pairs:
        if title in articles:
            raise ConfigInvalid(f"wiki-search: {path} has two articles {title!r}; titles must be unique")
        articles[title] = text
    if not articles:
        raise ConfigInvalid(
            f"wiki-search: {path} has no articles: expected files {' or '.join(TEXT_SUFFIXES)}, or rows"
        )
    return articles


def load_questions(path: Path, index: ArticleIndex) -> Iterator[Question]:
    """Read questions about these articles from a jsonl file."""
    for row in rf.read_rows(str(path)):
        titles = row.get("articles") or ()
        if unknown := [title for title in titles if title not in index.articles]:
            raise ConfigInvalid(f"wiki-search: {path} names the article {unknown[0]!r}, which does not exist")
        question, answer = _get_columns(row, path, "question", "answer")
        yield Question(question, answer, tuple(titles))


def draw_quotes(articles: Mapping[str, str], rng: random.Random) -> Iterator[Question]:
    """Draw questions that quote a sentence with the title of its article and ask for that title."""
    pairs = [(title, sentence) for title, text in articles.items() for sentence in SENTENCE_END.split(text)]
    for title, sentence in rng.sample(pairs, len(pairs)):
        quote = re.sub(re.escape(title), "___", " ".join(sentence.split()), flags=re.IGNORECASE)
        if "___" in quote and len(quote) >= MIN_QUOTE_CHARS:
            yield Question(f"{QUOTE_QUESTION}{quote}", title, (title,))


def _read_directory(directory: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(directory.rglob("*")):
        if file.suffix in TEXT_SUFFIXES:
            yield file.stem.replace("_", " "), file.read_text("utf-8", errors="replace")


def _read_columns(path: Path, *columns: str) -> Iterator[tuple[str, ...]]:
    return (_get_columns(row, path, *columns) for row in rf.read_rows(str(path)))


def _get_columns(row: dict[str, object], path: Path, *columns: str) -> tuple[str, ...]:
    if missing := [name for name in columns if not row.get(name)]:
        raise ConfigInvalid(f"wiki-search: a row of {path} has no {missing[0]!r}; it has {', '.join(row)}")
    return tuple(str(row[name]) for name in columns)
