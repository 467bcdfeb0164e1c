"""The dtype that a model is computed in, and which of our operators in C this machine has for it.

Most checkpoints are stored in bfloat16. A CPU without instructions for it emulates every product, 4 to 50 times slower
than float32, and torch logs a C++ stack meanwhile. So `auto` takes the checkpoint's dtype only if the device has
instructions for it, and float32 otherwise. If bfloat16 is requested by name it is used, and the reason says that it is
slow.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from ramify.model.kernels.cpu import CLibraryUnavailable, build_cpu_ops
from ramify.model.kernels.cpu.c_library import read_cpu_features
from ramify.model.kernels.decoder_ops import DecoderSizes, DecoderWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BFLOAT16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}  # as Linux names them: the first two on x86-64, the last on Arm
PROBE_SIZES = DecoderSizes(heads=1, kv_heads=1, head_dim=32, hidden=32, inner=32, eps=1e-5, scaling=32**-0.5)


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The dtype that a model is computed in, and the reason in a few words."""

    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} ({self.reason})"


def choose_dtype(requested: str, stored: Any, device: torch.device) -> DtypeChoice:
    """Choose the dtype for a model whose checkpoint is in dtype `stored`, a name or a torch.dtype.

    `requested` is a name, or `auto`.
    """
    emulated = device.type == "cpu" and not cpu_has_bfloat16()
    if requested != "auto":
        if emulated and requested == "bfloat16":
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # torch's own, with a C++ stack
            return DtypeChoice(torch.bfloat16, "requested, but this CPU emulates it: float32 is faster")
        return DtypeChoice(DTYPES[requested], "requested")
    if stored not in (torch.bfloat16, "bfloat16"):
        return DtypeChoice(torch.float32, "the type of the checkpoint, or the nearest wider one")
    if emulated:
        return DtypeChoice(torch.float32, "the checkpoint is in bfloat16, which this CPU cannot multiply")
    return DtypeChoice(torch.bfloat16, "the type of the checkpoint")


def disable_tf32_convolutions() -> None:
    """Compute float32 convolutions in float32, in the whole process: for processes of our own, not for a notebook.

    By default torch uses TF32 in float32 convolutions but not in matrix products. If only `conv.fp32_precision` were
    set, torch would raise an error whenever a library reads `allow_tf32`.
    """
    torch.backends.cudnn.allow_tf32 = False


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU has instructions for products in bfloat16."""
    features = [
        line.partition(":")[2].split() for line in read_cpu_features() if line.startswith(("flags", "Features"))
    ]
    return any(BFLOAT16_FEATURES & set(names) for names in features)


def describe_cpu() -> dict[str, str]:
    """Describe for `ramify doctor` what a checkpoint in bfloat16 is computed in here, and which operators are in C."""
    choice = choose_dtype("auto", torch.bfloat16, torch.device("cpu"))
    return {"dtype": str(choice)} | {name: _describe_ops(dtype) for name, dtype in DTYPES.items()}


def _describe_ops(dtype: torch.dtype) -> str:
    """Build the operators for a minimal model and return their name, or the reason why there are none."""
    number, rope_table = torch.ones(1, dtype=dtype), torch.ones(1, 2 * PROBE_SIZES.head_dim, dtype=dtype)
    weights = DecoderWeights(number, rope_table, number, number, None, layers=[])
    try:
        return build_cpu_ops(PROBE_SIZES, weights).description
    except CLibraryUnavailable as reason:
        return f"torch ({reason})"
