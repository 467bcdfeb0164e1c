"""What an SFT run will do, known before torch is loaded: its directory, its conversations, its steps."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ramify.errors import ConfigInvalid
from ramify.model.resolve import resolve_model_path
from ramify.render import Renderer, load_renderer
from ramify.store import default_run_name
from ramify.tasksets.data_files import read_rows
from ramify.train.sft.config import SftConfig
from ramify.train.sft.conversations import SftConversation, parse_conversations
from ramify.train.sft.example_order import ExampleOrder, split_held_out
from ramify.train.sft.forests import build_forest

NUM_SAMPLED_CONVERSATIONS = 256  # conversations that are looked at to say how long they are


@dataclass(frozen=True, slots=True)
class SftPlan:
    """The parts of a run that need no model in memory."""

    path: Path
    model_path: Path
    renderer: Renderer
    conversations: Sequence[SftConversation]
    validation: Sequence[SftConversation]
    order: ExampleOrder
    identity: dict[str, Any]
    """What makes this run itself: the configuration's, and which conversations were found."""

    def count_total_steps(self, config: SftConfig, steps_done: int = 0, examples_seen: int = 0) -> int:
        """The steps of the whole run, given that `done` are done and have seen so many examples."""
        total = steps_done + self.order.count_remaining_steps(examples_seen, config.batch_size)
        return total if config.max_steps is None else min(total, config.max_steps)


def build_sft_plan(config: SftConfig) -> SftPlan:
    """Read the data and find the model. Raises ConfigInvalid or ModelNotFound."""
    model = resolve_model_path(config.model.name)
    renderer = load_renderer(model, config.renderer)
    chats = parse_conversations(read_rows(config.data.path, config.data.part), config.data)
    train, apart = split_held_out(len(chats), config.validation.share, config.seed)
    if config.validation.share and not (train and apart):
        nothing = "measure" if train else "train on"
        raise ConfigInvalid(f"validation.share: {config.validation.share} of {len(chats)} leaves none to {nothing}")
    validation = [chats[at] for at in apart]
    if config.validation.path is not None:
        apart = config.data.model_copy(update={"path": config.validation.path})
        validation = parse_conversations(read_rows(config.validation.path, config.validation.part), apart)
    chosen = [chats[at] for at in train]
    name = config.name or default_run_name(config.data.path, config.model.name, config.identity)
    stream = ExampleOrder(len(chosen), config.epochs, config.seed)
    identity = {**config.identity, "conversations": {"count": len(chats), "digest": _hash_conversations(chats)}}
    return SftPlan(config.output / name, model, renderer, chosen, validation, stream, identity)


def _hash_conversations(conversations: Sequence[SftConversation]) -> str:
    """A short name of these conversations in this order: a position in the stream means nothing in others."""
    found = hashlib.sha256()
    for chat in conversations:
        found.update(msgspec.msgpack.encode((chat.messages, chat.tools), enc_hook=str))
    return found.hexdigest()[:12]


def describe_plan(plan: SftPlan, config: SftConfig) -> list[str]:
    """The plan for people."""
    looked = [
        (str(at), plan.conversations[at])
        for at in plan.order.indices_at(0, min(NUM_SAMPLED_CONVERSATIONS, len(plan.conversations)))
    ]
    alone = [build_forest([each], plan.renderer, config.data.roles, config.seq_len) for each in looked]
    together = build_forest(looked[: config.batch_size], plan.renderer, config.data.roles, config.seq_len)
    lengths = np.array([forest.num_tokens for forest in alone])
    learned = sum(forest.count_by_component()["ce"] for forest in alone) / max(1, lengths.sum())
    cut = sum(forest.dropped.num_truncated_tokens > 0 for forest in alone)
    ratio = together.flat_tokens / max(1, together.num_tokens)
    return [
        f"would train {config.model.name} from {plan.model_path} into {plan.path}",
        f"{len(plan.conversations)} conversations, {len(plan.validation)} more to measure; "
        f"{plan.count_total_steps(config)} steps of {config.batch_size}",
        f"of {len(alone)} looked at: {lengths.mean():.0f} tokens on average, {lengths.max()} at most, "
        f"{learned:.0%} of them learned, {cut} cut at {config.seq_len}",
        f"a batch is {together.num_tokens} tokens; laid flat it would be {ratio:.2f} times as many",
    ]
