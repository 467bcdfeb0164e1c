"""What the checks in a browser share: the browser, pages that report their errors, and hostile runs."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from ramify.view.server import serve_in_thread

THEMES = ("light", "dark")
TIMEOUT = 15_000  # milliseconds for what a page should show
READY = "main:not([aria-busy]) > *"


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["RAMIFY_CHROMIUM"], args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def open_page(
    browser: Browser, *, theme: str = "light", offline_origin: str | None = None, expected: Sequence[str] = ()
) -> Iterator[Page]:
    """Open a page of 1280 pixels. It fails the check if a script raises, or if it asks another server for something.

    `expected` are parts of errors that the browser may report.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme=theme, accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("console", lambda message: message.type == "error" and problems.append(f"console: {message.text}"))
    page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    if offline_origin is not None:
        page.on("request", lambda request: request.url.startswith(offline_origin) or problems.append(request.url))
    page.problems = problems
    yield page
    context.close()
    # The browser reports an answer with such a status, which the page then explains.
    expected = ("status of 400", "status of 404", "status of 500", *expected)
    assert [problem for problem in problems if not any(part in problem for part in expected)] == []


@contextlib.contextmanager
def open_view(browser: Browser, folder: Path, view: str = "", *, theme: str = "light") -> Iterator[Page]:
    """Serve a folder and open one view of it."""
    with serve_in_thread(folder) as address, open_page(browser, theme=theme, offline_origin=address) as page:
        page.address = address
        show(page, view)
        yield page


def show(page: Page, view: str) -> None:
    """Go to a view and wait until it is there."""
    page.goto(f"{page.address}/{view}")
    page.wait_for_selector(READY)
    page.wait_for_function("() => !document.querySelector('main').hasAttribute('aria-busy')")


def check_accessibility(page: Page) -> None:
    """Fail if axe-core finds something serious."""
    page.evaluate(Path(os.environ["RAMIFY_AXE"]).read_text())
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        (violation["id"], violation["nodes"][0]["html"][:160], violation["nodes"][0]["failureSummary"][:300])
        for violation in result["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert serious == []


def save_screenshots(page: Page, name: str, themes: Sequence[str] = THEMES) -> None:
    """Write an image of the page in each theme, if a folder for them is set."""
    folder = Path(os.environ.get("RAMIFY_SCREENSHOTS", ""))
    if folder == Path():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for theme in themes:
        page.emulate_media(color_scheme=theme)
        page.screenshot(path=folder / f"{name}-{theme}.png", full_page=True)
