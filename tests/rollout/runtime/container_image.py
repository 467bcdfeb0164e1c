"""Make an image for the container tests from programs of this machine: a static busybox and this Python.

    python -m tests.rollout.runtime.container_image ENGINE

No registry is needed. The image is imported under the name `IMAGE`.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

IMAGE = "localhost/ramify-test:latest"
IMPORT_TIMEOUT = 300.0  # seconds
EXCLUDED_NAMES = (  # directories of the standard library that tests do not need
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "lib2to3",
    "ensurepip",
    "__pycache__",
    "turtledemo",
)


def main(engine: str) -> None:
    """Write the image as a tar archive to the engine."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise SystemExit("busybox is needed, linked statically: apt-get install busybox-static")
    command = [engine, "import", "-", IMAGE]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        with tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            _add_busybox(archive, busybox)
            _add_python(archive)
        process.stdin.close()
        if process.wait(IMPORT_TIMEOUT):
            raise SystemExit(f"{' '.join(command)} failed")


def _add_busybox(archive: tarfile.TarFile, busybox: str) -> None:
    for name, mode in (("etc", 0o755), ("root", 0o700), ("tmp", 0o1777), ("bin", 0o755), ("proc", 0o555)):
        _add_entry(archive, name, tarfile.DIRTYPE, mode)
    archive.add(os.path.realpath(busybox), "bin/busybox")
    for name in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            _add_entry(archive, f"bin/{name}", tarfile.SYMTYPE, 0o777, "busybox")
    for name, text in (
        ("passwd", "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/tmp:/bin/sh\n"),
        ("group", "root:x:0:\n"),
    ):
        info = tarfile.TarInfo(f"etc/{name}")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text.encode()))


def _add_python(archive: tarfile.TarFile) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    program = Path(sys.base_prefix, "bin", version).resolve()
    library = Path(sysconfig.get_paths(vars={"base": sys.base_prefix})["stdlib"])
    archive.add(program, str(program).lstrip("/"))
    _add_entry(archive, "bin/python3", tarfile.SYMTYPE, 0o777, str(program))
    archive.add(library, str(library).lstrip("/"), filter=_exclude_unneeded)
    modules = [str(path) for path in library.glob("lib-dynload/*.so")]
    listing = subprocess.run(["ldd", program, *modules], capture_output=True, text=True, check=True).stdout
    for path in sorted(set(re.findall(r"(/\S+) \(0x", listing))):
        archive.add(os.path.realpath(path), path.lstrip("/"))


def _add_entry(archive: tarfile.TarFile, name: str, kind: bytes, mode: int, target: str = "") -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname = kind, mode, target
    archive.addfile(info)


def _exclude_unneeded(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(info.name).parts
    return None if any(part in EXCLUDED_NAMES or part.startswith("config-") for part in parts) else info


if __name__ == "__main__":
    main(sys.argv[1])
