"""What the mouse and the keys do on the page: tokens, tables, filters, comparison."""

from tests.view.browser import open_view

TOKENS = "#/run/run/rollout/1.2?tab=tokens"


def get_tip_position(page):
    """Return which token the tooltip describes, such as "token 2 of message 1"."""
    return page.inner_text(".token-tip").split("\n")[0].split(", ")[-1]


def test_arrow_keys_go_on_from_the_token_that_was_clicked(browser, folder):
    with open_view(browser, folder, TOKENS) as page:
        page.wait_for_selector(".token[data-at]")
        reply = page.locator("article[data-node='1'] .token")
        reply.nth(2).click()
        assert get_tip_position(page) == "token 2 of message 1"
        page.keyboard.press("ArrowRight")
        assert get_tip_position(page) == "token 3 of message 1"
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert get_tip_position(page) == "token 1 of message 1"
        assert page.locator(".token-selected").count() == 1


def test_the_tooltip_is_that_of_the_token_under_the_pointer_else_of_the_selected_one(browser, folder):
    with open_view(browser, folder, TOKENS) as page:
        page.wait_for_selector(".token[data-at]")
        reply = page.locator("article[data-node='1'] .token")
        reply.nth(3).click()
        reply.nth(1).hover()
        assert get_tip_position(page) == "token 1 of message 1"
        page.locator("h1").hover()
        assert get_tip_position(page) == "token 3 of message 1"
        page.keyboard.press("Escape")
        assert page.inner_text(".token-tip") == ""


def test_a_token_that_stands_out_keeps_its_tooltip_when_the_page_scrolls_to_it(browser, folder):
    with open_view(browser, folder, TOKENS) as page:
        page.set_viewport_size({"width": 1280, "height": 420})
        page.wait_for_selector(".token[data-at]")
        page.evaluate("window.scrollTo(0, 0)")
        page.locator(".extremes button").first.click()
        page.wait_for_selector(".token-selected")
        assert page.evaluate("window.scrollY") > 0
        page.wait_for_timeout(500)  # the browser reports what came to lie under the pointer
        assert get_tip_position(page) == "token 1 of message 1"
        page.keyboard.press("ArrowRight")
        assert get_tip_position(page) == "token 2 of message 1"


def test_the_costly_token_is_in_view_when_the_tokens_are_opened(browser, folder):
    with open_view(browser, folder, "#/run/run/rollout/1.2") as page:
        page.set_viewport_size({"width": 1280, "height": 420})
        page.get_by_role("tab", name="Tokens").click()
        page.wait_for_selector(".token-selected")
        box = page.locator(".token-selected").bounding_box()
        assert box["y"] + box["height"] < 420
        assert get_tip_position(page) == "token 1 of message 1"
        page.reload()
        page.wait_for_selector(".token-selected")
        box = page.locator(".token-selected").bounding_box()
        assert box["y"] + box["height"] < 420
