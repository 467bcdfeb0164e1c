"""What `tiny-vision` is taught: to spell the letters of coloured squares, first cleanly, then with slips.

The first stage teaches the colours on short rows of squares. The others have the conversations of `color-codeword`, in
which letters are replaced by any other with some probability: a policy trained on slips samples them, so partial match
starts low, while the right letter stays the likeliest and every letter that is learned pays.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from ramify.env.tasksets.answers import get_replies
from ramify.env.tasksets.color_codeword import BRIEF_REQUEST, BRIEF_SYSTEM, COLORS, find_codeword, make_square_url
from ramify.env.tasksets.splits import assign_split
from tools.tiny.local_model import open_local_model
from tools.tiny.stages import SftStage

VISION_RECIPE_VERSION = 2  # raised whenever the same seed gives another model
SLIP_PROB = 0.55
NUM_TASKS, ATTEMPTS_PER_TASK = 64, 4
TASKSET: dict[str, Any] = {"id": "color-codeword", "split": "eval", "num_tasks": NUM_TASKS, "brief_prompt": True}


def draw_square_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Rows of one to six squares in one message, and their letters."""
    rng = random.Random(f"squares {seed}")
    while True:
        letters = rng.choices(list(COLORS), k=rng.randint(1, 6))
        yield {"messages": [_show_squares(letters, ""), {"role": "assistant", "content": "".join(letters)}]}


def draw_codewords(seed: int, slip_prob: float) -> Iterator[dict[str, Any]]:
    """Conversations of the train split of `color-codeword`; each letter of a reply slips with a probability."""
    rng = random.Random(f"codewords {seed}")
    letters = list(COLORS)
    while True:
        codeword = rng.choices(letters, k=6)
        if assign_split("".join(codeword)) != "train":
            continue
        messages: list[dict[str, Any]] = [{"role": "system", "content": BRIEF_SYSTEM}]
        for stop in (2, 4, 6):
            reply = "".join(rng.choice(letters) if rng.random() < slip_prob else letter for letter in codeword[:stop])
            messages += [
                _show_squares(codeword[stop - 2 : stop], BRIEF_REQUEST),
                {"role": "assistant", "content": reply},
            ]
        yield {"messages": messages}


def _show_squares(letters: list[str], text: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": make_square_url(letter)}} for letter in letters]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


VISION_STAGES = [
    SftStage("squares", draw_square_rows, 150, 48, decay=False),
    SftStage("codewords", lambda seed: draw_codewords(seed, 0.0), 130, 16, decay=False),
    SftStage("slips", lambda seed: draw_codewords(seed + 1, SLIP_PROB), 80, 16),
]


def measure_vision_model(directory: Path, seed: int) -> dict[str, float]:
    """Return the figures of a model directory: attempts at held-out tasks of `color-codeword`, sampled at T = 1."""
    with open_local_model(directory) as model:
        groups = asyncio.run(model.run_rollouts(TASKSET, NUM_TASKS, ATTEMPTS_PER_TASK, seed=seed))
    traces = [trace for group in groups for trace in group]
    replies = [reply for trace in traces for reply in get_replies(trace)]
    matches = [[trace.metrics["partial_match"] for trace in group] for group in groups]
    figures = {
        "codeword_letters": fmean(reply == find_codeword(reply) != "" for reply in replies),
        "codeword_match": fmean(value for group in matches for value in group),
        "codeword_exact": fmean(trace.reward or 0.0 for trace in traces),
        "codeword_spread": fmean(map(pstdev, matches)),
    }
    return {name: round(value, 4) for name, value in figures.items()}
