"""A made-up encyclopedia whose articles agree with each other, and questions that follow its facts.

An article is about a town, a river, a person, a guild, an invention or an event. Each of its facts has one value:
another article, a year, a number or a word. A question starts at an article that it names and follows one to three
facts. It describes them in other words than the articles do, so a search with its words finds only the first article.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ramify.env.tasksets.splits import Split, assign_split, load_names

WORDS_FILE = Path(__file__).with_suffix(".txt")
SHORT_ONSETS, SHORT_VOWELS = "bdfgklmnprstvz", "aeiou"  # of names with four letters


@cache
def load_words() -> dict[str, list[str]]:
    """Return the bundled lists of words and syllables."""
    lines = WORDS_FILE.read_text("utf-8").splitlines()
    return {name: words.split() for name, _, words in (line.partition(":") for line in lines)}


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact.

    - `sentence`: the fact in its article; `{}` is the value.
    - `question`: asks for the value; `{}` is the article, by its title or by a phrase.
    - `phrase`: names the value in a longer question. Empty: the value is not an article.
    """

    sentence: str
    question: str
    phrase: str = ""


RELATIONS = {
    "river": Relation("It lies on {}.", "Which water runs past {}?", "the water that runs past {}"),
    "bridge": Relation(
        "Its bridge was built by {}.", "Who put up the crossing at {}?", "the company that put up the crossing at {}"
    ),
    "founded": Relation("It was founded in {}.", "When did {} come into being?"),
    "goods": Relation("It is known for its {}.", "What do traders fetch from {}?"),
    "length": Relation("It is {} miles long.", "How many miles does {} run?"),
    "mouth": Relation("It meets the sea at {}.", "Which port does {} end in?", "the port that {} ends in"),
    "birthplace": Relation("The place of birth is {}.", "Where does {} come from?", "the home of {}"),
    "born": Relation("The year of birth is {}.", "In which year did {} see the light of day?"),
    "trade": Relation("The trade is {}.", "What did {} do for a living?"),
    "founder": Relation("It was founded by {}.", "Who started {}?", "the one who started {}"),
    "hall": Relation("Its hall stands in {}.", "Where does {} meet?", "the place where {} meets"),
    "since": Relation("It has existed since {}.", "How far back does {} go, as a year?"),
    "inventor": Relation("It was invented by {}.", "Whose idea was {}?", "the mind behind {}"),
    "invented": Relation("The first one was made in {}.", "What year brought {}?"),
    "maker": Relation("It is sold by {}.", "Which company offers {}?", "the company that offers {}"),
    "place": Relation("It took place in {}.", "Where did people see {}?", "the scene of {}"),
    "leader": Relation("It was led by {}.", "Who was in charge of {}?", "the head of {}"),
    "year": Relation("It happened in {}.", "What is the date of {}, as a year?"),
}


