"""What a model can do before any reinforcement learning: sampled at temperature 1, as training will sample it."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from ramify.client import ClientSampling
from ramify.recipe.corpus import reversal_prompt, tool_prompt, vocabulary
from ramify.recipe.playing import Player, playing
from ramify.render import ParsedReply, RenderedPrompt, load_renderer
from ramify.tasksets import reversal
from ramify.tasksets.alphabet_sort import get_tag_name
from ramify.trace import Message, Trace

PROMPTS = 256
ATTEMPTS = 4  # at each task of several turns
CALL = 96  # tokens
WIKISPEEDIA: dict[str, Any] = {
    "id": "wikispeedia",
    "split": "eval",
    "num_tasks": 64,
    "num_articles": 24,
    "num_topics": 4,
    "max_links": 6,
    "min_dist": 1,
    "max_dist": 3,
    "max_turns": 8,
}
ALPHABET_SORT: dict[str, Any] = {
    "id": "alphabet-sort",
    "split": "eval",
    "num_tasks": 64,
    "min_turns": 2,
    "max_turns": 2,
    "min_names": 2,
    "max_names": 3,
}
WORDLE: dict[str, Any] = {"id": "wordle", "split": "eval", "num_tasks": 64}


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over held-out tasks: of reverse-text's default example, of tools with names never seen, and of the small
    settings of the tasksets of several turns."""

    well_formed: float
    similarity: float
    exact: float
    greedy_similarity: float
    greedy_exact: float
    tool_calls: float
    """Replies that are parseable calls, among prompts that offer tools."""
    offered_calls: float
    """... and that call a tool which was offered."""
    walk_calls: float
    """wikispeedia: replies that call one of its tools."""
    walk_links: float
    """... and that click a link which is on the page."""
    walk_reached: float
    sort_tagged: float
    """alphabet-sort: replies with the tags that the turn asks for."""
    sort_reward: float
    guess_valid: float
    """wordle: replies that are a valid guess."""
    guess_reward: float
    guess_spread: float
    """The standard deviation of the rewards for one secret."""

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def measure(directory: Path, *, prompts: int = PROMPTS, seed: int = 0) -> Figures:
    """The figures of a model directory."""
    with playing(directory) as player:
        return asyncio.run(_measured(player, directory, prompts, seed))


async def _measured(player: Player, directory: Path, prompts: int, seed: int) -> Figures:
    renderer = load_renderer(directory)
    config = reversal.ReversalTextsConfig(split="eval", num_tasks=prompts)
    texts = list(reversal.generate_texts(config))
    asked = [renderer.render(reversal_prompt(text).messages) for text in texts]
    limit = 2 * config.max_chars + 40  # room for tags that are many tokens
    replies = _texts(await player.replies(asked, ClientSampling(max_tokens=limit)))
    greedy = _texts(await player.replies(asked, ClientSampling(max_tokens=limit, temperature=0.0)))
    rng = random.Random(seed)
    offers = [tool_prompt(rng, vocabulary(held_out=True))[0] for _ in range(prompts)]
    offered = [renderer.render(offer.messages, offer.tools) for offer in offers]
    calls = await player.replies(offered, ClientSampling(max_tokens=CALL))
    answers = [reversal.reverse(text) for text in texts]
    tasks = max(1, prompts // ATTEMPTS)
    return Figures(
        well_formed=fmean(map(reversal.is_well_formed, replies)),
        similarity=fmean(map(reversal.score_similarity, replies, answers)),
        exact=fmean(map(reversal.score_exact, replies, answers)),
        greedy_similarity=fmean(map(reversal.score_similarity, greedy, answers)),
        greedy_exact=fmean(map(reversal.score_exact, greedy, answers)),
        tool_calls=fmean(map(_is_call, calls)),
        offered_calls=fmean(_is_call(parsed) and _was_offered(parsed, made) for parsed, made in zip(calls, offered)),
        **_of_walks(await player.rollouts(WIKISPEEDIA, tasks, ATTEMPTS, seed=seed)),
        **_of_sortings(await player.rollouts(ALPHABET_SORT, tasks, ATTEMPTS, seed=seed)),
        **_of_guessings(await player.rollouts(WORDLE, tasks, ATTEMPTS, seed=seed)),
    )


def _of_walks(groups: Sequence[Sequence[Trace]]) -> dict[str, float]:
    traces = [trace for group in groups for trace in group]
    replies = [reply for trace in traces for reply in _replies(trace)]
    tools = {"click_link", "go_back"}
    return {
        "walk_calls": fmean(bool(reply.tool_calls) and reply.tool_calls[0].name in tools for reply in replies),
        "walk_links": sum(trace.metrics["clicks"] for trace in traces) / len(replies),
        "walk_reached": fmean(trace.reward or 0.0 for trace in traces),
    }


def _of_sortings(groups: Sequence[Sequence[Trace]]) -> dict[str, float]:
    traces = [trace for group in groups for trace in group]
    said = [(f"{get_tag_name(turn)}>", reply.text) for trace in traces for turn, reply in enumerate(_replies(trace))]
    return {
        "sort_tagged": fmean(text.startswith(f"<{mark}") and text.endswith(f"</{mark}") for mark, text in said),
        "sort_reward": fmean(trace.reward or 0.0 for trace in traces),
    }


def _of_guessings(groups: Sequence[Sequence[Trace]]) -> dict[str, float]:
    traces = [trace for group in groups for trace in group]
    return {
        "guess_valid": sum(trace.metrics["guesses"] for trace in traces)
        / sum(len(_replies(trace)) for trace in traces),
        "guess_reward": fmean(trace.reward or 0.0 for trace in traces),
        "guess_spread": fmean(pstdev(trace.reward or 0.0 for trace in group) for group in groups),
    }


def _replies(trace: Trace) -> list[Message]:
    return [node.message for node in trace.nodes if node.message.role == "assistant"]


def _texts(replies: Sequence[ParsedReply]) -> list[str]:
    return [parsed.message.text for parsed in replies]


def _is_call(parsed: ParsedReply) -> bool:
    return bool(parsed.message.tool_calls) and not parsed.problems


def _was_offered(parsed: ParsedReply, prompt: RenderedPrompt) -> bool:
    names = {tool["function"]["name"] for tool in prompt.tools}
    return all(call.name in names for call in parsed.message.tool_calls)
