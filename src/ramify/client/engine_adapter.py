"""What every engine can be told, whatever it calls it: the one interface behind which engines differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.client.completion import Completion
from ramify.client.generate_api import GenerateRequest
from ramify.model.version import PolicyVersion

KVMode = Literal["recompute", "keep"]
PauseMode = Literal["keep", "abort"]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a server says about itself. The version is None where the engine does not know it."""

    model: str
    max_model_len: int
    version: PolicyVersion | None


@dataclass(frozen=True, slots=True)
class WeightUpdateAck:
    """A server has applied a version. `seconds` is how long its requests stood still."""

    server: str
    version: PolicyVersion
    seconds: float


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A published directory to be applied. The path is the server's: it must see the same file system."""

    directory: Path
    version: PolicyVersion
    kv_mode: KVMode = "recompute"


class UnknownWeights(Exception):
    """The server sampled from weights whose version nobody knows: it was restarted, or left half-way in an update."""


class EngineAdapter(Protocol):
    """One server, spoken to in its own words. `version` is what its next token will come from."""

    version: PolicyVersion

    async def describe(self) -> ModelCard:
        """What the server says about itself now."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Take one sample."""
        ...

    async def score(self, token_ids: Sequence[int], cache_salt: str | None = None) -> NDArray[np.float32]:
        """The logprob of every token given those before it, at temperature 1; NaN for the first."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling; requests stay where they are (`keep`) or end with finish `abort`."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def update(self, update: WeightUpdate, *, paused: bool) -> float:
        """Apply a published version and return the seconds it took; requests in flight go on under it.

        With `paused` the caller has paused the server and wants it to stay so.
        """
        ...
