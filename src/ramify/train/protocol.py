"""Requests of the trainer to the orchestrator, and its replies. `docs/trainer.md` describes the protocol.

Each class is the body of the RPC that its docstring names; `ramify.processes.wire` carries it. Importable without
torch.
"""

import msgspec

from ramify.train.batch import PackSpec


class RegisterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`hello`: a rank registers. Without an incarnation it is the first rank of a new trainer and gets the next one."""

    rank: int
    world_size: int = msgspec.field(name="ranks")
    pack_spec: PackSpec = msgspec.field(name="laying")
    incarnation: int | None = None
    start_token: int | None = None
    """The number of the fencing token of this start of the trainer by a cluster launcher; None without one."""


class RegisterReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reply to `hello`: where the history ends, and who the trainer is."""

    committed: int = 0  # steps in the history: load the checkpoint of this step and remove newer ones
    checkpoint: str = ""  # the directory of that checkpoint, by name; empty before the first one
    digest: str = ""  # the digest with which it was committed; empty if none was stored
    incarnation: int = 0
    policy: str = "policy"
    steps: int | None = None  # the length of the run; None if it is open
    run: str = ""  # the id of the run, which distinguishes it from others of the same name


class RankRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sender, which every later request names."""

    rank: int
    incarnation: int


class BatchRequest(RankRequest, frozen=True, kw_only=True):
    """`batch`: the reply holds a blob with this rank's share, or none after the last batch."""

    step: int


class TrainedRequest(RankRequest, frozen=True, kw_only=True):
    """`trained`: a step is done; the reply says whether to save a checkpoint now."""

    step: int
    metrics: dict[str, float]


class PublishedRequest(RankRequest, frozen=True, kw_only=True):
    """`published`: a version can be loaded; the reply lists the versions that engines still need, or is null."""

    version: tuple[str, int, int]
    path: str


class CopiedRequest(RankRequest, frozen=True, kw_only=True):
    """`copied`: the trainer is about to change its weights, which engines copy from its memory.

    The reply comes once none copies the version, and is empty; or it says which engines have not copied it in time.
    """

    version: tuple[str, int, int]


class CheckpointRequest(RankRequest, frozen=True, kw_only=True):
    """`checkpoint`: the checkpoint of `step` is complete; the reply comes once it is the end of the history.

    It holds the values of the metric `checkpoint.keep_best` by step.
    """

    step: int
    directory: str
    digest: str


class UnsavedRequest(RankRequest, frozen=True, kw_only=True):
    """`unsaved`: the disk had no room for the checkpoint of `step`; training continues without it."""

    step: int
    message: str
