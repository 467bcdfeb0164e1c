"""Running steps of models with recurrent layers by the model's own code, where there is no fused forward.

A recurrent layer reads its row from left to right, so the chunks of a step cannot be one flat row. Chunks with the same
number of tokens are one forward pass, a row for each; a decode step is a single one. Every row starts with the state of
its request and leaves the state after its last token. Attention layers use the paged cache, as in `ModelRunner`.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from ramify.infer.model_runner import ModelRunner, count_logit_rows
from ramify.infer.scheduler import ScheduledChunk
from ramify.model.kernels.paged_attention import AttentionMetadata, AttentionTile
from ramify.model.recurrent_state import StepCache


class HybridModelRunner(ModelRunner):
    """A `ModelRunner` for models with recurrent layers that have no fused forward."""

    def run(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[ScheduledChunk], Tensor]:
        """Compute the chunks; return them in the order of their rows, and the logits."""
        chunks_by_row = sorted(chunks, key=lambda chunk: (chunk.num_tokens, chunk.stop))
        groups = groupby(chunks_by_row, key=lambda chunk: chunk.num_tokens)
        return chunks_by_row, torch.cat([self._run_rows(list(rows)) for _, rows in groups])

    def _run_rows(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Compute chunks with the same number of tokens; return the logits that are needed."""
        shape = len(chunks), chunks[0].num_tokens
        ids, positions, slots = (self._to_device(values) for values in self._token_inputs(chunks))
        metadata = AttentionMetadata(self.pool, slots, self._build_tiles(chunks))
        state_slots = self._to_device([chunk.request.state_slot for chunk in chunks])
        num_logits = [count_logit_rows(chunk) for chunk in chunks]
        logits = self._forward_rows(ids.view(shape), positions.view(shape), metadata, state_slots, max(num_logits))
        return torch.cat([row[max(num_logits) - count :] for row, count in zip(logits, num_logits)])

    def _forward_rows(
        self, ids: Tensor, positions: Tensor, metadata: AttentionMetadata, state_slots: Tensor, num_logits: int
    ) -> Tensor:
        """Return the logits of the last `num_logits` tokens of each row; the states are changed."""
        num_tokens = ids.shape[1]
        assert self.states is not None
        states = self.states.load(state_slots)
        cache = StepCache(self.model.shape.num_layers, self.states.specs, states)
        output = self.model.module(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.arange(num_tokens - num_logits, num_tokens, device=ids.device),
            attn_metadata=metadata,
        )
        self.states.store(state_slots, states)
        return output.logits

    def _compute_check_logits(self, ids: Tensor) -> Tensor:
        """Return the logits of a sequence that is computed in up to three chunks, the last of one token."""
        assert self.states is not None
        num_tokens, slot = len(ids), self._to_device([0])
        blocks = self._to_device(range(-(-num_tokens // self.block_size)))
        bounds = sorted({0, max(0, num_tokens - 3), max(0, num_tokens - 1), num_tokens})
        logits: list[Tensor] = []
        self.states.clear(0)
        for start, stop in pairwise(bounds):
            positions = self._to_device(range(start, stop)).unsqueeze(0)
            tile = AttentionTile(0, stop - start, 1, stop - start, blocks, positions)
            metadata = AttentionMetadata(self.pool, positions[0], [tile])
            chunk_ids = ids[start:stop].unsqueeze(0)
            logits.append(self._forward_rows(chunk_ids, positions, metadata, slot, stop - start)[0])
            self._check_layers_attended(metadata)
        return torch.cat(logits)
