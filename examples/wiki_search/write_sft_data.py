"""Write conversations of wiki-search for `ramify sft`: python write_sft_data.py FILE.

They teach the form of the replies and as little skill as possible: four of five searches are for any goods, and letters
of the answers are replaced by others. So the rewards of attempts differ, as reinforcement learning requires.
"""

import json
import random
import sys
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from ramify.env import collect_hooks
from ramify.env.tasksets.encyclopedia import Village, draw_villages
from ramify.env.tasksets.wiki_search import SIMPLE_SYSTEM, WikiSearch, format_result

NUM_CONVERSATIONS = 2000
RIGHT_SEARCH_PROB, WRONG_LETTER_PROB = 0.2, 0.25


def find_line(village: Village) -> str:
    """Return the result of a search that finds a village."""
    return format_result(village.title, village.text, village.goods)


def make_call(name: str, **arguments: str) -> dict[str, Any]:
    """Return a reply that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": name, "type": "function", "function": function}]}


rng = random.Random(0)
tools = collect_hooks(WikiSearch()).static_tools.schemas
with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
    for _ in range(NUM_CONVERSATIONS):
        villages = draw_villages(rng, "train")
        wanted = rng.choice(villages)
        village = wanted if rng.random() < RIGHT_SEARCH_PROB else rng.choice(villages)
        letters = (rng.choice(ascii_lowercase) if rng.random() < WRONG_LETTER_PROB else c for c in village.head)
        messages = [
            {"role": "system", "content": SIMPLE_SYSTEM},
            {"role": "user", "content": wanted.question.text},
            make_call("search", query=village.goods),
            {"role": "tool", "tool_call_id": "search", "content": find_line(village)},
            make_call("read", title=village.title),
            {"role": "tool", "tool_call_id": "read", "content": village.text},
            {"role": "assistant", "content": "".join(letters)},
        ]
        file.write(json.dumps({"messages": messages, "tools": tools}) + "\n")
