"""Articles and their links: a graph made from topics, or the one that SNAP publishes.

The made one is the same for everybody with the same sizes; the seed of a config draws tasks, never another world. Its
topics stand in a ring, each with a hub. An article links to mates of its topic, and a little to the topics on both
sides; hubs know the hubs next to them. So a way leads by topics that are near each other, and long ways exist.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ramify.errors import ConfigInvalid

TOPICS_FILE = Path(__file__).with_name("topics.txt")
MIN_LINKS = 3
MIN_ARTICLES_PER_TOPIC = 4  # articles in a topic, so that each has others to link to
HUB_LINK_PROB = 0.5  # how many articles of a topic link to its hub
NEIGHBOUR_LINK_PROB = 0.25  # how many link to a neighbouring topic
MAX_TOPIC_LINKS = 6  # random links inside a topic, at most


@dataclass(frozen=True, slots=True)
class ArticleGraph:
    """Titles with the titles they link to, sorted, and what the articles say."""

    links: Mapping[str, tuple[str, ...]]
    texts: Mapping[str, str]


def compute_distances(graph: ArticleGraph, source: str) -> dict[str, int]:
    """How many clicks each article that can be reached is away from `source`."""
    distance_by_title = {source: 0}
    queue = deque([source])
    while queue:
        current = queue.popleft()
        for title in graph.links[current]:
            if title not in distance_by_title:
                distance_by_title[title] = distance_by_title[current] + 1
                queue.append(title)
    return distance_by_title


def find_shortest_path(graph: ArticleGraph, source: str, target: str) -> list[str]:
    """One shortest way, both ends included; empty if there is none."""
    parents: dict[str, str] = {source: source}
    queue = deque([source])
    while queue and target not in parents:
        current = queue.popleft()
        for title in graph.links[current]:
            if title not in parents:
                parents[title] = current
                queue.append(title)
    if target not in parents:
        return []
    path = [target]
    while path[-1] != source:
        path.append(parents[path[-1]])
    return path[::-1]


def match_title(name: str, titles: tuple[str, ...]) -> str | None:
    """The title that is meant: as written, with underscores for spaces, or in other letters of case."""
    if name in titles:
        return name
    normalized = name.replace("_", " ").strip()
    if normalized in titles:
        return normalized
    return next((title for title in titles if title.casefold() == normalized.casefold()), None)


def build_graph(num_articles: int, num_topics: int, max_links: int) -> ArticleGraph:
    """The graph of these sizes, made from the bundled topics."""
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
    topic_names = {title: shelf[0] for shelf in topics for title in shelf}
    texts = {title: f"{title} is an article about {topic_name.lower()}." for title, topic_name in topic_names.items()}
    return ArticleGraph(links, texts)


def load_snap_graph(directory: Path, *, with_texts: bool) -> ArticleGraph:
    """The SNAP Wikispeedia graph: `articles.tsv`, `links.tsv`, and `plaintext_articles/` for the texts."""
    names = [row[0] for row in _read_tsv(directory / "articles.tsv", 1)]
    outgoing: dict[str, set[str]] = {_decode_title(name): set() for name in names}
    for source, target in _read_tsv(directory / "links.tsv", 2):
        if _decode_title(source) in outgoing and _decode_title(target) in outgoing and source != target:
            outgoing[_decode_title(source)].add(_decode_title(target))
    links = {title: tuple(sorted(found)) for title, found in outgoing.items()}
    folder = directory / "plaintext_articles"
    return ArticleGraph(
        links, {_decode_title(name): _read_text(folder / f"{name}.txt") for name in names} if with_texts else {}
    )


def _load_topics(num_articles: int, num_topics: int) -> list[list[str]]:
    """The articles of each topic, the topic's own first."""
    lines = TOPICS_FILE.read_text("utf-8").splitlines()
    topics = [[name, *titles.split(", ")] for name, titles in (line.split(": ") for line in lines)][:num_topics]
    max_articles = sum(map(len, topics))
    if len(topics) < num_topics or not MIN_ARTICLES_PER_TOPIC * num_topics <= num_articles <= max_articles:
        raise ConfigInvalid(
            f"wikispeedia: num_topics goes up to {len(lines)}, found {num_topics}; with {len(topics)} topics, "
            f"num_articles goes from {MIN_ARTICLES_PER_TOPIC * len(topics)} to {max_articles}, found {num_articles}"
        )
    articles_per_topic, num_larger = divmod(num_articles, num_topics)
    return [topic[: articles_per_topic + (number < num_larger)] for number, topic in enumerate(topics)]


def _draw_links(
    rng: random.Random, topic: list[str], index: int, neighbours: list[list[str]], max_links: int
) -> Iterator[str]:
    """The links of one article, those that must be first; a title may come twice."""
    yield topic[(index + 1) % len(topic)]  # a ring through the topic: everything can be reached from everywhere
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
