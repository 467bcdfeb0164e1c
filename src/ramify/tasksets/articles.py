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

TOPICS = Path(__file__).with_name("topics.txt")
MIN_LINKS = 3
LEAST = 4  # articles in a topic, so that each has others to link to
HUB = 0.5  # how many articles of a topic link to its hub
ASIDE = 0.25  # how many link to a neighbouring topic
MATES = 6  # random links inside a topic, at most


@dataclass(frozen=True, slots=True)
class Graph:
    """Titles with the titles they link to, sorted, and what the articles say."""

    links: Mapping[str, tuple[str, ...]]
    texts: Mapping[str, str]


def distances(graph: Graph, source: str) -> dict[str, int]:
    """How many clicks each article that can be reached is away from `source`."""
    found = {source: 0}
    waiting = deque([source])
    while waiting:
        here = waiting.popleft()
        for title in graph.links[here]:
            if title not in found:
                found[title] = found[here] + 1
                waiting.append(title)
    return found


def shortest_path(graph: Graph, source: str, target: str) -> list[str]:
    """One shortest way, both ends included; empty if there is none."""
    parents: dict[str, str] = {source: source}
    waiting = deque([source])
    while waiting and target not in parents:
        here = waiting.popleft()
        for title in graph.links[here]:
            if title not in parents:
                parents[title] = here
                waiting.append(title)
    if target not in parents:
        return []
    way = [target]
    while way[-1] != source:
        way.append(parents[way[-1]])
    return way[::-1]


def find(name: str, titles: tuple[str, ...]) -> str | None:
    """The title that is meant: as written, with underscores for spaces, or in other letters of case."""
    if name in titles:
        return name
    plain = name.replace("_", " ").strip()
    if plain in titles:
        return plain
    return next((title for title in titles if title.casefold() == plain.casefold()), None)


def made(num_articles: int, num_topics: int, max_links: int) -> Graph:
    """The graph of these sizes, made from the bundled topics."""
    shelves = _shelves(num_articles, num_topics)
    rng = random.Random(f"articles {num_articles} {num_topics} {max_links}")
    links: dict[str, tuple[str, ...]] = {}
    for number, shelf in enumerate(shelves):
        beside = [shelves[number - 1], shelves[(number + 1) % num_topics]]
        for at, title in enumerate(shelf):
            drawn = [other for other in dict.fromkeys(_drawn(rng, shelf, at, beside, max_links)) if other != title]
            spare = [other for other in shelf if other != title and other not in drawn]
            drawn += rng.sample(spare, max(0, MIN_LINKS - len(drawn)))
            links[title] = tuple(sorted(drawn[:max_links]))
    topics = {title: shelf[0] for shelf in shelves for title in shelf}
    texts = {title: f"{title} is an article about {topic.lower()}." for title, topic in topics.items()}
    return Graph(links, texts)


def read(directory: Path, *, texts: bool) -> Graph:
    """The SNAP Wikispeedia graph: `articles.tsv`, `links.tsv`, and `plaintext_articles/` for the texts."""
    names = [row[0] for row in _rows(directory / "articles.tsv", 1)]
    outgoing: dict[str, set[str]] = {_title(name): set() for name in names}
    for source, target in _rows(directory / "links.tsv", 2):
        if _title(source) in outgoing and _title(target) in outgoing and source != target:
            outgoing[_title(source)].add(_title(target))
    links = {title: tuple(sorted(found)) for title, found in outgoing.items()}
    folder = directory / "plaintext_articles"
    return Graph(links, {_title(name): _plain_text(folder / f"{name}.txt") for name in names} if texts else {})


def _shelves(num_articles: int, num_topics: int) -> list[list[str]]:
    """The articles of each topic, the topic's own first."""
    lines = TOPICS.read_text("utf-8").splitlines()
    topics = [[name, *titles.split(", ")] for name, titles in (line.split(": ") for line in lines)][:num_topics]
    most = sum(map(len, topics))
    if len(topics) < num_topics or not LEAST * num_topics <= num_articles <= most:
        raise ConfigInvalid(
            f"wikispeedia: num_topics goes up to {len(lines)}, found {num_topics}; with {len(topics)} topics, "
            f"num_articles goes from {LEAST * len(topics)} to {most}, found {num_articles}"
        )
    each, over = divmod(num_articles, num_topics)
    return [topic[: each + (number < over)] for number, topic in enumerate(topics)]


def _drawn(rng: random.Random, shelf: list[str], at: int, beside: list[list[str]], max_links: int) -> Iterator[str]:
    """The links of one article, those that must be first; a title may come twice."""
    yield shelf[(at + 1) % len(shelf)]  # a ring through the topic: everything can be reached from everywhere
    if at == 0:
        yield from (other[0] for other in beside)
        yield from rng.sample(shelf[1:], min(len(shelf) - 1, rng.randint(MIN_LINKS, max_links)))
        return
    if rng.random() < HUB:
        yield shelf[0]
    if rng.random() < ASIDE:
        yield rng.choice(rng.choice(beside))
    yield from rng.sample(shelf, rng.randint(MIN_LINKS, min(MATES, len(shelf))))


def _rows(file: Path, columns: int) -> Iterator[list[str]]:
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigInvalid(f"wikispeedia: {file} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            row = line.split("\t")
            if len(row) < columns:
                raise ConfigInvalid(f"wikispeedia: {file}:{number} has {len(row)} columns, expected {columns}")
            yield row[:columns]


def _title(name: str) -> str:
    return unquote(name).replace("_", " ")


def _plain_text(file: Path) -> str:
    return " ".join(file.read_text("utf-8", errors="replace").split()) if file.is_file() else ""
