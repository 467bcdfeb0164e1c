"""The plan of an SFT run: its directory, its conversations and its steps. Importable without torch."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ramify.core.errors import ConfigInvalid
from ramify.core.names import format_count
from ramify.env.tasksets.data_files import read_rows
from ramify.model.image_support import find_image_problem
from ramify.model.render import Renderer, load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.run.store import default_run_name
from ramify.train.sft.config import SftConfig
from ramify.train.sft.conversations import SftConversation, parse_conversations
from ramify.train.sft.forests import build_sft_forest, has_recorded_tokens


class ExampleOrder:
    """The indices 0 .. num_examples - 1 in shuffled order, epoch after epoch.

    The order of an epoch depends only on the seed and its number, so a run resumes from its position alone.
    """

    def __init__(self, num_examples: int, epochs: int, seed: int) -> None:
        self.num_examples, self.epochs, self.seed = num_examples, epochs, seed
        self._get_epoch_order = lru_cache(maxsize=2)(self._shuffle_epoch)

    def __len__(self) -> int:
        return self.num_examples * self.epochs

    def indices_at(self, position: int, batch_size: int) -> list[int]:
        """Return the examples at positions [position, position + batch_size); fewer at the end."""
        stop = min(position + batch_size, len(self))
        positions = (divmod(i, self.num_examples) for i in range(position, stop))
        return [int(self._get_epoch_order(epoch)[index]) for epoch, index in positions]

    def _shuffle_epoch(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)


def split_held_out(num_examples: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Split the examples into those to train on and those held out; the same seed gives the same split."""
    order = np.random.default_rng([seed, num_examples]).permutation(num_examples)
    num_held_out = round(num_examples * fraction) if fraction else 0
    return sorted(order[num_held_out:].tolist()), sorted(order[:num_held_out].tolist())


NUM_SAMPLED_CONVERSATIONS = 256  # how many `describe_plan` renders to report lengths


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
    model_path, validation_config = resolve_model_path(config.model.name), config.validation
    renderer = load_renderer(model_path, config.renderer)
    conversations = parse_conversations(read_rows(config.data.path, config.data.split), config.data)
    fraction = validation_config.fraction
    train_indices, held_out_indices = split_held_out(len(conversations), fraction, config.seed)
    if fraction and not (train_indices and held_out_indices):
        purpose = "validate on" if train_indices else "train on"
        raise ConfigInvalid(f"{fraction} of {len(conversations)} leaves none to {purpose}", key="validation.fraction")
    validation = [conversations[index] for index in held_out_indices]
    if validation_config.path is not None:
        data_config = config.data.model_copy(update={"path": validation_config.path})
        validation = parse_conversations(read_rows(validation_config.path, validation_config.split), data_config)
    _check_takes_images(config.model.name, [*conversations, *validation])
    name = config.name or default_run_name(config.data.path, config.model.name, config.identity)
    digest = {"count": len(conversations), "digest": _hash_conversations(conversations)}
    return SftPlan(
        path=config.output / name,
        model_path=model_path,
        renderer=renderer,
        conversations=[conversations[index] for index in train_indices],
        validation=validation,
        order=ExampleOrder(len(train_indices), config.epochs, config.seed),
        identity={**config.identity, "conversations": digest},
    )


def _check_takes_images(model: str, conversations: Sequence[SftConversation]) -> None:
    """Raise ConfigInvalid for the first conversation with images if the model takes none."""
    with_images = next((conversation for conversation in conversations if conversation.media), None)
    if with_images is not None and (reason := find_image_problem(model, "native")):
        raise ConfigInvalid(f"data: {with_images.location} {reason}")


def _hash_conversations(conversations: Sequence[SftConversation]) -> str:
    """Return a short hash of the conversations in their order; a position in the order is valid only for these."""
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(msgspec.msgpack.encode((conversation.messages, conversation.tools), enc_hook=str))
        if conversation.untrained or conversation.recorded is not None:
            digest.update(msgspec.msgpack.encode((sorted(conversation.untrained), conversation.recorded)))
    return digest.hexdigest()[:12]


def describe_plan(plan: SftPlan, config: SftConfig) -> list[str]:
    """Return lines that describe the plan, with token counts of a sample of its conversations."""
    indices = plan.order.indices_at(0, min(NUM_SAMPLED_CONVERSATIONS, len(plan.conversations)))
    sampled = [(str(index), plan.conversations[index]) for index in indices]
    roles, seq_len = config.data.train_on_roles, config.seq_len
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
        f"of {len(forests)} sampled: {lengths.mean():.0f} tokens on average, {lengths.max()} at most, "
        f"{trained_share:.0%} trained, {truncated} truncated at {seq_len}",
        *([f"{num_recorded} of them keep the tokens of their rollouts"] if num_recorded else []),
        f"{batch_forest.num_tokens} tokens per batch; {ratio:.2f} times as many without prefix sharing",
    ]
