"""What `tiny` is taught: conversations drawn from a seed, in every format that a built-in taskset asks for.

They teach the form of a reply and as little skill as possible: names to sort come back in any order, guesses and links
are drawn at random. Reversals carry slips: with probability `SLIP` a letter is replaced by any letter of the text. A
policy trained on slips samples them, so similarity starts low and the attempts of a group differ letter by letter,
while the right letter is the likeliest: a reward always has something to tell apart, and each letter learned pays. The
other way to a start around 0.5, stopping a clean training early, has to hit a short moment, because reversal is learned
in a steep climb.

Before the conversations come drills, short rows of random letters to be reversed, picked or called. They are where
attention learns to find a character. Conversations alone did not get there in four times the steps, because most of
each row is prompt, and English words can be guessed without looking.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ramify.tasksets import reverse_text
from ramify.trace import Message, ToolCall

SLIP = 0.5
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PARAMETERS = {
    "string": ["name", "title", "query", "city", "date", "status", "path", "order_id", "user_id", "text"],
    "integer": ["count", "limit", "size", "number", "year", "day", "amount", "id", "page"],
}


@dataclass(slots=True)
class Conversation:
    """Messages and the tools that are offered with them; every reply in it is trained."""

    messages: list[Message] = field(default_factory=list[Message])
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def say(self, role: str, text: str) -> None:
        self.messages.append(Message(role, text))

    def call(self, name: str, arguments: dict[str, Any], result: str) -> None:
        """A reply that calls a tool, and what the tool answers."""
        id = f"call{len(self.messages)}"
        self.messages.append(Message("assistant", tool_calls=(ToolCall(id, name, json.dumps(arguments)),)))
        self.messages.append(Message("tool", result, tool_call_id=id))


def drills(seed: int) -> Iterator[Conversation]:
    """Short rows of random letters, without end."""
    rng = random.Random(f"drills {seed}")
    while True:
        scraps = ["".join(rng.choice(LETTERS) for _ in range(rng.randint(3, 9))) for _ in range(rng.randint(1, 4))]
        scrap = rng.choice(scraps)
        made = Conversation()
        (kind,) = rng.choices(["reverse", "pick", "call"], [4, 3, 4])
        if kind == "reverse":
            made.say("user", scrap)
            made.say("assistant", f"<reversed_text>{scrap[::-1]}</reversed_text>")
        elif kind == "pick":
            made.say("user", "\n".join(scraps))
            made.say("assistant", scrap)
        else:
            made.tools = [tool(rng, name) for name in scraps[:2]]
            name, arguments = sketch(rng, scraps, rng.choice(made.tools))
            made.say("user", " ".join([name, *map(str, arguments.values())]))
            made.call(name, arguments, "ok")
        yield made


def conversations(seed: int) -> Iterator[Conversation]:
    """Every format in its share, without end."""
    rng = random.Random(f"conversations {seed}")
    words = vocabulary(held_out=False)
    backwards = list(reverse_text.texts(reverse_text.ReverseTextConfig(num_tasks=4000, seed=seed)))
    kinds: list[tuple[Callable[[], Conversation], int]] = [
        (lambda: reversal(rng, backwards), 8),
        (lambda: tool_use(rng, words), 6),
        (lambda: browsing(rng, words), 2),
        (lambda: sorting(rng, words), 2),
        (lambda: guessing(rng, words), 2),
        (lambda: reckoning(rng, words), 1),
    ]
    makers, weights = zip(*kinds, strict=True)
    while True:
        (make,) = rng.choices(makers, weights)
        yield make()


def vocabulary(*, held_out: bool) -> list[str]:
    """The words that conversations are made of, or the tenth of all that they never use."""
    return [word for at, word in enumerate(reverse_text.words()) if (at % 10 == 0) == held_out]


def reversal(rng: random.Random, texts: list[str]) -> Conversation:
    """Tasks of the default example one after another, answered with slips: one prompt, many replies to learn from."""
    made = Conversation()
    made.say("system", reverse_text.SYSTEM)
    for text in rng.sample(texts, rng.randint(1, 6)):
        answer = "".join(rng.choice(text) if rng.random() < SLIP else letter for letter in text[::-1])
        made.say("user", text)
        made.say("assistant", f"<reversed_text>{answer}</reversed_text>")
    return made


def reversal_prompt(text: str) -> Conversation:
    return Conversation([Message("system", reverse_text.SYSTEM), Message("user", text)])


def tool_use(rng: random.Random, words: list[str]) -> Conversation:
    """Tools nobody has seen, and calls that copy their names and arguments from the request."""
    made, wanted = tool_prompt(rng, words)
    for turn in range(rng.randint(1, 3)):
        if turn:
            made.say("user", request(rng, wanted := sketch(rng, words, rng.choice(made.tools))))
        made.call(*wanted, rng.choice(["ok", "done", f'{{"{rng.choice(words)}": {rng.randint(0, 99)}}}', "not found"]))
        if rng.random() < 0.5:
            made.say("assistant", rng.choice(["Done.", "It is done.", "I could not find it."]))
    return made


def tool_prompt(rng: random.Random, words: list[str]) -> tuple[Conversation, tuple[str, dict[str, Any]]]:
    """A request with one or two tools named after `words`, and the call it asks for."""
    made = Conversation()
    for _ in range(rng.randint(1, 2)):
        verb, noun = rng.sample(words, 2)
        made.tools.append(tool(rng, f"{verb}_{noun}", f"{verb.title()} the {noun}."))
    if rng.random() < 0.5:
        made.say("system", rng.choice(["Use the tools.", "You help people with their requests.", "Solve the task."]))
    wanted = sketch(rng, words, rng.choice(made.tools))
    made.say("user", request(rng, wanted))
    return made, wanted


def tool(rng: random.Random, name: str, told: str = "") -> dict[str, Any]:
    """A tool with up to two parameters."""
    kinds = rng.choices(["string", "string", "integer"], k=rng.choice([0, 0, 1, 1, 1, 1, 2]))
    names = {rng.choice(PARAMETERS[kind]): {"type": kind} for kind in kinds}
    schema = {"type": "object", "properties": names, "required": list(names)}
    return {"type": "function", "function": {"name": name, "description": told, "parameters": schema}}


def sketch(rng: random.Random, words: list[str], tool: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A call of the tool: its name, and values of the right types."""
    draw: dict[str, Callable[[], Any]] = {
        "string": lambda: rng.choice([rng.choice(words), f"{rng.choice('ABCDRX')}{rng.randint(1, 99)}"]),
        "integer": lambda: rng.randint(0, 99),
    }
    properties = tool["function"]["parameters"]["properties"]
    return tool["function"]["name"], {name: draw[schema["type"]]() for name, schema in properties.items()}


