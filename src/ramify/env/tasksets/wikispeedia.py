"""wikispeedia: get from one article to another by following links.

The tools record the walk in `trace.info["walk"]`, so the reward, a replay and a reader of the saved trace see the same
walk.

The graph is the one published by SNAP, or generated from topics. A generated graph depends only on its sizes; the seed
of a config draws tasks. Its topics form a ring, and each topic has a hub. Articles link within their topic and
sometimes to the neighbouring topics; hubs link to the neighbouring hubs. So long paths exist.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import Field

import ramify as rf
from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.answers import build_tool_call_replies
from ramify.env.tasksets.splits import RangesConfig, draw_distinct

TOPICS_FILE = Path(__file__).with_name("topics.txt")
MIN_LINKS = 3
MIN_ARTICLES_PER_TOPIC = 4  # so that each article has MIN_LINKS others to link to
HUB_LINK_PROB = 0.5  # probability that an article links to the hub of its topic
NEIGHBOUR_LINK_PROB = 0.25  # probability that an article links to a neighbouring topic
MAX_TOPIC_LINKS = 6  # maximum number of random links within a topic


@dataclass(frozen=True, slots=True)
class ArticleGraph:
    """`links` are the sorted titles that each article links to; `texts` are the articles' texts."""

    links: Mapping[str, tuple[str, ...]]
    texts: Mapping[str, str]


def compute_distances(graph: ArticleGraph, source: str) -> dict[str, int]:
    """Return the number of clicks from `source` to each reachable article."""
    distance_by_title = {source: 0}
    for title, parent in _find_parents(graph, source).items():
        distance_by_title[title] = distance_by_title[parent] + 1
    return distance_by_title


def find_shortest_path(graph: ArticleGraph, source: str, target: str) -> list[str]:
    """Return a shortest path, including both ends; empty if there is none."""
    parents = _find_parents(graph, source)
    path = [target]
    while path[-1] in parents:
        path.append(parents[path[-1]])
    return path[::-1] if path[-1] == source else []


def _find_parents(graph: ArticleGraph, source: str) -> dict[str, str]:
    """Return the article before each reachable one on a shortest path from `source`, in the order of distances."""
    parents: dict[str, str] = {}
    queue = deque([source])
    while queue:
        current = queue.popleft()
        for title in graph.links[current]:
            if title not in parents and title != source:
                parents[title] = current
                queue.append(title)
    return parents


def match_title(name: str, titles: tuple[str, ...]) -> str | None:
    """Return the title that equals `name`, with underscores as spaces and, failing that, without regard to case."""
    if name in titles:
        return name
    normalized = name.replace("_", " ").strip()
    if normalized in titles:
        return normalized
    return next((title for title in titles if title.casefold() == normalized.casefold()), None)


def build_graph(num_articles: int, num_topics: int, max_links: int) -> ArticleGraph:
    """Generate the graph of these sizes from the bundled topics."""
    topics = _load_topics(num_articles, num_topics)
    rng = random.Random(f"articles {num_articles} {num_topics} {max_links}")
    links: dict[str, tuple[str, ...]] = {}
    for number, topic in enumerate(topics):
        neighbours = [topics[number - 1], topics[(number + 1) % num_topics]]
        for index, title in enumerate(topic):
            drawn = [
                other
                for other in dict.fromkeys(_draw_links(rng, topic, index, neighbours, max_links))
                if other != title
            ]
            unlinked = [other for other in topic if other != title and other not in drawn]
            drawn += rng.sample(unlinked, max(0, MIN_LINKS - len(drawn)))
            links[title] = tuple(sorted(drawn[:max_links]))
    texts = {title: f"{title} is an article about {topic[0].lower()}." for topic in topics for title in topic}
    return ArticleGraph(links, texts)


def load_snap_graph(directory: Path, *, with_texts: bool) -> ArticleGraph:
    """Read the SNAP Wikispeedia graph: `articles.tsv`, `links.tsv`, and `plaintext_articles/` for the texts."""
    names = [row[0] for row in _read_tsv(directory / "articles.tsv", 1)]
    outgoing: dict[str, set[str]] = {_decode_title(name): set() for name in names}
    for source, target in _read_tsv(directory / "links.tsv", 2):
        if _decode_title(source) in outgoing and _decode_title(target) in outgoing and source != target:
            outgoing[_decode_title(source)].add(_decode_title(target))
    links = {title: tuple(sorted(targets)) for title, targets in outgoing.items()}
    text_dir = directory / "plaintext_articles"
    texts = {_decode_title(name): _read_text(text_dir / f"{name}.txt") for name in names} if with_texts else {}
    return ArticleGraph(links, texts)


