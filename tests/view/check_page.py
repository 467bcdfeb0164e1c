"""The page in a browser, on runs that the test wrote: views, keyboard, themes, hostile content, export."""

import json
import re
from urllib.parse import urlencode

import pytest

from ramify.core.interactive import run_coroutine
from ramify.run.store import RunLog, RunStore
from ramify.run.store.run_directory import IDENTITY_KEY
from ramify.trace import Message, ModelCall, Trace
from ramify.view.export import export_run
from ramify.view.queries import RunQueries
from tests.support.sample_runs import EVAL_CONFIG, make_record, make_trace, write_rl_run
from tests.view.browser import THEMES, check_accessibility, open_page, open_view, save_screenshots, show

HOSTILE = {
    "html": "<img src=x onerror=\"alert('image')\"><script>alert('script')</script><b>bold?</b>",
    "link": "[click](javascript:alert(1)) <a href='javascript:alert(2)'>click</a> <iframe src='https://example.com'>",
    "ansi": "\x1b[31mred\x1b[0m \x1b]8;;https://example.com\x07link\x1b]8;;\x07 \x07 \x08",
    "bidi": "abc \u202e reversed \u202c \u2066 isolated \u2069 \u200f mark",
    "fence": "```html\n<script>alert('fence')</script>\n```\n```diff\n--- a\n+++ b\n@@ -1 +1 @@\n-<b>\n+<i>\n```",
    "json": '{"a": "</script><script>alert(1)</script>", "__proto__": {"x": 1}}',
}
VIEWS = {
    "runs": "#/",
    "run": "#/run/run",
    "config": "#/run/run/config",
    "rollouts": "#/run/run/rollouts?sort=reward&order=asc",
    "rollout": "#/run/run/rollout/1.2",
    "tokens": "#/run/run/rollout/1.2?tab=tokens",
    "group": "#/run/run/group/1",
    "eval": "#/run/eval",
    "branches": "#/run/eval/rollout/task-0.0",
    "attempts": "#/run/eval/group/task?task=task-0",
    "compare": "#/compare?run=run&run=other",
    "damaged": "#/run/damaged",
}


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory):
    """An eval whose messages are hostile, one of them 10 MB long."""
    path = tmp_path_factory.mktemp("hostile") / "<i>run & co"
    path.mkdir()
    (path / "config.toml").write_text(EVAL_CONFIG)
    texts = {**HOSTILE, "long": "<b>word</b> " * (10 * 2**20 // 12)}
    with RunStore.open(path) as store:
        store.set_fact(IDENTITY_KEY, {"model": "tiny"})
        for name, text in texts.items():
            id = f"<u>{name}/../x"
            trace = make_trace(id, 0, [50, 2], 0.5, text=text)
            trace.info[text[:200]] = text[:200]
            run_coroutine(store.add_rollout(make_record(id, name, 0, "", [trace]), [trace]))
    write_hostile_training(path.parent / "training")
    return path.parent


def write_hostile_training(path):
    """Write a run with hostile configuration, failures, events and metrics, and a message of 100,000 tokens."""
    write_rl_run(path)
    text = " ".join(HOSTILE.values())
    config = (path / "config.toml").read_text()
    quoted = json.dumps(HOSTILE["html"] + HOSTILE["bidi"])
    (path / "config.toml").write_text(f"{config}# {HOSTILE['html']}\n[orchestrator]\nnote = {quoted}\n")
    with RunStore.open(path) as store:
        log = RunLog(store)
        log.log_event("failure", where=HOSTILE["html"], name=HOSTILE["link"], message=text)
        log.log_event("note", **{HOSTILE["html"]: text})
        for step in range(3):
            log.log_metrics(step, {f"reward/{HOSTILE['html']}{HOSTILE['bidi']}/mean": 0.5})
        trace = Trace(id="many", task={"prompt": text})
        question = trace.graph.add_node(-1, Message("user", text), [40 + number % 30 for number in range(100_000)])
        span, logprobs = (0, 5000), [-0.1] * 4990 + [-9.0] * 10
        reply = Message("assistant", text)
        call = ModelCall("c", finish_reason="stop")
        trace.graph.add_node(question, reply, [50] * 5000, sampled_span=span, logprobs=logprobs, call=call)
        trace.rewards = {HOSTILE["html"]: (0.5, 1.0)}
        run_coroutine(store.add_rollout(make_record("many", HOSTILE["html"], 0, HOSTILE["link"], [trace]), [trace]))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", VIEWS)
def test_every_view_is_shown_and_accessible(browser, folder, name, theme):
    with open_view(browser, folder, VIEWS[name], theme=theme) as page:
        assert page.locator("h1, .notice h2").first.is_visible()
        page.wait_for_timeout(400)
        check_accessibility(page)
        save_screenshots(page, name, [theme])


def test_the_list_shows_every_run_with_its_state(browser, folder):
    with open_view(browser, folder) as page:
        assert page.locator("tbody tr").count() == 4
        states = {"run": "finished", "other": "finished", "eval": "ended", "damaged": "damaged"}
        for name, state in states.items():
            row = page.locator("tbody tr", has=page.get_by_role("link", name=name, exact=True))
            assert row.locator(".pill").inner_text() == state


def test_an_empty_folder_says_what_to_do(browser, tmp_path):
    with open_view(browser, tmp_path) as page:
        assert "ramify rl reverse-text -m tiny" in page.inner_text("main")
        check_accessibility(page)
        save_screenshots(page, "empty")


def test_a_broken_run_says_what_is_wrong(browser, folder):
    with open_view(browser, folder, "#/run/damaged") as page:
        assert "This run cannot be read" in page.inner_text("main")
        assert "RunDamaged" in page.inner_text("main")
        show(page, "#/run/damaged/rollouts")
        assert page.locator(".notice").is_visible()
        show(page, "#/run/missing")
        assert "has no run 'missing'" in page.inner_text("main")
        assert page.get_by_role("heading", name="Not found").is_visible()
        show(page, "#/run/runn/rollouts")
        assert "did you mean 'run'?" in page.inner_text("main")
        page.get_by_role("link", name="All runs").click()
        page.get_by_role("heading", name="Runs", exact=True).wait_for()
        show(page, "#/run/run/rollouts?step=one")
        assert page.get_by_role("heading", name="The address is not valid").is_visible()


def test_a_run_that_is_opened_before_it_is_started_appears(browser, tmp_path):
    with open_view(browser, tmp_path, "#/run/late") as page:
        assert "has no run 'late'" in page.inner_text("main")
        write_rl_run(tmp_path / "late")
        page.wait_for_selector(".pill-finished")
        page.wait_for_selector("path.series-line")


def test_from_the_list_to_the_token_that_cost_the_worst_rollout_in_four_clicks(browser, folder):
    with open_view(browser, folder) as page:
        page.get_by_role("link", name="run", exact=True).click()
        page.get_by_role("link", name="Worst rollouts").click()
        page.locator("a.rollout-link").first.click()
        page.get_by_role("tab", name="Tokens").click()
        assert page.locator(".token-bar select").input_value() == "reward_change"
        assert re.search(r"-0\.50", page.inner_text(".extremes"))
        page.locator(".extremes button").first.click()
        page.wait_for_selector(".token-selected")
        assert "reward change at forks" in page.inner_text(".token-tip")


def test_rollouts_are_filtered_sorted_and_searched(browser, folder):
    with open_view(browser, folder, "#/run/run/rollouts") as page:
        page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 12")
        page.get_by_role("button", name="Reward").click()
        page.wait_for_function("() => document.querySelector('.rollout-link').textContent.endsWith('.2')")
        page.get_by_label("Step").fill("1")
        page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 3")
        assert "step=1" in page.url  # a copied link shows the same
        page.get_by_label("Step").fill("")
        page.get_by_label("Search the messages").fill("reply 2")
        page.wait_for_function("() => document.querySelectorAll('a.rollout-link').length === 4")
        page.get_by_label("Search the messages").fill("nothing like it")
        page.wait_for_selector("td.empty")


def test_a_branch_is_chosen_in_the_outline_and_folded(browser, folder):
    with open_view(browser, folder, "#/run/eval/rollout/task-0.0") as page:
        assert page.locator(".message").count() == 5
        assert "I give up." in page.inner_text(".messages")
        page.locator(".outline-row").nth(4).click()
        assert "return a + b" in page.inner_text(".messages")
        assert page.locator(".diff-added").count() == 1
        page.get_by_role("button", name="Next branch").click()
        assert page.locator(".code-keyword").first.inner_text() == "return"
        assert page.locator(".badge-fork").inner_text() == "fork: retry"
        page.get_by_role("button", name="3 branches").click()
        assert page.locator(".outline-row").count() == 4
        assert page.locator(".call-name").inner_text() == "→ read_file"
        image = page.locator(".message img")
        image.scroll_into_view_if_needed()
        page.wait_for_function("() => document.querySelector('.message img').naturalWidth === 1")


def test_a_forest_shows_shared_tokens_once(browser, folder):
    with open_view(browser, folder, "#/run/run/group/1") as page:
        page.wait_for_selector("svg.forest")
        assert "24 tokens of 3 attempts are computed as 14" in page.inner_text("main")
        assert page.locator(".forest-label").count() == 3
        page.locator(".cell").nth(1).hover()
        assert "attempts, mean reward" in page.inner_text(".forest-tip")
        show(page, "#/run/eval/group/task?task=task-0")
        page.get_by_role("heading", name="Attempts at task-0").wait_for()
        page.wait_for_selector("svg.forest")
        labels = page.locator(".forest-id").all_text_contents()
        assert labels == ["task-0.0", "task-0.0", "task-0.0", "task-0.1"]  # one row for each branch of an attempt


def test_runs_are_compared_with_their_configurations(browser, folder):
    with open_view(browser, folder) as page:
        for name in ("run", "other"):
            page.get_by_label(f"Compare {name}", exact=True).check()
        page.get_by_role("link", name="Compare 2 runs").click()
        page.wait_for_selector("table.difference")
        assert page.locator("table.difference tbody tr").all_inner_texts() == ["max_steps\t4\t8"]
        for axis in ("time", "tokens", "step"):
            page.get_by_label("Horizontal axis").select_option(axis)
            assert page.locator("path.series-line").count() == 2
        page.get_by_label("Log axis").check()
        page.get_by_label("Smoothing").fill("0.5")
        assert "smoothing=0.5" in page.url


def test_equal_configurations_are_said_to_be_equal(browser, folder):
    with open_view(browser, folder, "#/compare?run=run&run=run") as page:
        page.get_by_text("The configurations are equal.").wait_for()
        assert page.locator("table.difference").is_hidden()


def test_the_header_is_as_wide_as_the_page(browser, folder):
    with open_view(browser, folder) as page:
        assert page.evaluate("document.querySelector('.top').offsetWidth === document.documentElement.offsetWidth")
        assert page.evaluate("getComputedStyle(document.documentElement).scrollbarGutter") == "auto"


def test_negative_numbers_have_one_kind_of_minus_sign(browser, folder):
    for view in ("#/run/run/rollouts", "#/run/run/rollout/1.2?tab=tokens", "#/run/run/group/1"):
        with open_view(browser, folder, view) as page:
            page.get_by_text(re.compile(r"-0\.50?")).first.wait_for()
            assert "\u2212" not in page.inner_text("main")


def test_everything_is_reached_with_the_keyboard(browser, folder):
    with open_view(browser, folder) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        page.get_by_role("link", name="run", exact=True).focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("svg.chart")
        page.locator("svg.chart").first.focus()
        page.keyboard.press("ArrowRight")
        assert "step 0" in page.locator(".readout").first.inner_text()
        show(page, "#/run/run/rollouts?sort=reward&order=desc")
        page.wait_for_selector("a.rollout-link")
        page.locator("a.rollout-link").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message")
        assert page.locator("h1").inner_text() == "Rollout 1.0"
        page.get_by_role("tab", name="Tokens").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(".token[data-at]")
        page.locator(".tokens").nth(1).focus()
        page.keyboard.press("ArrowRight")
        assert page.locator(".token-selected").count() == 1


def test_the_theme_is_switched_and_remembered(browser, folder):
    with open_view(browser, folder) as page:
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(background)
        page.get_by_role("button", name="Switch between light and dark").click()
        dark = page.evaluate(background)
        assert dark != light
        page.reload()
        page.wait_for_selector("main > *")
        assert page.evaluate(background) == dark


@pytest.mark.parametrize("name", [*HOSTILE, "long"])
@pytest.mark.parametrize("view", ["messages", "tokens"])
def test_hostile_content_is_shown_and_never_executed(browser, hostile_folder, name, view):
    with open_view(browser, hostile_folder) as page:
        page.get_by_role("link", name="<i>run & co").click()
        page.get_by_role("link", name="Rollouts", exact=True).click()
        page.wait_for_function("() => document.querySelectorAll('a.rollout-link').length === 7")
        page.get_by_role("link", name=f"<u>{name}/../x").click()
        page.wait_for_selector(".message")
        page.locator("summary").first.click()
        if view == "tokens":
            page.get_by_role("tab", name="Tokens").click()
            page.wait_for_selector(".token[data-at]")
        assert page.locator("main iframe, main script, main b.injected, main img").count() == 0
        assert page.locator("main a[href^='javascript']").count() == 0
        if view == "messages" and name == "html":
            assert "<img src=x onerror=" in page.inner_text(".messages")
        if view == "messages" and name == "ansi":
            assert "\x1b" not in page.inner_text(".messages")
            assert "red" in page.inner_text(".messages")
        if name == "bidi":
            assert "\u202e" not in page.inner_text("main")
            assert "U+202E" in page.inner_text("main")
        save_screenshots(page, f"hostile-{name}-{view}")
        if view == "messages" and name == "long":
            page.get_by_role("button", name="Show more").click()
            page.wait_for_function("() => document.querySelector('.messages').textContent.length > 200000")


HOSTILE_GROUP = urlencode({"source": HOSTILE["link"], "task": HOSTILE["html"]})
INJECTED = "main iframe, main script, main img, main b.injected, main a[href^='javascript']"


@pytest.mark.parametrize(
    "view",
    ["", "/config", "/rollouts?sort=newest", "/rollout/many", f"/group/task?{HOSTILE_GROUP}"],
)
def test_hostile_names_and_messages_of_a_run_are_only_text(browser, hostile_folder, view):
    with open_view(browser, hostile_folder, f"#/run/training{view}") as page:
        page.wait_for_timeout(400)
        assert page.locator(INJECTED).count() == 0
        text = page.inner_text("main")
        assert not re.search("[\u202a-\u202e\u2066-\u2069\x1b]", text)
        if view in ("", "/config", "/rollout/many"):
            assert "<script>alert('script')</script>" in text


def test_a_message_of_many_tokens_is_shown_in_parts(browser, hostile_folder):
    with open_view(browser, hostile_folder, "#/run/training/rollout/many?tab=tokens") as page:
        page.wait_for_selector(".token[data-at]")
        question, reply = page.locator(".tokens").all()
        assert question.locator(".token").count() == 4000
        page.get_by_role("button", name="96,000 of 100,000 tokens are hidden").click()
        assert question.locator(".token").count() == 8000
        assert page.get_by_role("button", name="92,000 of 100,000").is_visible()
        page.locator(".extremes button").first.click()  # a token that is not shown yet
        page.wait_for_selector(".token-selected")
        assert reply.locator(".token").count() == 5000


def test_tokens_are_coloured_by_what_the_trainer_recorded(browser, folder):
    with open_view(browser, folder, "#/run/run/rollout/1.2?tab=tokens") as page:
        page.wait_for_selector(".token[data-at]")
        names = page.locator(".token-bar option").all_inner_texts()
        assert {"entropy", "mismatch of trainer and sampler"} <= set(names)
        page.locator(".token-bar select").select_option("mismatch")
        assert "minus by the sampler" in page.inner_text(".token-bar")
        colours = [token.evaluate("span => span.style.background") for token in page.locator(".tokens .token").all()]
        assert [bool(colour) for colour in colours] == [False] * 4 + [True] * 4
        page.locator(".tokens .token").last.hover()
        assert "-0.030" in page.inner_text(".token-tip")
        page.reload()  # the choice is in the address
        page.wait_for_selector(".token[data-at]")
        assert page.locator(".token-bar select").input_value() == "mismatch"


def test_an_exported_file_shows_the_same_and_is_as_safe(browser, hostile_folder, folder, tmp_path):
    for source, run, rollout in ((folder, "run", "1.2"), (hostile_folder, "<i>run & co", "<u>html/../x")):
        file = tmp_path / "run.html"
        queries = RunQueries(source)
        export_run(queries, run, file)
        queries.close()
        with open_page(browser, offline_origin=file.as_uri()) as page:
            page.goto(file.as_uri())
            page.get_by_role("link", name=run, exact=True).click()
            page.wait_for_selector(".stats")
            assert page.get_by_role("link", name=re.compile("Worst|errors|dropped|ProcessDied")).count() == 0
            page.get_by_role("link", name="Rollouts", exact=True).click()
            assert re.search(r"\d+ of \d+ rollouts are in this file", page.inner_text(".table-head"))
            page.get_by_role("link", name=rollout, exact=True).click()
            page.get_by_role("tab", name="Tokens").click()
            page.wait_for_selector(".token[data-at]")
            page.get_by_role("link", name=re.compile("ll attempts")).click()
            page.wait_for_selector("svg.forest")
            assert page.locator("main iframe, main script, main img").count() == 0
            check_accessibility(page)
            save_screenshots(page, f"export-{'hostile' if source == hostile_folder else 'run'}")


def test_a_rollout_is_saved_as_a_file(browser, folder):
    with open_view(browser, folder, "#/run/run/rollout/1.2") as page:
        with page.expect_download() as download:
            page.get_by_role("link", name="Markdown").click()
        assert download.value.suggested_filename == "rollout-1.2.md"


def test_words_of_the_domain_are_explained_where_they_stand(browser, folder):
    with open_view(browser, folder, "#/run/run") as page:
        explanations = {word.inner_text(): word.get_attribute("title") for word in page.locator("abbr").all()}
        assert set(explanations) == {"committed", "incarnation", "zero_advantage"}
        assert "the same reward" in explanations["zero_advantage"]
        assert page.locator(".stat", has_text="Steps").locator(".stat-detail").inner_text() == "checkpoint at step 3"
        assert page.get_by_role("button", name="Switch between light and dark").get_attribute("title")
        show(page, "#/run/run/group/3")
        page.locator("abbr", has_text="zero_advantage").wait_for()
        assert page.locator(".pill").inner_text() == "dropped: filtered (zero_advantage)"


def test_the_weight_of_a_reward_is_named_if_it_is_not_1(browser, folder):
    with open_view(browser, folder, "#/run/run/rollout/1.0") as page:
        assert page.locator(".fact", has_text="Reward").locator("small").inner_text() == "similarity 1.000"
        show(page, "#/run/eval/rollout/task-0.0")
        rewards = page.locator(".fact", has_text="Reward").locator("small").inner_text()
        assert rewards == "tests 0.250 with weight 2, style 0.500 with weight 0.5"


def test_untrained_tokens_have_a_key_only_where_there_are_some(browser, tmp_path):
    with RunStore.open(tmp_path / "run") as store:
        for id, untrained in (("all", []), ("none", [{"node": 1, "reason": "a summary"}])):
            trace = make_trace(id, 0, [50, 2], 0.5)
            trace.info["untrained"] = untrained
            run_coroutine(store.add_rollout(make_record(id, id, 0, "", [trace]), [trace]))
    with open_view(browser, tmp_path, "#/run/run/rollout/none?tab=tokens") as page:
        page.wait_for_selector(".tokens .token-masked")
        assert "sampled, but not trained" in page.inner_text(".token-bar")
        show(page, "#/run/run/rollout/all?tab=tokens")
        page.wait_for_selector(".token[data-at]")
        assert "not trained" not in page.inner_text(".token-bar")


def test_metrics_by_staleness_are_named_as_such(browser, tmp_path):
    path = write_rl_run(tmp_path / "run")
    with RunStore.open(path) as store:
        RunLog(store).log_metrics(0, {"entropy/reverse/age_1": 0.5, "masked": 0.0, "trainable": 1.0})
    with open_view(browser, tmp_path, "#/compare?run=run&run=run") as page:
        options = page.get_by_label("Metric").locator("option").all_inner_texts()
        assert "entropy/reverse/age_1 (staleness 1)" in options
        show(page, "#/run/run")
        page.get_by_role("heading", name="Fraction of trained tokens that the loss masks").wait_for()
        page.get_by_role("heading", name="Fraction of groups that can be trained").wait_for()


def test_charts_are_grouped_and_include_those_of_the_taskset(browser, folder):
    with open_view(browser, folder, "#/run/run") as page:
        charts = {group.locator("h2").inner_text(): group for group in page.locator(".chart-group").all()}
        assert list(charts) == [
            "Rewards and metrics of the taskset",
            "Evals",
            "Policy and loss",
            "Rollouts",
            "Time and throughput",
        ]
        titles = {name: [head.inner_text() for head in group.locator("h3").all()] for name, group in charts.items()}
        assert titles["Rewards and metrics of the taskset"] == ["exact", "similarity reward/reverse/similarity"]
        exact = charts["Rewards and metrics of the taskset"].locator(".panel").first
        assert exact.locator(".legend-entry").all_inner_texts() == ["reverse", "eval/held-out"]
        assert charts["Evals"].locator(".legend-entry").all_inner_texts() == ["pass@2", "pass^2"]
        assert "25.0 %" in page.inner_text(".stats")
        show(page, "#/run/eval")
        summary = page.inner_text(".key-values")
        assert all(name in summary for name in ("similarity", "exact", "truncated", "timing"))


def test_rollouts_and_attempts_show_rewards_metrics_and_all_turns(browser, folder):
    with open_view(browser, folder, "#/run/run/rollouts") as page:
        assert "exact 1.000" in page.locator("tbody tr", has_text="1.0").first.inner_text()
        show(page, "#/run/run/rollout/1.0")
        assert "exact" in page.inner_text(".facts") and "1.000" in page.inner_text(".facts")
        show(page, "#/run/eval/group/task?task=task-0")
        card = page.locator(".card", has_text="read_file").inner_text()
        assert "I look at the file." in card and "def add(a, b):" in card and "I give up." in card
        assert page.locator(".forest-labels .tick").all_text_contents() == ["Attempt", "Reward", "Advantage"]


@pytest.mark.parametrize("view", ["#/", "#/run/run", "#/run/run/rollouts", "#/run/run/group/1", "#/run/eval"])
def test_rewards_are_visible_at_500_pixels(browser, folder, view):
    with open_view(browser, folder, view) as page:
        page.set_viewport_size({"width": 500, "height": 860})
        assert page.evaluate("document.documentElement.scrollWidth") <= 500
        rewards = page.locator(
            ".run-reward, .rollouts tbody td:nth-child(2), .forest-reward, .stat-value, .scores td.number"
        )
        all_bounds = [reward.bounding_box() for reward in rewards.all()]
        assert all_bounds and all(bounds["x"] + bounds["width"] <= 500 for bounds in all_bounds if bounds)


def test_a_reward_has_the_same_digits_everywhere(browser, folder):
    with open_view(browser, folder, "#/run/run/group/1") as page:
        assert page.locator(".forest-reward").all_text_contents() == ["1.000", "0.500", "0.000"]
        assert page.locator(".card b").all_inner_texts() == ["1.000", "0.500", "0.000"]
        show(page, "#/run/run/rollouts")
        assert page.locator("tbody tr", has_text="1.1").first.locator("td").nth(1).inner_text().strip() == "0.500"


def test_the_forest_of_an_agent_with_a_long_context_has_texts(browser, tmp_path):
    path = write_rl_run(tmp_path / "run", prompt=[40] * 4000)
    assert path.exists()
    with open_view(browser, tmp_path, "#/run/run/group/1") as page:
        assert page.locator(".forest .cell-text").count() > 5
        assert page.locator(".forest-note").is_hidden()
