"""`python -m tools.tiny`: build a packaged model again, or measure what a model can do."""

import argparse
import os
import sys
from pathlib import Path

from ramify.core.errors import ConfigInvalid, RamifyError


def main() -> int:
    """Build or measure, as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="train the model from its recipe")
    build.add_argument(
        "--model", default="tiny", choices=["tiny", "tiny-vision", "tiny-hybrid"], help="which model to build"
    )
    build.add_argument("--seed", type=int, default=0, help="0 is the model that ships")
    build.add_argument("-o", dest="directory", metavar="DIR", type=Path, required=True, help="where to write it")
    build.add_argument("--force", action="store_true", help="replace DIR if it exists")
    measure = actions.add_parser("measure", help="measure the figures of a model (a minute for tiny)")
    measure.add_argument("name", metavar="NAME", help="a packaged model, a directory, or a cached Hugging Face id")
    options = parser.parse_args()
    try:
        _build(options) if options.action == "build" else _measure(options.name)
    except RamifyError as error:
        print(f"{error.name}: {error.message}", file=sys.stderr)
        return 2
    return 0


def _build(options: argparse.Namespace) -> None:
    if options.directory.exists() and not options.force:
        raise ConfigInvalid(f"{options.directory} exists; --force replaces it")
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: one thread chosen later gives other bits
    from ramify.core.display import choose_display
    from ramify.run.store import wrap_storage_errors
    from ramify.train.sft.display import SftContent
    from tools.tiny.build import build_model

    with wrap_storage_errors(options.directory):
        build_model(options.model, options.directory, seed=options.seed, display=lambda: choose_display(SftContent()))


def _measure(name: str) -> None:
    from ramify.model.images import load_image_family
    from ramify.model.resolve import resolve_model_path

    path = resolve_model_path(name)
    from tools.tiny.build import RECIPES  # loads torch, which a wrong name does not have to wait for

    recipe = RECIPES["tiny-vision" if load_image_family(path) is not None else "tiny"]
    for figure, value in recipe.measure(path, 0).items():
        print(f"{figure:20} {value:.3f}")


if __name__ == "__main__":
    sys.exit(main())
