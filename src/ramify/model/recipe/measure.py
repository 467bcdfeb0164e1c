"""What a model can do before any reinforcement learning: sampled at temperature 1, as training will sample it."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ramify.model.recipe.corpus import reversal_prompt, tool_prompt, vocabulary
from ramify.render import Parsed, Rendered, Renderer, load_renderer
from ramify.tasksets import reversing

PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over held-out prompts: of reverse-text's default example, and of tools with names never seen."""

    well_formed: float
    similarity: float
    exact: float
    greedy_similarity: float
    greedy_exact: float
    tool_calls: float
    """Replies that are parseable calls, among prompts that offer tools."""
    offered_calls: float
    """... and that call a tool which was offered."""

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def measure(directory: Path, *, prompts: int = PROMPTS, seed: int = 0) -> Figures:
    """The figures of a model directory, in float32 on the CPU."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    renderer = load_renderer(directory)
    config = reversing.Texts(split="eval", num_tasks=prompts)
    texts = list(reversing.texts(config))
    asked = [renderer.render(reversal_prompt(text).messages) for text in texts]
    limit = 2 * config.max_chars + 40  # room for tags that are many tokens
    replies = [parsed.message.text for parsed in sample(model, renderer, asked, limit, seed=seed)]
    greedy = [parsed.message.text for parsed in sample(model, renderer, asked, limit, seed=None)]
    rng = random.Random(seed)
    offers = [tool_prompt(rng, vocabulary(held_out=True))[0] for _ in range(prompts)]
    offered = [renderer.render(offer.messages, offer.tools) for offer in offers]
    calls = sample(model, renderer, offered, 96, seed=seed)
    answers = [reversing.answer(text) for text in texts]
    return Figures(
        well_formed=_mean([reversing.well_formed(reply) for reply in replies]),
        similarity=_mean(list(map(reversing.similarity, replies, answers))),
        exact=_mean(list(map(reversing.exact, replies, answers))),
        greedy_similarity=_mean(list(map(reversing.similarity, greedy, answers))),
        greedy_exact=_mean(list(map(reversing.exact, greedy, answers))),
        tool_calls=_mean([_is_call(parsed) for parsed in calls]),
        offered_calls=_mean([_is_call(parsed) and _was_offered(parsed, made) for parsed, made in zip(calls, offered)]),
    )


def sample(
    model: Any, renderer: Renderer, prompts: Sequence[Rendered], limit: int, *, seed: int | None
) -> list[Parsed]:
    """One reply to each prompt, at temperature 1, or the likeliest tokens if there is no seed."""
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.ids) :] = torch.from_numpy(prompt.ids)
        mask[row, width - len(prompt.ids) :] = 1
    how = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    stops = list(renderer.stop_ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed or 0)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=limit, eos_token_id=stops, pad_token_id=stops[0], **how
        )
    parsed: list[Parsed] = []
    for prompt, reply in zip(prompts, out[:, width:].tolist()):
        end = next((at for at, id in enumerate(reply, 1) if id in stops), len(reply))
        parsed.append(renderer.parse(reply[:end], prompt))
    return parsed


def _is_call(parsed: Parsed) -> bool:
    return bool(parsed.message.tool_calls) and not parsed.problems


def _was_offered(parsed: Parsed, prompt: Rendered) -> bool:
    names = {tool["function"]["name"] for tool in prompt.tools}
    return all(call.name in names for call in parsed.message.tool_calls)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
