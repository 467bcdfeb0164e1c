"""Articles and their links: a graph generated from topics, or the one published by SNAP.

A generated graph depends only on its sizes; the seed of a config draws tasks, not another graph. Its topics form a
ring, and each topic has a hub. Articles link within their topic and sometimes to the neighbouring topics; hubs link to
the neighbouring hubs. So paths lead through neighbouring topics, and long paths exist.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ramify.core.errors import ConfigInvalid

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