def _load_topics(num_articles: int, num_topics: int) -> list[list[str]]:
    """Return the articles of each topic; the first one is the hub, named like the topic."""
    lines = TOPICS_FILE.read_text("utf-8").splitlines()
    topics = [[name, *titles.split(", ")] for name, titles in (line.split(": ") for line in lines)][:num_topics]
    max_articles = sum(map(len, topics))
    if len(topics) < num_topics or not MIN_ARTICLES_PER_TOPIC * num_topics <= num_articles <= max_articles:
        raise ConfigInvalid(
            f"wikispeedia: num_topics must be at most {len(lines)}, got {num_topics}; with {len(topics)} topics, "
            f"num_articles must be {MIN_ARTICLES_PER_TOPIC * len(topics)} to {max_articles}, got {num_articles}"
        )
    articles_per_topic, num_larger = divmod(num_articles, num_topics)
    return [topic[: articles_per_topic + (number < num_larger)] for number, topic in enumerate(topics)]


def _draw_links(
    rng: random.Random, topic: list[str], index: int, neighbours: list[list[str]], max_links: int
) -> Iterator[str]:
    """Yield the links of one article, required ones first; a title may occur twice."""
    yield topic[(index + 1) % len(topic)]  # a ring through the topic, so that every article is reachable
    if index == 0:
        yield from (other[0] for other in neighbours)
        yield from rng.sample(topic[1:], min(len(topic) - 1, rng.randint(MIN_LINKS, max_links)))
        return
    if rng.random() < HUB_LINK_PROB:
        yield topic[0]
    if rng.random() < NEIGHBOUR_LINK_PROB:
        yield rng.choice(rng.choice(neighbours))
    yield from rng.sample(topic, rng.randint(MIN_LINKS, min(MAX_TOPIC_LINKS, len(topic))))


