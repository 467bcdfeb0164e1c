"""Make the screenshots of the documentation from a real run: `python -m tools.screenshots OUTPUTS --run NAME`.

The run is `make rl` with groups of 16: `ramify rl @ examples/reverse_text/rl.toml --name reverse-16
--orchestrator.group_size 16 --orchestrator.batch_size 256 --max_steps 16`. Playwright has to be on PYTHONPATH (`make
test-view` installs it into .venvs/view/python). The images are reduced to a palette, which makes them small.
"""

import argparse
import io
import shutil
import sys
from pathlib import Path
from typing import Any

from ramify.view.export import INDEX_TIMEOUT
from ramify.view.queries import RunQueries
from ramify.view.server import serve_in_thread

IMAGES = Path(__file__).parents[1] / "docs" / "images"
NUM_COLORS = 224
SETTLE = 600  # milliseconds until fonts and charts stand still
FOREST_HEIGHT = 560


def main() -> int:
    """Write the images."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("outputs", type=Path, help="folder of runs")
    flags.add_argument("--run", default="reverse-16", help="the run to show")
    flags.add_argument(
        "--group", type=int, help="the group to show as a forest; default: the group of the worst rollout"
    )
    flags.add_argument("--chromium", default="chromium", help="the browser")
    flags.add_argument("--folder", type=Path, default=IMAGES, help="where the images are written")
    options = flags.parse_args()
    queries = RunQueries(options.outputs)
    queries.wait_for_index(options.run, INDEX_TIMEOUT)
    queries.close()
    with serve_in_thread(options.outputs) as address:
        write_images(address, options)
    return 0


def write_images(address: str, options: argparse.Namespace) -> None:
    """Click from the list of runs to the token that cost the worst rollout, and write an image of each view."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser: Any = playwright.chromium.launch(executable_path=shutil.which(options.chromium), args=["--no-sandbox"])
        page = browser.new_page()

        def write_image(name: str, selector: str, height: int) -> None:
            page.set_viewport_size({"width": 1280, "height": height})
            page.wait_for_selector(selector)
            page.wait_for_timeout(SETTLE)
            save(page.screenshot(), options.folder / f"{name}.png")

        page.goto(f"{address}/")
        write_image("view-runs", "tbody tr", 460)
        page.get_by_role("link", name=options.run, exact=True).click()
        write_image("view-run", "path.series-line", 820)
        page.get_by_role("link", name="Worst rollouts").click()
        write_image("view-rollouts", "a.rollout-link", 520)
        page.locator("a.rollout-link").first.click()
        write_image("view-messages", ".message", 700)
        page.get_by_role("tab", name="Tokens").click()
        write_image("view-tokens", ".token[data-at]", 900)
        link = page.get_by_role("link", name="all attempts").get_attribute("href")
        group = link if options.group is None else f"#/run/{options.run}/group/{options.group}"
        for theme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1180, "height": FOREST_HEIGHT}, color_scheme=theme)
            page.goto(f"{address}/{group}")
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
