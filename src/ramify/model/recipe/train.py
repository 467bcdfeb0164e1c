"""Supervised training on conversations, loss on the replies alone."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from ramify.model.recipe.conversation import Conversation
from ramify.render import Renderer

IGNORED = -100


class Batch(NamedTuple):
    """Rows padded on the right; `labels` are the ids that are trained."""

    ids: torch.Tensor
    labels: torch.Tensor


def batches(source: Iterator[Conversation], renderer: Renderer, *, tokens: int, pool: int = 256) -> Iterator[Batch]:
    """Batches of about `tokens` tokens, each of rows of similar length: a pool is sorted, cut and shuffled."""
    shuffle = torch.Generator().manual_seed(0)
    while True:
        rows = sorted((row(made, renderer) for made in islice(source, pool)), key=lambda pair: len(pair[0]))
        cut: list[Batch] = []
        while rows:
            size = next((n for n in range(1, len(rows)) if (n + 1) * len(rows[n][0]) > tokens), len(rows))
            cut.append(Batch(*(_padded(side, value) for side, value in zip(zip(*rows[:size]), (0, IGNORED)))))
            del rows[:size]
        yield from (cut[i] for i in torch.randperm(len(cut), generator=shuffle).tolist())


def row(made: Conversation, renderer: Renderer) -> tuple[torch.Tensor, torch.Tensor]:
    """A conversation up to its last reply, as ids and labels: of each reply, its body and the token that ends it."""
    rendered = renderer.render(made.messages, made.tools, generate=False)
    ids = torch.from_numpy(rendered.ids).long()
    labels = torch.full_like(ids, IGNORED)
    end = 0
    for span in rendered.spans:
        if span.message.role == "assistant":
            start, end = span.body[0], span.body[1] + 1
            labels[start:end] = ids[start:end]
    return ids[:end], labels[:end]


def _padded(rows: tuple[torch.Tensor, ...], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def train(
    model: torch.nn.Module,
    source: Iterator[Batch],
    steps: int,
    *,
    lr: float,
    warmup: int,
    decay: bool,
    report: Callable[[float], None],
) -> None:
    """AdamW with a short warmup, and with `decay` down to zero over the last half; `report` gets every step's loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step, batch in enumerate(islice(source, steps), 1):
        scale = min(1.0, step / warmup, 2 * (steps - step + 1) / steps if decay else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        logits = model(batch.ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(loss.item())
    model.eval()
