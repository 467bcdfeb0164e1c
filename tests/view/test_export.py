"""A run as one file: it has all that the page asks for, and nothing in it can run but the page's own script."""

import base64
import hashlib
import json
import re

import pytest

from ramify.cli.app import main
from ramify.run.store import RunStore
from ramify.view.export import bundle_scripts, export_run, make_key
from ramify.view.queries import RunQueries
from ramify.view.server import STATIC_DIR
from tests.support.sample_runs import write_rl_run
from tests.support.status import serve_status

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_rl_run(tmp_path_factory.mktemp("outputs") / "run", texts={(0, 2): HOSTILE})


def read_answers(text):
    data = re.search(r'<script type="application/json" id="recorded">(.*?)</script>', text, re.DOTALL)[1]
    return dict(json.loads(data))


def test_a_file_has_curves_and_the_worst_and_best_rollouts(path, tmp_path, capsys):
    file = tmp_path / "run.html"
    assert main(["view", str(path), "--export", str(file)]) == 0
    assert "wrote" in capsys.readouterr().out
    answers = read_answers(file.read_text())
    ids = [row["id"] for row in answers[make_key("rollouts", {"run": "run"})]["rows"]]
    assert ids == ["0.2", "1.2", "2.2", "3.2", "0.1", "1.1", "0.0", "1.0"]
    assert answers[make_key("rollouts", {"run": "run"})]["run_total"] == 12
    assert answers[make_key("metrics", {"run": "run"})]["points"]["reward/all/mean"] == [[0, 0.5], [1, 0.6], [2, 0.7]]
    for id in ids:
        assert make_key("rollout", {"run": "run", "id": id}) in answers
        assert make_key("tokens", {"run": "run", "id": id, "trace": 0, "node": [1]}) in answers
        assert make_key("forest", {"run": "run", "group": int(id[0])}) in answers


def test_a_file_has_nothing_of_the_processes_of_a_live_run(tmp_path):
    path = write_rl_run(tmp_path / "run", num_groups=2)
    file = tmp_path / "run.html"
    with RunStore.open(path), serve_status(path) as address:
        queries = RunQueries(tmp_path)
        assert queries.get_run("run")["state"] == "running"
        export_run(queries, "run", file)
    text = file.read_text()
    assert address not in text
    assert str(tmp_path) not in text
    assert "waits for" not in json.dumps(read_answers(text))


def test_the_rollouts_of_a_file_are_listed_from_the_worst_to_the_best(path, tmp_path):
    file = tmp_path / "run.html"
    chosen = [argument for id in ("0.0", "1.2", "2.1", "1.1") for argument in ("--rollout", id)]
    assert main(["view", str(path), "--export", str(file), *chosen]) == 0
    rows = read_answers(file.read_text())[make_key("rollouts", {"run": "run"})]["rows"]
    assert [row["id"] for row in rows] == ["1.2", "1.1", "2.1", "0.0"]
    assert main(["view", str(path), "--export", str(file), "--rollout", "9.9"]) == 2


def test_a_folder_of_several_runs_is_refused(path, tmp_path, capsys):
    write_rl_run(tmp_path / "a", num_groups=2)
    write_rl_run(tmp_path / "b", num_groups=2)
    assert main(["view", str(tmp_path), "--export", str(tmp_path / "run.html")]) == 2
    assert "the folder has a, b" in capsys.readouterr().err


def test_only_the_script_of_the_page_may_run(path, tmp_path):
    file = tmp_path / "run.html"
    main(["view", str(path), "--export", str(file)])
    text = file.read_text()
    assert "alert(1)" in text
    assert HOSTILE not in text
    assert text.count("</script>") == 2
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    script = re.search(r'<script type="module">(.*?)</script>', text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_scripts_have_no_name_twice():
    """The scripts of a file are one script, so their top-level names must differ."""
    pattern = r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)"
    names = [name for file in STATIC_DIR.glob("*.js") for name in re.findall(pattern, file.read_text(), re.MULTILINE)]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})
    bundle = bundle_scripts()
    assert not re.search(r"^(import|export) ", bundle, re.MULTILINE)
    assert "</script" not in bundle
