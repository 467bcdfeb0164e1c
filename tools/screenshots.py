"""Make the screenshots of the documentation from a real run: `python -m tools.screenshots OUTPUTS --run NAME`.

The run is that of `make rl` with groups of 16: `ramify rl @ examples/reverse_text/rl.toml --name reverse-16
--orchestrator.group_size 16 --orchestrator.batch_size 256 --max_steps 16`. Playwright has to be on PYTHONPATH (`make
test-view` installs it into .venvs/view/python). The images are reduced to a palette, which makes them small.
"""

import argparse
import io
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramify.view.export import INDEX_TIMEOUT
from ramify.view.queries import RunQueries
from ramify.view.rollout_index import RolloutFilter
from ramify.view.serving import serve_in_thread

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NUM_COLORS = 224
SETTLE = 600  # milliseconds until fonts and charts stand still
FOREST_HEIGHT = 560


def main() -> int:
    """Write the images."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("outputs", type=Path, help="folder of runs")
    flags.add_argument("--run", default="reverse-16", help="the run to show")
    flags.add_argument("--group", type=int, help="the group to show as a forest")
    flags.add_argument("--chromium", default="chromium", help="the browser")
    flags.add_argument("--folder", type=Path, default=IMAGES, help="where the images are written")
    options = flags.parse_args()
    rollout, group = choose(options.outputs, options.run)
    with serve_in_thread(options.outputs) as address:
        write_images(address, options, rollout, group if options.group is None else options.group)
    return 0


def choose(outputs: Path, run: str) -> tuple[str, int]:
    """Return the worst rollout of the run, and a group whose rewards differ much."""
    queries = RunQueries(outputs)
    queries.wait_for_index(run, INDEX_TIMEOUT)
    rows = RolloutFilter(source=queries.get_run(run)["sources"][0], max_reward=0.3)
    worst = queries.list_rollouts(run, rows, sort="reward", descending=False)["rows"]
    queries.close()
    first = next(row for row in worst if row["step"])
    return first["id"], first["group_number"]


def write_images(address: str, options: argparse.Namespace, rollout: str, group: int) -> None:
    """Open each view and write its image."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    run = f"#/run/{options.run}"
    views: Mapping[str, tuple[str, str, int]] = {
        "view-runs": ("#/", "tbody tr", 460),
        "view-run": (run, "path.series-line", 820),
        "view-rollouts": (f"{run}/rollouts?sort=reward&order=asc&source=reverse", "a.rollout-link", 520),
        "view-tokens": (f"{run}/rollout/{rollout}?tab=tokens", ".token[data-at]", 900),
    }
    with sync_playwright() as playwright:
        browser: Any = playwright.chromium.launch(executable_path=shutil.which(options.chromium), args=["--no-sandbox"])
        for name, (view, selector, height) in views.items():
            page = browser.new_page(viewport={"width": 1280, "height": height})
            page.goto(f"{address}/{view}")
            page.wait_for_selector(selector)
            page.wait_for_timeout(SETTLE)
            save(page.screenshot(), options.folder / f"{name}.png")
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1180, "height": FOREST_HEIGHT}, color_scheme=theme)
            page.goto(f"{address}/{run}/group/{group}")
            page.wait_for_selector("svg.forest")
            page.wait_for_timeout(SETTLE)
            save(page.locator(".panel").first.screenshot(), options.folder / f"forest-{theme}.png")
        browser.close()


def save(data: bytes, path: Path) -> None:
    """Write a PNG with a palette."""
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    print(f"wrote {path}, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