def request(rng: random.Random, wanted: tuple[str, dict[str, Any]]) -> str:
    name, arguments = wanted
    values = ", ".join(f"{key} {json.dumps(value).strip(chr(34))}" for key, value in arguments.items())
    opening = rng.choice(["Please {}", "{}", "I want to {}", "Can you {}"]).format(name.replace("_", " the "))
    return f"{opening}{rng.choice([': ', ' with ', ', ']) + values if values else ''}."


def browsing(rng: random.Random, words: list[str]) -> Conversation:
    """Pages with links, and clicks on them."""
    click = {"type": "object", "properties": {"article": {"type": "string"}}, "required": ["article"]}
    made = Conversation(
        tools=[
            {"type": "function", "function": {"name": name, "description": told, "parameters": schema}}
            for name, told, schema in [
                ("click_link", rng.choice(["Follow a link.", "Open a linked article."]), click),
                ("go_back", "Return to the page before.", {"type": "object", "properties": {}}),
            ]
        ]
    )
    made.say("system", rng.choice(["Reach the target by links.", "Go from page to page until you reach the target."]))
    links = titles(rng, words)
    made.say("user", f"Target: {titles(rng, words)[0]}\n{page(rng.choice(words).title(), links)}")
    for _ in range(rng.randint(1, 3)):
        back = rng.random() < 0.1
        article = rng.choice(links)
        links = titles(rng, words)
        made.call(*(("go_back", {}) if back else ("click_link", {"article": article})), page(article, links))
    return made


def titles(rng: random.Random, words: list[str]) -> list[str]:
    return sorted(
        " ".join(rng.choice(words).title() for _ in range(rng.randint(1, 2))) for _ in range(rng.randint(3, 8))
    )


def page(title: str, links: list[str]) -> str:
    return f"{title}\nLinks:\n" + "\n".join(links)


def sorting(rng: random.Random, words: list[str]) -> Conversation:
    """Names in tags, one per line, in any order; from the second turn on, new ones are marked."""
    made = Conversation()
    known: list[str] = []
    for turn in range(rng.randint(1, 3)):
        new = [rng.choice(words).title() + rng.choice(words).title() for _ in range(rng.randint(1, 5))]
        tag = "combined_alphabetical_sorted" if turn else "alphabetical_sorted"
        ask = rng.choice(["Sort these names", "Sort the names", "Put these in order"]) + rng.choice(
            [" by first name", " by last name"]
        )
        made.say("user", f"{ask} inside <{tag}> tags, one per line:\n" + "\n".join(new))
        lines = [*known, *(f"{name} // new name!" if turn else name for name in new)]
        rng.shuffle(lines)
        made.say("assistant", f"<{tag}>\n" + "\n".join(lines) + f"\n</{tag}>")
        known += new
    return made


def guessing(rng: random.Random, words: list[str]) -> Conversation:
    """Five-letter words in brackets, whatever the feedback."""
    fives = [word for word in words if len(word) == 5]
    made = Conversation()
    made.say(
        "system", rng.choice(["Guess the five-letter word, in brackets: [word].", "Play Wordle. Guess as [word]."])
    )
    made.say("user", rng.choice(["Guess.", "Your first guess?", "Begin."]))
    for guess in rng.sample(fives, rng.randint(1, 6)):
        made.say("assistant", f"[{guess}]")
        made.say("user", f"{guess.upper()}\n{''.join(rng.choice('GYXX') for _ in guess)}")
    return made


def reckoning(rng: random.Random, words: list[str]) -> Conversation:
    """A small sum, the answer in a box."""
    first, second, third = (rng.randint(1, 20) for _ in range(3))
    made = Conversation()
    made.say("system", rng.choice(["Put the final answer in \\boxed{}.", "Answer in \\boxed{}."]))
    made.say("user", f"There are {first} {rng.choice(words)}s. {second} more come and {third} go. How many are left?")
    made.say("assistant", f"\\boxed{{{first + second - third}}}")
    return made
