"""Sampling parameters and completions, the same for every engine."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from ramify.trace import Usage, VersionSpan

FinishReason = Literal["stop", "length", "abort"]


class ClientSampling(Struct, frozen=True):
    """Sampling parameters. Temperature 0 is greedy. The server's own stop ids apply unless `ignore_eos` is set."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = {}
    grammar: str | None = None  # the grammar that the tokens must follow, in the Lark syntax of llguidance

    def to_dict(self) -> dict[str, Any]:
        """Return `sampling_params` of the generate endpoint; parameters that have no effect are omitted."""
        fields: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens, "logprobs": 0}
        if self.top_p < 1:
            fields["top_p"] = self.top_p
        if self.top_k > 0:
            fields["top_k"] = self.top_k
        if self.min_p > 0:
            fields["min_p"] = self.min_p
        if self.seed is not None:
            fields["seed"] = self.seed
        if self.stop_ids:
            fields["stop_token_ids"] = self.stop_ids
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.logit_bias:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        if self.grammar is not None:
            fields["structured_outputs"] = {"grammar": self.grammar}
        return fields


class SampledTokens(Struct, frozen=True, eq=False):
    """The tokens of a sample, and in `version_spans` the versions of the weights that sampled them."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]

    def truncate(self, num_tokens: int) -> "SampledTokens":
        """Return the first `num_tokens` tokens, which are an exact sample too."""
        spans: list[VersionSpan] = []
        remaining = num_tokens
        for span in self.version_spans:
            if share := min(span.count, remaining):
                spans.append(replace(span, count=share))
            remaining -= share
        return SampledTokens(self.token_ids[:num_tokens], self.logprobs[:num_tokens], tuple(spans))


class Completion(SampledTokens, frozen=True, eq=False):
    """One sample of an engine."""

    finish_reason: FinishReason
    usage: Usage
    server: str  # the URL of the server that sampled it


NO_SAMPLED_TOKENS = SampledTokens(np.empty(0, np.int32), np.empty(0, np.float32), ())
