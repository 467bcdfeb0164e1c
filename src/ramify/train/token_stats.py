"""The trainer's logprob and entropy of every trained token, stored with the batch of its step, to be looked at later.

Each rank writes one NumPy archive (`.npz`) per step, with a row per trained token. A token is identified by its trace,
its node and its depth, the number of tokens before it on its path. File names hold the token of the trainer, so that a
replaced trainer never writes over the values of its successor; the ledger knows whose count (`get_step_trainer`).
"""

import io
import re
import zipfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ramify.core.errors import DataCorrupt
from ramify.core.files import write_atomically
from ramify.run.fencing.token import TOKEN_PATTERN, FencingToken
from ramify.run.store import storage_call
from ramify.trace import Forest, Trace
from ramify.trace.columns import Float32Array, Int32Array

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_STATS_DIR = "token_stats"  # in the run directory
FILE_NAME = "step_{step:06}-{token}.rank_{rank}.npz"
_TOKEN_PATTERN = re.compile(rf"-({TOKEN_PATTERN})\.rank_")


@dataclass(frozen=True, slots=True, eq=False)
class TokenStats:
    """One row per trained token of a step, by column; `trace` is an index into `trace_ids`."""

    trace_ids: npt.NDArray[np.str_]
    trace: Int32Array
    node: Int32Array
    depth: Int32Array
    logprob: Float32Array
    entropy: npt.NDArray[np.float16]

    def select_trace(self, trace_id: str) -> "TokenStats":
        """Return the rows of one trace; looking for its nodes in them is quicker than in the whole step's."""
        rows = self._find_rows(trace_id)
        return TokenStats(
            self.trace_ids,
            self.trace[rows],
            self.node[rows],
            self.depth[rows],
            self.logprob[rows],
            self.entropy[rows],
        )

    def select_node(self, trace: Trace, node: int) -> tuple[Float32Array, Float32Array]:
        """Return logprob and entropy of each token of a node; NaN for tokens that were not trained."""
        graph = trace.graph
        size = graph.token_stop(node) - graph.token_start(node)
        logprobs, entropies = np.full((2, size), np.nan, np.float32)
        rows = self._find_rows(trace.id)
        rows = rows[self.node[rows] == node]
        offsets = self.depth[rows] - graph.depth(node)
        logprobs[offsets], entropies[offsets] = self.logprob[rows], self.entropy[rows]
        return logprobs, entropies

    def _find_rows(self, trace_id: str) -> npt.NDArray[np.intp]:
        return np.flatnonzero(np.isin(self.trace, np.flatnonzero(self.trace_ids == trace_id)))


class TokenStatsWriter:
    """Collects the values of a step's packs, and writes them once the step is done."""

    def __init__(self, run: Path, rank: int) -> None:
        self._directory, self._rank = run / TOKEN_STATS_DIR, rank
        self._packs: list[tuple[Forest, Tensor, Tensor]] = []

    def add_pack(self, pack: Forest, logprob: "Tensor", entropy: "Tensor") -> None:
        """Keep the values of a pack's entries, on the device until `write`."""
        if len(pack.targets):
            self._packs.append((pack, logprob, entropy))

    def clear(self) -> None:
        """Drop what was collected since the last `write`."""
        self._packs.clear()

    def write(self, step: int, token: FencingToken) -> None:
        """Write what was collected under the token of this trainer, and delete the files of the trainers before it.

        Raises StorageFull.
        """
        stats = [_build_stats(*pack) for pack in self._packs]
        self._packs.clear()
        archive = io.BytesIO()
        np.savez_compressed(archive, allow_pickle=False, **_concat_columns(stats))
        with storage_call(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / FILE_NAME.format(step=step, token=token, rank=self._rank)
            write_atomically(path, archive.getvalue())
            if self._rank == 0:
                self._remove_earlier(step, token)

    def _remove_earlier(self, step: int, token: FencingToken) -> None:
        """Remove what earlier trainers, perhaps with more ranks, have written for a step: it does not count."""
        for path in self._directory.glob(FILE_NAME.format(step=step, token="*", rank="*")):
            match = _TOKEN_PATTERN.search(path.name)
            if match is not None and FencingToken.parse(match[1]) < token:
                path.unlink(missing_ok=True)


def list_token_stats(run: Path, step: int, incarnation: int) -> list[Path]:
    """Return the files that the trainer of `incarnation` wrote for a step, one per rank; none if it recorded none."""
    token = FencingToken.from_number(incarnation)
    return sorted((run / TOKEN_STATS_DIR).glob(FILE_NAME.format(step=step, token=token, rank="*")))


def read_token_stats(run: Path, step: int, incarnation: int) -> TokenStats:
    """Return the values of all tokens that the trainer of `incarnation` trained in a step.

    Raises DataCorrupt if they are missing or damaged.
    """
    paths = list_token_stats(run, step, incarnation)
    if not paths:
        problem = f"{run} has no token stats of step {step} by trainer {FencingToken.from_number(incarnation)}"
        raise DataCorrupt(f"{problem}; expected trainer.record_token_stats = true")
    try:
        parts: list[TokenStats] = []
        for path in paths:
            with np.load(path, allow_pickle=False) as archive:
                parts.append(TokenStats(*(archive[column.name] for column in fields(TokenStats))))
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataCorrupt(f"the token stats of step {step} of {run} cannot be read: {error}") from error
    return TokenStats(**_concat_columns(parts))


def _build_stats(pack: Forest, logprob: "Tensor", entropy: "Tensor") -> TokenStats:
    targets, segments = pack.targets, pack.segments
    segment = np.searchsorted(segments["start"], targets.token_index, "right") - 1
    return TokenStats(
        np.array(pack.traces, np.str_),
        pack.expand_call_column("trace"),
        pack.expand_call_column("node"),
        segments["depth"][segment] + targets.token_index - segments["start"][segment],
        logprob.float().cpu().numpy(),
        entropy.half().cpu().numpy(),
    )


def _concat_columns(parts: list[TokenStats]) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of all parts; traces are numbered across them."""
    trace_ids, inverse = np.unique(
        np.concatenate([np.empty(0, "<U1"), *(part.trace_ids for part in parts)]), return_inverse=True
    )
    offsets = np.cumsum([0, *(len(part.trace_ids) for part in parts)])
    traces = [inverse[part.trace + offset] for part, offset in zip(parts, offsets.tolist())]
    dtypes = {"node": np.int32, "depth": np.int32, "logprob": np.float32, "entropy": np.float16}
    columns: dict[str, npt.NDArray[Any]] = {"trace_ids": trace_ids}
    columns["trace"] = np.concatenate([np.empty(0, np.int32), *traces]).astype(np.int32)
    for name, dtype in dtypes.items():
        columns[name] = np.concatenate([np.empty(0, dtype), *(getattr(part, name) for part in parts)]).astype(dtype)
    return columns
