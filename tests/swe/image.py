"""Makes the container image of `make test-swe`: Debian, pytest, and a Git repository with a history and a real bug.

The repository is inflection, a small library from PyPI. Every release is a commit with a tag. Release 0.3.0 says
"humen" and "potatos"; release 0.3.1 fixes both and brings the tests. The work tree is at 0.3.0, and the history has the
fix. Images of the three datasets differ in what they hold besides the repository:

    BASE_IMAGE   /testbed with .venv, and /opt/miniconda3/bin/activate, as SWE-bench and Scale-SWE have them
    R2E_IMAGE    the same with the hidden tests in /r2e_tests
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

BASE_IMAGE = "localhost/ramify-swe-test:base"
R2E_IMAGE = "localhost/ramify-swe-test:r2e"
RELEASES = ("0.2.0", "0.2.1", "0.3.0", "0.3.1", "0.4.0")
BASE, FIX = "v0.3.0", "v0.3.1"
TEST_FILE = "test_inflection.py"
SUITE = "bookworm"
PACKAGES = "git,python3,python3-venv,python3-pytest,python-is-python3"
UNNEEDED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")
ACTIVATE = "export PATH=/testbed/.venv/bin:$PATH\n"  # stands for conda's script
COMMAND_DEADLINE = 900  # seconds
COMMIT_DATE = "2015-05-03T12:00:00+00:00"


def main(engine: str, folder: Path, debian: str | None) -> Path:
    """Make the repository in `folder`, and the images unless the engine has them; return the repository."""
    folder.mkdir(parents=True, exist_ok=True)
    repository = make_repository(folder)
    has_images = all(
        subprocess.run([engine, "image", "inspect", name], capture_output=True).returncode == 0
        for name in (BASE_IMAGE, R2E_IMAGE)
    )
    if not has_images:
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            root = Path(directory, "root")
            make_root(root, repository, debian)
            import_image(engine, root)
            add_tests(engine, repository, Path(directory, "context"))
    return repository


def make_repository(folder: Path) -> Path:
    """Return a repository with one commit for each release, and the work tree of `BASE`."""
    repository = folder / "inflection"
    if repository.exists():
        return repository
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        unfinished = Path(directory, "inflection")
        unfinished.mkdir()
        run_git(unfinished, "init", "-q", "-b", "master", ".")
        for release in RELEASES:
            for path in unfinished.iterdir():
                if path.name != ".git":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            extract_release(release, Path(directory), unfinished)
            run_git(unfinished, "add", "-A")
            run_git(unfinished, "commit", "-q", "-m", f"Release {release}")
            run_git(unfinished, "tag", f"v{release}")
        run_git(unfinished, "checkout", "-q", "-b", "work", BASE)
        unfinished.rename(repository)
    return repository


def extract_release(release: str, folder: Path, target: Path) -> None:
    """Write the files of a release from PyPI, without what was made for its archive."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        ":all:",
    ]
    run([*command, f"inflection=={release}", "--dest", str(folder)])
    with tarfile.open(folder / f"inflection-{release}.tar.gz") as archive:
        for member in archive.getmembers():
            member.name = member.name.partition("/")[2]
            if member.isfile() and not member.name.startswith("inflection.egg-info") and member.name != "PKG-INFO":
                archive.extract(member, target, filter="data")


def make_root(root: Path, repository: Path, debian: str | None) -> None:
    """Make the file system of the image from Debian packages."""
    debootstrap = shutil.which("debootstrap")
    if debootstrap is None:
        raise SystemExit("debootstrap is needed: apt-get install debootstrap")
    run([debootstrap, "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), *([debian] if debian else [])])
    for path in UNNEEDED:
        shutil.rmtree(root / path, ignore_errors=True)
    shutil.copytree(repository, root / "testbed", symlinks=True)
    run(["chown", "-R", "0:0", str(root / "testbed")])
    run(["chroot", str(root), "python3", "-m", "venv", "--system-site-packages", "--without-pip", "/testbed/.venv"])
    (root / "testbed" / "run_tests.sh").write_text(".venv/bin/python -m pytest -rA r2e_tests\n")
    activate = root / "opt" / "miniconda3" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(ACTIVATE)


def import_image(engine: str, root: Path) -> None:
    """Import a file system into the engine as `BASE_IMAGE`."""
    with subprocess.Popen([engine, "import", "-", BASE_IMAGE], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        run(["tar", "-C", str(root), "-c", "--exclude=./dev/*", "."], stdout=process.stdin)
        process.stdin.close()
        if process.wait(COMMAND_DEADLINE):
            raise SystemExit(f"{engine} import failed")


def add_tests(engine: str, repository: Path, context: Path) -> None:
    """Build `R2E_IMAGE`, which has the hidden tests."""
    context.mkdir()
    (context / "test_1.py").write_text(run_git(repository, "show", f"{FIX}:{TEST_FILE}"))
    (context / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nCOPY test_1.py /r2e_tests/test_1.py\n")
    run([engine, "build", "--pull=false", "--quiet", "-t", R2E_IMAGE, str(context)])


def run_git(repository: Path, *args: str) -> str:
    """Run git in a repository and return its output."""
    identity = {
        f"GIT_{role}_{part}": value
        for role in ("AUTHOR", "COMMITTER")
        for part, value in (("NAME", "upstream"), ("EMAIL", "upstream@localhost"), ("DATE", COMMIT_DATE))
    }
    command = ["git", "-c", "commit.gpgsign=false", *args]
    return subprocess.run(
        command,
        cwd=repository,
        env={**os.environ, **identity},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=COMMAND_DEADLINE,
    ).stdout


def run(command: list[str], **options: object) -> None:
    """Run a command. Raises CalledProcessError if it fails."""
    subprocess.run(command, check=True, timeout=COMMAND_DEADLINE, **{"stdout": subprocess.DEVNULL, **options})  # type: ignore[call-overload]
