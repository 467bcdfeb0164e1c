"""What a model can do before any reinforcement learning: sampled at temperature 1, as training will sample it."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from ramify.env.tasksets import reversal
from ramify.env.tasksets.alphabet_sort import get_tag_name
from ramify.infer.client import ClientSampling
from ramify.model.render import ParsedReply, RenderedPrompt, load_renderer
from ramify.trace import Message, Trace
from tools.tiny.corpus import build_reversal_prompt, draw_tool_prompt, load_vocabulary
from tools.tiny.local_model import LocalModel, open_local_model

NUM_PROMPTS = 256
ATTEMPTS_PER_TASK = 4  # at each task of several turns
MAX_CALL_TOKENS = 96  # tokens
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
class BaselineMetrics:
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

    def to_dict(self) -> dict[str, float]:
        """Return the figures by name, rounded to four digits."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def measure_model(directory: Path, *, num_prompts: int = NUM_PROMPTS, seed: int = 0) -> BaselineMetrics:
    """The figures of a model directory."""
    with open_local_model(directory) as player:
        return asyncio.run(_measure_async(player, directory, num_prompts, seed))


async def _measure_async(model: LocalModel, directory: Path, num_prompts: int, seed: int) -> BaselineMetrics:
    renderer = load_renderer(directory)
    config = reversal.ReversalTextsConfig(split="eval", num_tasks=num_prompts)
    texts = list(reversal.generate_texts(config))
    rendered_prompts = [renderer.render(build_reversal_prompt(text).messages) for text in texts]
    limit = 2 * config.max_chars + 40  # room for tags that are many tokens
    replies = _get_texts(await model.sample_replies(rendered_prompts, ClientSampling(max_tokens=limit)))
    greedy = _get_texts(await model.sample_replies(rendered_prompts, ClientSampling(max_tokens=limit, temperature=0.0)))
    rng = random.Random(seed)
    offers = [draw_tool_prompt(rng, load_vocabulary(held_out=True))[0] for _ in range(num_prompts)]
    offered = [renderer.render(offer.messages, offer.tools) for offer in offers]
    calls = await model.sample_replies(offered, ClientSampling(max_tokens=MAX_CALL_TOKENS))
    answers = [reversal.reverse(text) for text in texts]
    tasks = max(1, num_prompts // ATTEMPTS_PER_TASK)
    return BaselineMetrics(
        well_formed=fmean(map(reversal.is_well_formed, replies)),
        similarity=fmean(map(reversal.score_similarity, replies, answers)),
        exact=fmean(map(reversal.score_exact, replies, answers)),
        greedy_similarity=fmean(map(reversal.score_similarity, greedy, answers)),
        greedy_exact=fmean(map(reversal.score_exact, greedy, answers)),
        tool_calls=fmean(map(_is_valid_call, calls)),
        offered_calls=fmean(
            _is_valid_call(parsed) and _calls_offered_tool(parsed, made) for parsed, made in zip(calls, offered)
        ),
        **_walk_metrics(await model.run_rollouts(WIKISPEEDIA, tasks, ATTEMPTS_PER_TASK, seed=seed)),
        **_sorting_metrics(await model.run_rollouts(ALPHABET_SORT, tasks, ATTEMPTS_PER_TASK, seed=seed)),
        **_guessing_metrics(await model.run_rollouts(WORDLE, tasks, ATTEMPTS_PER_TASK, seed=seed)),
    )


def _walk_metrics(groups: Sequence[Sequence[Trace]]) -> dict[str, float]:
    traces = [trace for group in groups for trace in group]
    replies = [reply for trace in traces for reply in _get_replies(trace)]
    tools = {"click_link", "go_back"}
    return {
        "walk_calls": fmean(bool(reply.tool_calls) and reply.tool_calls[0].name in tools for reply in replies),
        "walk_links": sum(trace.metrics["clicks"] for trace in traces) / len(replies),
        "walk_reached": fmean(trace.reward or 0.0 for trace in traces),
    }


def _sorting_metrics(groups: Sequence[Sequence[Trace]]) -> dict[str, float]:
    traces = [trace for group in groups for trace in group]
    tagged_replies = [
        (f"{get_tag_name(turn)}>", reply.text) for trace in traces for turn, reply in enumerate(_get_replies(trace))
    ]
    return {
        "sort_tagged": fmean(
            text.startswith(f"<{mark}") and text.endswith(f"</{mark}") for mark, text in tagged_replies
        ),
        "sort_reward": fmean(trace.reward or 0.0 for trace in traces),
    }


def _guessing_metrics(groups: Sequence[Sequence[Trace]]) -> dict[str, float]:
    traces = [trace for group in groups for trace in group]
    return {
        "guess_valid": sum(trace.metrics["guesses"] for trace in traces)
        / sum(len(_get_replies(trace)) for trace in traces),
        "guess_reward": fmean(trace.reward or 0.0 for trace in traces),
        "guess_spread": fmean(pstdev(trace.reward or 0.0 for trace in group) for group in groups),
    }


def _get_replies(trace: Trace) -> list[Message]:
    return [node.message for node in trace.nodes if node.message.role == "assistant"]


def _get_texts(replies: Sequence[ParsedReply]) -> list[str]:
    return [parsed.message.text for parsed in replies]


def _is_valid_call(parsed: ParsedReply) -> bool:
    return bool(parsed.message.tool_calls) and not parsed.problems


def _calls_offered_tool(parsed: ParsedReply, prompt: RenderedPrompt) -> bool:
    names = {tool["function"]["name"] for tool in prompt.tools}
    return all(call.name in names for call in parsed.message.tool_calls)