@dataclass(slots=True, eq=False)
class Article:
    """An entity: its title, how a sentence mentions it, its kind, and the values of its facts by relation."""

    title: str
    mention: str
    kind: str
    facts: dict[str, "Article | str"] = field(default_factory=dict[str, "Article | str"])

    @property
    def text(self) -> str:
        """The article in full; its first sentence says what it is about."""
        sentences = [RELATIONS[name].sentence.format(_mention(value)) for name, value in self.facts.items()]
        article = "an" if self.kind[0] in "aeiou" else "a"
        return " ".join([f"{self.mention[0].upper()}{self.mention[1:]} is {article} {self.kind}.", *sentences])


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its answer and the articles that it needs, in the order in which they are found."""

    text: str
    answer: str
    articles: tuple[str, ...]


def generate_articles(split: Split, seed: int, num_articles: int) -> list[Article]:
    """Generate an encyclopedia. The splits have no name in common, whatever the seeds."""
    rng = random.Random(f"encyclopedia {split} {seed}")
    names = draw_names(rng, split)
    words, (first_names, _) = load_words(), load_names()
    makers: dict[str, Callable[[str], tuple[str, str]]] = {
        "town": lambda name: (name, name),
        "river": lambda name: (f"River {name}", f"the River {name}"),
        "person": lambda name: (title := f"{rng.choice(first_names)} {name}", title),
        "guild": lambda name: (f"{name} Guild", f"the {name} Guild"),
        "invention": lambda name: (title := f"{name} {rng.choice(words['tools'])}", f"the {title}"),
        "event": lambda name: (title := f"{rng.choice(words['occasions'])} of {name}", f"the {title}"),
    }
    kinds = list(makers)
    by_kind: dict[str, list[Article]] = {kind: [] for kind in kinds}
    for number in range(num_articles):
        kind = kinds[number % len(kinds)]
        by_kind[kind].append(Article(*makers[kind](next(names)), kind))
    _add_facts(rng, by_kind)
    return [article for articles in by_kind.values() for article in articles]


def _add_facts(rng: random.Random, by_kind: dict[str, list[Article]]) -> None:
    """Add facts to all articles. Whoever founds, invents or leads something is grown up at that time."""
    words = load_words()
    towns, people, guilds = by_kind["town"], by_kind["person"], by_kind["guild"]
    for town in towns:
        founded, goods = str(rng.randint(700, 1299)), rng.choice(words["goods"])
        river, bridge = rng.choice(by_kind["river"]), rng.choice(guilds)
        town.facts = {"river": river, "bridge": bridge, "founded": founded, "goods": goods}
    for river in by_kind["river"]:
        ports = [town for town in towns if town.facts["river"] is river]
        river.facts = {"length": str(rng.randint(20, 900)), **({"mouth": rng.choice(ports)} if ports else {})}
    for person in people:
        born, trade = str(rng.randint(1300, 1699)), rng.choice(words["trades"])
        person.facts = {"birthplace": rng.choice(towns), "born": born, "trade": trade}
    for guild in guilds:
        founder, year = _draw_person_and_year(rng, people)
        guild.facts = {"founder": founder, "hall": rng.choice(towns), "since": year}
    for invention in by_kind["invention"]:
        inventor, year = _draw_person_and_year(rng, people)
        invention.facts = {"inventor": inventor, "invented": year, "maker": rng.choice(guilds)}
    for event in by_kind["event"]:
        leader, year = _draw_person_and_year(rng, people)
        event.facts = {"place": rng.choice(towns), "leader": leader, "year": year}


def _draw_person_and_year(rng: random.Random, people: list[Article]) -> tuple[Article, str]:
    person = rng.choice(people)
    return person, str(int(str(person.facts["born"])) + rng.randint(20, 60))


def draw_questions(articles: list[Article], rng: random.Random, min_hops: int, max_hops: int) -> Iterator[Question]:
    """Draw questions without end. Each needs `min_hops` to `max_hops` articles."""
    while True:
        num_hops = rng.randint(min_hops, max_hops)
        article, subject, gold = rng.choice(articles), "", list[Article]()
        while article not in gold:  # a question does not lead back to an article that it has passed
            subject, gold = subject or article.mention, [*gold, article]
            if len(gold) == num_hops:
                name, value = rng.choice(list(article.facts.items()))
                answer = value.title if isinstance(value, Article) else value
                titles = tuple(passed.title for passed in gold)
                if answer not in titles:
                    yield Question(RELATIONS[name].question.format(subject), answer, titles)
                break
            links = [(name, value) for name, value in article.facts.items() if isinstance(value, Article)]
            if not links:
                break
            name, article = rng.choice(links)
            subject = RELATIONS[name].phrase.format(subject)


def draw_names(rng: random.Random, split: Split) -> Iterator[str]:
    """Draw different made-up words of one split without end."""
    words, used = load_words(), set[str]()
    while True:
        syllables = [rng.choice(words["onsets"]) + rng.choice(words["vowels"]) for _ in range(rng.choice([2, 2, 3]))]
        name = f"{''.join(syllables)}{rng.choice(['', *words['codas']])}".capitalize()
        if name not in used and assign_split(name) == split:
            used.add(name)
            yield name


# The easier kind: ten villages, each with its goods and its head.

NUM_VILLAGES = 10


@dataclass(frozen=True, slots=True)
class Village:
    """The title of an article, what the village makes, and who leads it."""

    title: str
    goods: str
    head: str

    @property
    def text(self) -> str:
        """The article."""
        return f"{self.head} leads {self.title}. It makes {self.goods}."

    @property
    def question(self) -> Question:
        """Ask for the head of the village, which is named by its goods: only a search finds its title."""
        return Question(f"Who leads the makers of {self.goods}?", self.head, (self.title,))


def draw_villages(rng: random.Random, split: Split) -> list[Village]:
    """Draw the villages of one task. Their names are four letters."""
    names: list[str] = []
    while len(names) < 2 * NUM_VILLAGES:
        name = "".join(rng.choice(SHORT_ONSETS) + rng.choice(SHORT_VOWELS) for _ in range(2)).capitalize()
        if name not in names and assign_split(name) == split:
            names.append(name)
    goods = rng.sample(load_words()["goods"], NUM_VILLAGES)
    return [Village(*facts) for facts in zip(names, goods, names[NUM_VILLAGES:])]


def _mention(value: Article | str) -> str:
    return value.mention if isinstance(value, Article) else value
