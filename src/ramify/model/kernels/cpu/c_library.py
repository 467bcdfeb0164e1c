"""Compiling and loading C libraries, and finding functions in the libraries that torch has loaded.

Libraries are cached by a hash of source, flags and CPU, so only the first start compiles. Whatever is missing raises
`CLibraryUnavailable` with the reason; the caller then uses PyTorch.
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
# These are the parts of -ffast-math, which would also disable subnormal numbers in the process that loads the library.


class CLibraryUnavailable(Exception):
    """The operators in C cannot be used; the message is the reason."""


@functools.cache
def load_c_library(source: Path, *definitions: str) -> ctypes.CDLL:
    """Compile a C file with `NAME=VALUE` definitions, unless it is cached, and load it. Raises CLibraryUnavailable."""
    compiler_name = os.environ.get("CC", "cc")
    compiler = shutil.which(compiler_name)
    if compiler is None:
        raise CLibraryUnavailable(f"no C compiler: {compiler_name} was not found")
    command = [compiler, *COMPILER_FLAGS, *(f"-D{definition}" for definition in definitions)]
    cached_path = _cache_path(source, command)
    with contextlib.suppress(OSError):  # missing, truncated or unreadable: compile it
        return ctypes.CDLL(str(cached_path))
    with tempfile.TemporaryDirectory() as directory:
        library_path = Path(directory) / cached_path.name
        try:
            files = [str(source), "-lm", "-o", str(library_path)]
            subprocess.run([*command, *files], check=True, capture_output=True, timeout=COMPILE_TIMEOUT)
            with contextlib.suppress(OSError):  # it cannot be cached: the next start compiles again
                cached_path.parent.mkdir(parents=True, exist_ok=True)
                partial_path = cached_path.with_name(f".{cached_path.name}.{os.getpid()}")
                shutil.copy(library_path, partial_path)
                partial_path.replace(cached_path)
            return ctypes.CDLL(str(library_path))
        except (OSError, subprocess.SubprocessError) as error:
            raise CLibraryUnavailable(f"{compiler_name} failed: {error}") from error


@functools.cache
def find_torch_symbol(name: str) -> int:
    """Return the address of a function in the libraries that torch has loaded. Raises CLibraryUnavailable."""
    try:
        libraries = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(getattr(libraries, name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        raise CLibraryUnavailable(f"torch's libraries have no {name}") from error


def declare_arguments(function: Any, argument_types: str) -> Any:
    """Declare a C function that returns nothing; each letter is an argument: p for a pointer, i for an int64."""
    types = {"p": ctypes.c_void_p, "i": ctypes.c_int64}
    function.argtypes, function.restype = [types[letter] for letter in argument_types], None
    return function


def read_cpu_features() -> list[str]:
    """Return the description of the CPU that `-march=native` depends on, as sorted lines."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return sorted({line for line in lines if line.startswith(("flags", "model", "Features", "CPU"))})
    return [platform.machine(), platform.processor()]


def _cache_path(source: Path, command: list[str]) -> Path:
    fingerprint = "\n".join([source.read_text(), *command, *read_cpu_features()])
    try:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise CLibraryUnavailable("no home directory to cache them in; set XDG_CACHE_HOME") from error
    return cache_home / "ramify" / f"{source.stem}-{hashlib.sha256(fingerprint.encode()).hexdigest()[:16]}.so"
