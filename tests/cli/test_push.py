"""`ramify push`: a model with its card, and the upload to a hub."""

import pytest

from ramify.cli import main
from tests.support.hub import serve_hub
from tests.support.trained_runs import write_trained_run


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return write_trained_run(tmp_path / "outputs" / "first")


def test_the_card_has_evals_curves_config_data_and_versions(run, capsys):
    assert main(["push", "first", "--step", "2"]) == 0
    model = run / "models" / "first-000002"
    assert capsys.readouterr().out.startswith(f"model of step 2 in outputs/first/models/{model.name}, with its card")
    card = (model / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "`tiny` after 2 steps of supervised fine-tuning with Ramify, in the run `first`" in card
    assert "| `eval/held-out/avg` | 0.75 (step 2) | 0.75 (step 2) | 0.75 (step 2) |" in card  # without later steps
    assert "- dataset `rows.jsonl`" in card
    assert "batch_size = 32" in card and "ramify " in card and "torch " in card
    assert "/home/me" not in card
    assert "![curves](curves.png)" in card and (model / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert main(["push", "first", "--step", "2"]) == 0  # it may be repeated


def test_without_a_token_the_card_is_written_without_secrets_and_equal_environments(run, capsys):
    config = (run / "config.toml").read_text().replace("eval = []\n", "")
    config += '[launch.env.all]\nDATABASE_URL = "postgres://me:hidden"\n'
    config += '[headers]\nAuthorization = "Bearer hidden"\napi_keys = ["hidden"]\n'
    source = '\n[[eval]]\nname = "{}"\ntaskset = {{ id = "reverse-text" }}\n'
    (run / "config.toml").write_text(config + source.format("a") + source.format("b"))
    assert main(["push", "first", "--repo", "me/first"]) == 2
    assert "outputs/first/models/first-000004 was not uploaded: set HF_TOKEN" in capsys.readouterr().err
    card = (run / "models" / "first-000004" / "README.md").read_text()
    assert "DATABASE_URL" in card and "Authorization" in card and "hidden" not in card
    assert card.count("- evaluated on `reverse-text`") == 1


def test_the_command_that_uploads_is_printed_and_private_needs_a_repo(run, capsys):
    assert main(["push", "first", "--step", "best:eval/held-out/avg"]) == 0
    assert capsys.readouterr().out.endswith("ramify push first --step 2 --repo ORG/NAME\n")
    assert main(["push", "first", "--private"]) == 2
    assert "--private is for an upload: add --repo ORG/NAME" in capsys.readouterr().err


def test_model_and_card_are_uploaded(run, monkeypatch, capsys):
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        assert main(["push", "first", "--repo", "me/first"]) == 0
        assert capsys.readouterr().out.endswith(f"uploaded to {hub.url}/me/first\n")
        repo = hub.repos["models", "me/first"]
        files = repo.commits[repo.refs["main"]]
    model = run / "models" / "first-000004"
    assert files == {path.name: path.read_bytes() for path in model.iterdir()}
