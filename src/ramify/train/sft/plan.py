"""The plan of an SFT run: its directory, its conversations and its steps. Importable without torch."""

import hashlib
import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ramify.core.errors import ConfigInvalid
from ramify.core.names import format_count
from ramify.env.data_rows import read_rows
from ramify.model.image_support import find_image_problem
from ramify.model.render import Renderer, load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.train.sft.config import SftConfig, SftDataConfig
from ramify.train.sft.conversations import SftConversation, parse_conversations
from ramify.train.sft.forests import build_sft_forest, has_recorded_tokens
from ramify.train.sft.pinned_data import get_sft_path


class ExampleOrder:
    """The indices of the examples of all datasets, one dataset after the other, in shuffled order, epoch after epoch.

    An epoch has as many examples as all datasets together. With `weights`, each dataset has its share of them: a small
    one is repeated within the epoch, and a large one continues in the next epoch, so all its examples are used equally
    often. The order of an epoch depends only on the seed and its number, so a run resumes from its position alone.
    """

    def __init__(self, sizes: Sequence[int], epochs: int, seed: int, weights: Sequence[float] | None = None) -> None:
        self.sizes, self.epochs, self.seed, self.num_examples = tuple(sizes), epochs, seed, sum(sizes)
        self.shares = None if weights is None else divide_by_weight(self.num_examples, weights)
        """The examples of each dataset in an epoch; None without weights."""
        self._get_epoch_order = lru_cache(maxsize=2)(self._shuffle_epoch)
        self._get_round_order = lru_cache(maxsize=2 * len(self.sizes))(self._shuffle_round)

    def __len__(self) -> int:
        return self.num_examples * self.epochs

    def indices_at(self, position: int, batch_size: int) -> list[int]:
        """Return the examples at positions [position, position + batch_size); fewer at the end."""
        stop = min(position + batch_size, len(self))
        positions = (divmod(i, self.num_examples) for i in range(position, stop))
        return [int(self._get_epoch_order(epoch)[index]) for epoch, index in positions]

    def _shuffle_epoch(self, epoch: int) -> np.ndarray:
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)
        if self.shares is None:
            return order
        return np.concatenate([self._draw_share(dataset, epoch) for dataset in range(len(self.sizes))])[order]

    def _draw_share(self, dataset: int, epoch: int) -> np.ndarray:
        """Return the examples of a dataset in an epoch, which continues where the epoch before ended."""
        assert self.shares is not None
        size, share = self.sizes[dataset], self.shares[dataset]
        positions = np.arange(epoch * share, (epoch + 1) * share)
        rounds = range(epoch * share // size, (epoch * share + share - 1) // size + 1)
        orders = [self._get_round_order(dataset, number) for number in rounds]
        return np.concatenate([*orders, np.empty(0, int)])[positions - rounds.start * size] + sum(self.sizes[:dataset])

    def _shuffle_round(self, dataset: int, number: int) -> np.ndarray:
        return np.random.default_rng([self.seed, dataset, number]).permutation(self.sizes[dataset])


def divide_by_weight(count: int, weights: Sequence[float]) -> list[int]:
    """Divide `count` into whole shares in proportion to the weights; the largest fractions are rounded up."""
    exact = [count * weight / sum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_fraction = sorted(range(len(weights)), key=lambda index: shares[index] - exact[index])
    for index in by_fraction[: count - sum(shares)]:
        shares[index] += 1
    return shares


def split_held_out(num_examples: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Split the examples into those to train on and those held out; the same seed gives the same split."""
    order = np.random.default_rng([seed, num_examples]).permutation(num_examples)
    num_held_out = round(num_examples * fraction) if fraction else 0
    return sorted(order[num_held_out:].tolist()), sorted(order[:num_held_out].tolist())


NUM_SAMPLED_CONVERSATIONS = 256  # how many are rendered to report lengths, and to check `seq_len`


@dataclass(frozen=True, slots=True)
class SftPlan:
    """The parts of a run that need no model in memory."""

    path: Path  # the run's directory
    model_path: Path
    renderer: Renderer
    conversations: Sequence[SftConversation]  # to train on
    validation: Sequence[SftConversation]
    order: ExampleOrder
    identity: dict[str, Any]  # the configuration's identity, and a digest of the conversations

    def count_total_steps(self, config: SftConfig, steps_done: int = 0, examples_seen: int = 0) -> int:
        """Return the steps of the whole run, of which `steps_done` have trained on `examples_seen` examples."""
        total = steps_done + math.ceil(max(0, len(self.order) - examples_seen) / config.batch_size)
        return total if config.max_steps is None else min(total, config.max_steps)


def build_sft_plan(config: SftConfig) -> SftPlan:
    """Find the model and read the data. Raises ConfigInvalid or ModelNotFound."""
    model_path, fraction = resolve_model_path(config.model.name), config.validation.fraction
    renderer = load_renderer(model_path, config.renderer)
    datasets = [_read_dataset(dataset, config.trained_roles) for dataset in config.datasets]
    conversations = [conversation for dataset in datasets for conversation in dataset]
    train_indices, held_out_indices = split_held_out(len(conversations), fraction, config.seed)
    if fraction and not (train_indices and held_out_indices):
        purpose = "validate on" if train_indices else "train on"
        raise ConfigInvalid(f"{fraction} of {len(conversations)} leaves none to {purpose}", key="validation.fraction")
    validation = [conversations[index] for index in held_out_indices]
    if config.validation_data is not None:
        validation = _read_dataset(config.validation_data, config.trained_roles)
    _check_takes_images(config.model.name, [*conversations, *validation])
    ends = list(itertools.accumulate(map(len, datasets)))
    sizes = [bisect_left(train_indices, end) - bisect_left(train_indices, start) for start, end in pairwise([0, *ends])]
    weights = [dataset.weight for dataset in config.datasets if dataset.weight is not None]
    if weights and 0 in sizes:
        raise ConfigInvalid(f"{fraction} leaves nothing of one dataset to train on", key="validation.fraction")
    order = ExampleOrder(sizes, config.epochs, config.seed, weights or None)
    _check_seq_len([conversations[index] for index in train_indices], order, renderer, config)
    return SftPlan(
        path=get_sft_path(config),
        model_path=model_path,
        renderer=renderer,
        conversations=[conversations[index] for index in train_indices],
        validation=validation,
        order=order,
        identity={
            **config.identity,
            "conversations": {
                "count": len(conversations),
                "digest": _hash_conversations(datasets, weighted=bool(weights)),
            },
        },
    )


def _read_dataset(config: SftDataConfig, trained_roles: Sequence[str]) -> list[SftConversation]:
    """Return the conversations of a dataset, without training on the roles that only other datasets train."""
    conversations = parse_conversations(read_rows(config), config)
    if excluded := set(trained_roles) - set(config.train_on_roles):
        return [conversation.exclude_roles(excluded) for conversation in conversations]
    return conversations


def _check_seq_len(
    conversations: Sequence[SftConversation], order: ExampleOrder, renderer: Renderer, config: SftConfig
) -> None:
    """Raise ConfigInvalid if none of the sampled conversations has a trained token within `seq_len`."""
    sampled = order.indices_at(0, min(NUM_SAMPLED_CONVERSATIONS, len(conversations)))
    for index in sampled:
        conversation = (str(index), conversations[index])
        forest = build_sft_forest([conversation], renderer, config.trained_roles, config.seq_len)
        if forest.count_by_component()["ce"]:
            return
    problem = f"none of {format_count(len(sampled), 'conversation')} has a trained token in its first {config.seq_len}"
    raise ConfigInvalid(f"{problem} tokens; raise it (`ramify data` shows the lengths)", key="seq_len")


def _check_takes_images(model: str, conversations: Sequence[SftConversation]) -> None:
    """Raise ConfigInvalid for the first conversation with images if the model takes none."""
    with_images = next((conversation for conversation in conversations if conversation.media), None)
    if with_images is not None and (reason := find_image_problem(model, "native")):
        raise ConfigInvalid(f"data: {with_images.location} {reason}")


def _hash_conversations(datasets: Sequence[Sequence[SftConversation]], *, weighted: bool) -> str:
    """Return a short hash of the conversations in their order; a position in the order is valid only for these.

    Where a dataset ends matters only if the datasets are `weighted`.
    """
    digest = hashlib.sha256()
    if weighted:
        digest.update(msgspec.msgpack.encode([len(dataset) for dataset in datasets]))
    for conversation in itertools.chain.from_iterable(datasets):
        digest.update(msgspec.msgpack.encode((conversation.messages, conversation.tools), enc_hook=str))
        if conversation.untrained or conversation.recorded is not None:
            digest.update(msgspec.msgpack.encode((sorted(conversation.untrained), conversation.recorded)))
    return digest.hexdigest()[:12]


def describe_plan(plan: SftPlan, config: SftConfig) -> list[str]:
    """Return lines that describe the plan, with token counts of a sample of its conversations."""
    indices = plan.order.indices_at(0, min(NUM_SAMPLED_CONVERSATIONS, len(plan.conversations)))
    sampled = [(str(index), plan.conversations[index]) for index in indices]
    roles, seq_len = config.trained_roles, config.seq_len
    forests = [build_sft_forest([conversation], plan.renderer, roles, seq_len) for conversation in sampled]
    batch_forest = build_sft_forest(sampled[: config.batch_size], plan.renderer, roles, seq_len)
    lengths = np.array([forest.num_tokens for forest in forests])
    trained_share = sum(forest.count_by_component()["ce"] for forest in forests) / max(1, lengths.sum())
    num_recorded = sum(has_recorded_tokens(conversation, plan.renderer) for _, conversation in sampled)
    truncated = sum(forest.dropped.num_truncated_tokens > 0 for forest in forests)
    ratio = batch_forest.flat_tokens / max(1, batch_forest.num_tokens)
    return [
        f"would train {config.model.name} from {plan.model_path} into {plan.path}",
        f"{len(plan.conversations)} training and {len(plan.validation)} validation conversations; "
        f"{format_count(plan.count_total_steps(config), 'step')} with batch size {config.batch_size}",
        *_describe_datasets(plan.order, config),
        f"of {len(forests)} sampled: {lengths.mean():.0f} tokens on average, {lengths.max()} at most, "
        f"{trained_share:.0%} trained, {truncated} truncated at {seq_len}",
        *([f"{num_recorded} of them keep the tokens of their rollouts"] if num_recorded else []),
        *([f"evals on {', '.join(source.source_name for source in config.eval)}"] if config.eval else []),
        f"{batch_forest.num_tokens} tokens per batch; {ratio:.2f} times as many without prefix sharing",
    ]


def _describe_datasets(order: ExampleOrder, config: SftConfig) -> list[str]:
    """Return a line with what each dataset contributes to an epoch, if there are several."""
    if len(order.sizes) == 1:
        return []
    shares = order.shares or order.sizes
    listed = [
        f"{dataset.path} {share / max(1, order.num_examples):.0%} ({share} from {size})"
        for dataset, size, share in zip(config.datasets, order.sizes, shares)
    ]
    return [f"examples of an epoch: {', '.join(listed)}"]
