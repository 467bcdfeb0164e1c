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
from ramify.train.sft.chats import Chat, read_chats
from ramify.train.sft.config import SftConfig
from ramify.train.sft.examples import forest_of
from ramify.train.sft.stream import Stream, held_out

SAMPLE = 256  # conversations that are looked at to say how long they are


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a run that need no model in memory."""

    path: Path
    model: Path
    renderer: Renderer
    chats: Sequence[Chat]
    validation: Sequence[Chat]
    stream: Stream
    identity: dict[str, Any]
    """What makes this run itself: the configuration's, and which conversations were found."""

    def steps(self, config: SftConfig, done: int = 0, seen: int = 0) -> int:
        """The steps of the whole run, given that `done` are done and have seen so many examples."""
        total = done + self.stream.steps_after(seen, config.batch_size)
        return total if config.max_steps is None else min(total, config.max_steps)


def plan_of(config: SftConfig) -> Plan:
    """Read the data and find the model. Raises ConfigInvalid or ModelNotFound."""
    model = resolve_model_path(config.model.name)
    renderer = load_renderer(model, config.renderer)
    chats = read_chats(read_rows(config.data.path, config.data.part), config.data)
    train, apart = held_out(len(chats), config.validation.share, config.seed)
    if config.validation.share and not (train and apart):
        nothing = "measure" if train else "train on"
        raise ConfigInvalid(f"validation.share: {config.validation.share} of {len(chats)} leaves none to {nothing}")
    validation = [chats[at] for at in apart]
    if config.validation.path is not None:
        apart = config.data.model_copy(update={"path": config.validation.path})
        validation = read_chats(read_rows(config.validation.path, config.validation.part), apart)
    chosen = [chats[at] for at in train]
    name = config.name or default_run_name(config.data.path, config.model.name, config.identity)
    stream = Stream(len(chosen), config.epochs, config.seed)
    identity = {**config.identity, "conversations": {"count": len(chats), "digest": _digest(chats)}}
    return Plan(config.output / name, model, renderer, chosen, validation, stream, identity)


def _digest(chats: Sequence[Chat]) -> str:
    """A short name of these conversations in this order: a position in the stream means nothing in others."""
    found = hashlib.sha256()
    for chat in chats:
        found.update(msgspec.msgpack.encode((chat.messages, chat.tools), enc_hook=str))
    return found.hexdigest()[:12]


def lines_of(plan: Plan, config: SftConfig) -> list[str]:
    """The plan for people."""
    looked = [(str(at), plan.chats[at]) for at in plan.stream.take(0, min(SAMPLE, len(plan.chats)))]
    alone = [forest_of([each], plan.renderer, config.data.roles, config.seq_len) for each in looked]
    together = forest_of(looked[: config.batch_size], plan.renderer, config.data.roles, config.seq_len)
    lengths = np.array([forest.num_tokens for forest in alone])
    learned = sum(forest.count_by_component()["ce"] for forest in alone) / max(1, lengths.sum())
    cut = sum(forest.dropped.num_truncated_tokens > 0 for forest in alone)
    ratio = together.flat_tokens / max(1, together.num_tokens)
    return [
        f"would train {config.model.name} from {plan.model} into {plan.path}",
        f"{len(plan.chats)} conversations, {len(plan.validation)} more to measure; "
        f"{plan.steps(config)} steps of {config.batch_size}",
        f"of {len(alone)} looked at: {lengths.mean():.0f} tokens on average, {lengths.max()} at most, "
        f"{learned:.0%} of them learned, {cut} cut at {config.seq_len}",
        f"a batch is {together.num_tokens} tokens; laid flat it would be {ratio:.2f} times as many",
    ]
