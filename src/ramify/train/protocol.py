"""What trainer and orchestrator say to each other, as both sides read it. `docs/training.md` says what it means.

Each class is the body of the request of that name; `ramify.wire` carries it. Importable without torch.
"""

import msgspec

from ramify.train.batch import PackSpec


class RegisterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank comes. Without an incarnation it is the first rank of a new trainer, and gets the next."""

    rank: int
    ranks: int
    laying: PackSpec
    incarnation: int | None = None


class RegisterReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to hello: where the history ends, and who the trainer is."""

    committed: int = 0  # steps in the history: load this checkpoint, forget newer ones
    incarnation: int = 0
    policy: str = "policy"
    steps: int | None = None  # of the whole run, where a schedule needs to know


class RankRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every later request holds: who asks."""

    rank: int
    incarnation: int


class BatchRequest(RankRequest, frozen=True, kw_only=True):
    """`batch`: answered by a blob, this rank's share; by none if there is no more."""

    step: int


class TrainedRequest(RankRequest, frozen=True, kw_only=True):
    """`trained`: answered by whether a checkpoint is wanted now."""

    step: int
    metrics: dict[str, float]


class PublishedRequest(RankRequest, frozen=True, kw_only=True):
    """`published`: answered by the versions that engines still need, or null."""

    version: tuple[str, int, int]
    path: str


class CheckpointRequest(RankRequest, frozen=True, kw_only=True):
    """`checkpoint`: the checkpoint is in its place; answered when it is the end of the history."""

    step: int
