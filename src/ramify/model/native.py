"""C that is compiled when a model is loaded, and what it borrows from the libraries torch has loaded.

A library is kept under what it is made of and the processor it is made for, so only the first start compiles. Whatever
is missing on the way is `Unavailable`, with the reason: torch's own calls can do everything, slower.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

COMPILE_TIMEOUT = 60.0  # seconds
COMPILER_FLAGS = ["-O3", "-funroll-loops", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-ffinite-math-only"]
COMPILER_FLAGS += ["-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math"]
# together -ffast-math, which would also switch off subnormal numbers in the process that loads the library


class CLibraryUnavailable(Exception):
    """Why there are no operators in C."""


@functools.cache
def load_c_library(source: Path, *definitions: str) -> ctypes.CDLL:
    """The C file as a library, with `NAME=VALUE` definitions."""
    named = os.environ.get("CC", "cc")
    compiler = shutil.which(named)
    if compiler is None:
        raise CLibraryUnavailable(f"no C compiler: {named} is not there")
    command = [compiler, *COMPILER_FLAGS, *(f"-D{definition}" for definition in definitions), str(source), "-lm"]
    kept = _cache_path(source, command)
    with contextlib.suppress(OSError):  # not there yet, or of no use: cut short, or not ours to read
        return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / kept.name
        try:
            subprocess.run([*command, "-o", str(target)], check=True, capture_output=True, timeout=COMPILE_TIMEOUT)
            with contextlib.suppress(OSError):  # no room to keep it: the next start compiles again
                kept.parent.mkdir(parents=True, exist_ok=True)
                part = kept.with_name(f".{kept.name}.{os.getpid()}")
                shutil.copy(target, part)
                part.replace(kept)
            return ctypes.CDLL(str(target))
        except (OSError, subprocess.SubprocessError) as error:
            raise CLibraryUnavailable(f"{named} failed: {error}") from error


@functools.cache
def find_torch_symbol(name: str) -> int:
    """The address of a function in the libraries that torch has loaded."""
    try:
        libraries = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(getattr(libraries, name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        raise CLibraryUnavailable(f"torch's libraries have no {name}") from error


def declare_arguments(function: Any, argument_types: str) -> Any:
    """A C function whose arguments are pointers (p) and integers (i)."""
    known = {"p": ctypes.c_void_p, "i": ctypes.c_int64}
    function.argtypes, function.restype = [known[kind] for kind in argument_types], None
    return function


def read_cpu_features() -> list[str]:
    """What `-march=native` looks at."""
    with contextlib.suppress(OSError):
        told = Path("/proc/cpuinfo").read_text().splitlines()
        return sorted({line for line in told if line.startswith(("flags", "model", "Features", "CPU"))})
    return [platform.machine(), platform.processor()]


def _cache_path(source: Path, command: list[str]) -> Path:
    """Where the library lies for the next start."""
    made = "\n".join([source.read_text(), *command, *read_cpu_features()])
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise CLibraryUnavailable("no home folder to keep them in; set XDG_CACHE_HOME") from error
    return home / "ramify" / f"{source.stem}-{hashlib.sha256(made.encode()).hexdigest()[:16]}.so"
