"""Build the batches of an SFT run in a thread, each while the step before it is launched and computed.

A GPU accepts about a thousand kernels in advance. If it finishes them before the host has rendered, merged and packed
the conversations of the next step, it idles. Importable without torch.
"""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

from ramify.train.batch import Batch, PackSpec, pack_forests, split_across_ranks
from ramify.train.sft.config import SftConfig
from ramify.train.sft.conversations import SftConversation
from ramify.train.sft.forests import build_sft_forest
from ramify.train.sft.plan import SftPlan

SWITCH_INTERVAL = 0.001  # seconds; with Python's 5 ms a thread that launches kernels waits too long for the GIL


class SftBatch(NamedTuple):
    """One rank's batch of consecutive examples."""

    rank_batch: Batch
    end_position: int  # after its last example, in the order of the examples
    cut_tokens: int  # trained tokens beyond seq_len


class BatchExamples(NamedTuple):
    """The examples of one batch; `start_position` is where the first one stands in the order of all examples."""

    step: int
    start_position: int
    examples: Sequence[SftConversation]


class SftBatchBuilder:
    """Builds one rank's batches in a thread, one batch ahead of the caller.

    If a batch cannot be built, the caller gets the error when it asks for this batch. Leaving the context discards the
    batches that were not asked for, and joins the thread. Within it, threads take turns every SWITCH_INTERVAL.
    """

    def __init__(self, config: SftConfig, plan: SftPlan, pack_spec: PackSpec, rank: int, world_size: int) -> None:
        self.config, self.plan, self.pack_spec = config, plan, pack_spec
        self.rank, self.world_size = rank, world_size
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sft-batches")  # one: batches are built in order

    def __enter__(self) -> "SftBatchBuilder":
        self._previous_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL, self._previous_interval))
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._executor.shutdown(cancel_futures=True)
        finally:
            sys.setswitchinterval(self._previous_interval)

    def training_batches(self, first_step: int, position: int, total_steps: int) -> Iterator[SftBatch]:
        """Iterate over the batches of the steps from `first_step` on, the first of which starts at `position`."""
        return self._build_ahead(self._select_examples(first_step, position, total_steps))

    def validation_batches(self, step: int) -> Iterator[SftBatch]:
        """Iterate over the batches of the validation conversations."""
        examples, size = self.plan.validation, self.config.batch_size
        starts = range(0, len(examples), size)
        return self._build_ahead(BatchExamples(step, start, examples[start : start + size]) for start in starts)

    def _select_examples(self, first_step: int, position: int, total_steps: int) -> Iterator[BatchExamples]:
        for step in range(first_step, total_steps):
            indices = self.plan.order.indices_at(position, self.config.batch_size)
            yield BatchExamples(step, position, [self.plan.conversations[index] for index in indices])
            position += len(indices)

    def _build_ahead(self, batches: Iterator[BatchExamples]) -> Iterator[SftBatch]:
        """Yield each batch while the thread builds the next one."""

        def build_next() -> SftBatch | None:
            batch_examples = next(batches, None)  # in the thread too, so that an error here is raised for its batch
            return None if batch_examples is None else self._build(batch_examples)

        future = self._executor.submit(build_next)
        while (sft_batch := future.result()) is not None:
            future = self._executor.submit(build_next)
            yield sft_batch

    def _build(self, batch_examples: BatchExamples) -> SftBatch:
        config, pack_spec = self.config, self.pack_spec
        step, start_position, examples = batch_examples
        named_examples = [(str(number), example) for number, example in enumerate(examples, start_position)]
        forest = build_sft_forest(named_examples, self.plan.renderer, config.data.train_on_roles, config.seq_len)
        packs = pack_forests([forest], pack_spec.pack_tokens, pack_spec.layout)
        shares = split_across_ranks(Batch.from_packs(step, packs), pack_spec, self.world_size)
        return SftBatch(shares[self.rank], start_position + len(examples), forest.dropped.num_truncated_tokens)
