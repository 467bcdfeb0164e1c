"""What the mouse and the keys do on the page: tokens, tables, filters, comparison."""

import pytest

from tests.view.browser import open_view, show

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
        bounds = page.locator(".token-selected").bounding_box()
        assert bounds["y"] + bounds["height"] < 420
        assert get_tip_position(page) == "token 1 of message 1"
        page.reload()
        page.wait_for_selector(".token-selected")
        bounds = page.locator(".token-selected").bounding_box()
        assert bounds["y"] + bounds["height"] < 420


def test_a_click_anywhere_in_a_row_opens_it(browser, folder):
    with open_view(browser, folder) as page:
        page.locator("tr", has=page.get_by_role("link", name="run", exact=True)).locator(".run-changed").click()
        page.get_by_role("heading", name="run", exact=True).wait_for()
        page.locator(".failures td").last.click()
        page.wait_for_url("**/rollouts?*error=ProcessDied*")
        show(page, "#/run/run/rollouts?sort=reward&order=desc")
        page.locator("tr", has=page.get_by_role("link", name="2.0", exact=True)).locator(".excerpt").click()
        page.get_by_role("heading", name="Rollout 2.0").wait_for()


def test_links_and_boxes_in_a_row_keep_their_own_click(browser, folder):
    with open_view(browser, folder) as page:
        page.get_by_label("Compare run", exact=True).check()
        assert page.get_by_role("heading", name="Runs", exact=True).is_visible()
        show(page, "#/run/run/rollouts?sort=reward&order=desc")
        page.get_by_role("link", name="group 2").first.click()
        page.get_by_role("heading", name="Group 2").wait_for()


def test_a_row_opens_in_a_new_tab_as_its_link_does(browser, folder):
    with open_view(browser, folder, "#/run/run/rollouts?sort=reward&order=desc") as page:
        with page.context.expect_page() as opened:
            page.locator(".excerpt").first.click(modifiers=["Control"])
        opened.value.get_by_role("heading", name="Rollout 0.0").wait_for()
        assert page.get_by_role("heading", name="run", exact=True).is_visible()


def test_arrow_keys_and_enter_open_a_rollout_of_a_table_that_was_just_opened(browser, folder):
    with open_view(browser, folder, "#/run/run/rollouts?sort=reward&order=desc") as page:
        page.wait_for_selector("a.rollout-link")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Rollout 1.0").wait_for()


def test_arrow_keys_in_a_field_do_not_move_through_the_table(browser, folder):
    with open_view(browser, folder, "#/run/run/rollouts?sort=reward&order=desc") as page:
        page.get_by_label("Reward from").focus()
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.tagName") == "INPUT"


def test_the_list_says_how_to_compare_runs(browser, folder):
    with open_view(browser, folder) as page:
        assert page.get_by_text("Tick two or more runs to compare them").is_visible()
        assert page.get_by_role("columnheader", name="Compare").inner_text() == "Compare"
        page.get_by_label("Compare run", exact=True).check()
        assert page.get_by_text("Tick another run to compare them").is_visible()
        page.get_by_label("Compare other", exact=True).check()
        assert page.get_by_role("link", name="Compare 2 runs").is_visible()
        page.get_by_label("Compare other", exact=True).uncheck()
        assert page.get_by_role("link", name="Compare 2 runs").is_hidden()


def test_one_run_cannot_be_compared(browser, folder):
    with open_view(browser, folder / "run") as page:
        assert "compare" not in page.inner_text("main").lower()
        assert page.get_by_role("checkbox").count() == 0


FILTER_LABELS = ["Search the messages", "Source", "Group", "Stop", "Error", "Step", "Reward from", "to"]


def list_filters(page):
    return [label.split("\n")[0].strip() for label in page.locator(".filters label > :first-child").all_inner_texts()]


@pytest.mark.parametrize("params", ["", "?error=any", "?error=ProcessDied&step=77", "?state=dropped", "?text=nothing"])
def test_a_training_run_has_the_same_filters_whatever_is_listed(browser, folder, params):
    with open_view(browser, folder, f"#/run/run/rollouts{params}") as page:
        page.wait_for_selector("td")
        assert list_filters(page) == FILTER_LABELS
        page.get_by_label("Reward from").fill("9")
        page.wait_for_selector("td.empty")
        assert list_filters(page) == FILTER_LABELS


def test_a_filter_of_the_address_is_shown_and_can_be_taken_back(browser, folder):
    with open_view(browser, folder, "#/run/run/rollouts?error=ProcessDied") as page:
        page.wait_for_selector("td.empty")
        assert page.get_by_label("Error").input_value() == "ProcessDied"
        page.get_by_label("Error").select_option("all")
        page.wait_for_function("() => document.querySelectorAll('a.rollout-link').length === 12")


def test_an_eval_has_no_filters_for_what_only_training_has(browser, folder):
    with open_view(browser, folder, "#/run/eval/rollouts") as page:
        assert list_filters(page) == ["Search the messages", "Stop", "Error", "Reward from", "to"]
        page.get_by_label("Error").select_option("MalformedCall")
        page.wait_for_function("() => document.querySelectorAll('a.rollout-link').length === 1")