def _read_tsv(path: Path, num_columns: int) -> Iterator[list[str]]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigInvalid(f"wikispeedia: {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            row = line.split("\t")
            if len(row) < num_columns:
                raise ConfigInvalid(f"wikispeedia: {path}:{number} has {len(row)} columns, expected {num_columns}")
            yield row[:num_columns]


def _decode_title(name: str) -> str:
    return unquote(name).replace("_", " ")


def _read_text(path: Path) -> str:
    return " ".join(path.read_text("utf-8", errors="replace").split()) if path.is_file() else ""


OUT_OF_TURNS = "error: the walk has ended, all turns are used."  # a reply may hold more calls than there are turns left
SYSTEM = "Go from page to page by their links until you reach the target."


class WikispeediaConfig(RangesConfig, rf.TasksetConfig):
    """The graph, and the distance between source and target.

    `num_articles = 24, num_topics = 4, max_links = 6, min_dist = 1, max_dist = 3` suits a very small model.
    """

    num_tasks: int = Field(default=1000, ge=1)
    min_dist: int = Field(default=3, ge=1)
    """Minimum number of clicks on the shortest path."""
    max_dist: int = Field(default=8, ge=1)
    max_turns: int = Field(default=30, ge=1)
    """Maximum number of tool calls."""
    num_articles: int = Field(default=400, ge=1)
    num_topics: int = Field(default=16, ge=1)
    max_links: int = Field(default=30, ge=MIN_LINKS, le=30)
    """Maximum number of links on a page."""
    text_chars: int = Field(default=0, ge=0)
    """Number of characters of an article's text that a page shows."""
    path: Path | None = None
    """A directory with the SNAP Wikispeedia files, used instead of a generated graph; the sizes do not apply to it."""
    seed: int = 0


class WalkTask(rf.Task):
    """The ends of a path; `shortest` is the minimum number of clicks."""

    source: str
    target: str
    shortest: int


class Wikispeedia(rf.Taskset):
    """Follow links from article to article until the target is reached."""

    config: WikispeediaConfig
    task_type = WalkTask

    @cached_property
    def graph(self) -> ArticleGraph:
        """The articles and links of the configuration."""
        config = self.config
        if config.path is not None:
            return load_snap_graph(config.path, with_texts=config.text_chars > 0)
        return build_graph(config.num_articles, config.num_topics, config.max_links)

    def load(self) -> Iterator[WalkTask]:
        """Draw `num_tasks` distinct pairs of articles of the split."""
        too_few_message = (
            "wikispeedia: num_tasks is {count}, but only {found} pairs at distances "
            f"{self.config.min_dist} to {self.config.max_dist} were found; widen them or take a larger graph"
        )
        for source, target, shortest in draw_distinct(
            self._draw_pairs(),
            self.config.split,
            self.config.num_tasks,
            lambda pair: f"{pair[0]} -> {pair[1]}" if pair[1] else "",
            too_few_message,
        ):
            prompt = f"Target: {target}\n{self.render_page(source)}"
            yield WalkTask(prompt=prompt, system=SYSTEM, source=source, target=target, shortest=shortest)

    def setup(self, task: WalkTask, trace: rf.Trace) -> None:
        """Start the walk at the task's source."""
        trace.info["walk"] = {"path": [task.source], "clicks": 0, "turns": 0}

    @rf.tool
    def click_link(self, article: str, task: WalkTask, trace: rf.Trace) -> str:
        """Follow a link."""
        walk = trace.info["walk"]
        if (end := self._count_turn(task, walk)) is not None:
            return end
        current = walk["path"][-1]
        links = self.graph.links[current]
        title = match_title(article, links)
        if title is None:
            return "\n".join([f"error: {current} has no link {article!r}. Links:", *links])
        walk["path"].append(title)
        walk["clicks"] += 1
        return f"You have reached {title}." if title == task.target else self.render_page(title)

    @rf.tool
    def go_back(self, task: WalkTask, trace: rf.Trace) -> str:
        """Return to the page before."""
        path = trace.info["walk"]["path"]
        if (end := self._count_turn(task, trace.info["walk"])) is not None:
            return end
        if len(path) == 1:
            return f"error: {path[0]} is the first page, there is none before it."
        path.pop()
        return self.render_page(path[-1])

    @rf.stop
    def target_reached(self, task: WalkTask, trace: rf.Trace) -> bool:
        """Stop at the target."""
        return trace.info["walk"]["path"][-1] == task.target

    @rf.stop
    def out_of_turns(self, trace: rf.Trace) -> bool:
        """Stop after `max_turns` tool calls."""
        return trace.info["walk"]["turns"] >= self.config.max_turns

    @rf.reward
    def reached(self, task: WalkTask, trace: rf.Trace) -> float:
        """1 at the target, else 0."""
        return float(self.target_reached(task, trace))

    @rf.metric
    def clicks(self, trace: rf.Trace) -> float:
        """The number of links followed."""
        return float(trace.info["walk"]["clicks"])

    @rf.metric
    def shortest(self, task: WalkTask) -> float:
        """The number of clicks on the shortest path."""
        return float(task.shortest)

    @rf.metric
    def efficiency(self, task: WalkTask, trace: rf.Trace) -> float:
        """shortest / clicks where the target was reached, else 0."""
        return task.shortest / trace.info["walk"]["clicks"] if self.target_reached(task, trace) else 0.0

    def gold(self, task: WalkTask) -> list[rf.Message]:
        """Return the clicks of a shortest path."""
        path = find_shortest_path(self.graph, task.source, task.target)
        return build_tool_call_replies(("click_link", {"article": title}) for title in path[1:])

    def render_page(self, title: str) -> str:
        """Return an article as the agent sees it."""
        text = self.graph.texts.get(title, "")[: self.config.text_chars]
        return "\n".join([title, *([text] if text else []), "Links:", *self.graph.links[title]])

    def _count_turn(self, task: WalkTask, walk: dict[str, Any]) -> str | None:
        """Count one tool call; return what the tool answers if the walk has ended, else None."""
        walk["turns"] += 1
        if walk["path"][-1] == task.target:
            return f"You have reached {task.target}."
        return OUT_OF_TURNS if walk["turns"] > self.config.max_turns else None

    def _draw_pairs(self) -> Iterator[tuple[str, str, int]]:
        """Yield (source, target, distance) without end; the target is empty if no article is at an allowed distance."""
        rng = random.Random(f"wikispeedia {self.config.split} {self.config.seed}")
        titles = sorted(self.graph.links)
        targets_by_source: dict[str, list[tuple[str, int]]] = {}
        while True:
            source = rng.choice(titles)
            if source not in targets_by_source:
                targets_by_source[source] = sorted(
                    (title, distance)
                    for title, distance in compute_distances(self.graph, source).items()
                    if self.config.min_dist <= distance <= self.config.max_dist
                )
            target, distance = rng.choice(targets_by_source[source]) if targets_by_source[source] else ("", 0)
            yield source, target, distance
