"""`ramify view`: which folder it shows."""

import pytest

from ramify.cli.app import main
from tests.support.sample_runs import write_rl_run


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Return a list to which a stub of the server appends the folder that it is given; work in an empty directory."""
    folders = []

    async def serve(folder, stop, on_address, **options):
        folders.append(folder)
        on_address("http://127.0.0.1:7420")

    monkeypatch.setattr("ramify.cli.view.serve_page", serve)
    monkeypatch.chdir(tmp_path)
    return folders


def test_a_run_is_shown_by_its_name_as_other_commands_take_it(shown, tmp_path, capsys):
    write_rl_run(tmp_path / "outputs" / "my-run", num_groups=2)
    assert main(["view", "my-run"]) == 0
    assert [folder.resolve() for folder in shown] == [tmp_path / "outputs" / "my-run"]
    assert "the runs in outputs/my-run are shown at http://127.0.0.1:7420\n" in capsys.readouterr().out


def test_a_run_that_does_not_exist_is_refused(shown, capsys):
    assert main(["view", "my-rum"]) == 2
    assert "no run 'my-rum'; outputs has no runs" in capsys.readouterr().err
    assert shown == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("my-rum", "did you mean 'my-run'?"),
        ("outputs/my-rum", "did you mean 'outputs/my-run'?"),
        ("something", "outputs has my-run, other"),
        ("outputs/something", "outputs has my-run, other"),
        ("elsewhere/my-run", "elsewhere has no runs"),
    ],
)
def test_a_mistyped_run_is_answered_with_the_runs_beside_it(shown, tmp_path, capsys, name, hint):
    for run in ("my-run", "other"):
        (tmp_path / "outputs" / run).mkdir(parents=True)
        (tmp_path / "outputs" / run / "run.sqlite").write_bytes(b"SQLite format 3")
    assert main(["view", name]) == 2
    assert f"no run {name!r}; {hint}" in (message := capsys.readouterr().err)
    assert "outputs/outputs" not in message


def test_the_default_folder_may_be_missing_until_the_first_run(shown):
    assert main(["view"]) == 0
    assert [str(folder) for folder in shown] == ["outputs"]
