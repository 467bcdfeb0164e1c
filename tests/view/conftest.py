"""Fixtures of the checks in a browser. Playwright is only imported if a check asks for them."""

import pytest

from tests.support.sample_runs import write_eval_run, write_rl_run


@pytest.fixture(scope="session")
def browser():
    from tests.view.browser import open_browser

    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Two finished training runs, an eval, and a run that cannot be read."""
    folder = tmp_path_factory.mktemp("outputs")
    write_rl_run(folder / "run")
    write_rl_run(folder / "other", num_groups=3)
    config = (folder / "other" / "config.toml").read_text()
    (folder / "other" / "config.toml").write_text(config.replace("max_steps = 4", "max_steps = 8"))
    write_eval_run(folder / "eval")
    (folder / "damaged").mkdir()
    (folder / "damaged" / "run.sqlite").write_bytes(b"not an SQLite database" * 100)
    (folder / "damaged" / "config.toml").write_text(config)
    return folder
