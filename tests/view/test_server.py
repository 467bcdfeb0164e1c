"""The server of the page: what it answers, and whom it refuses."""

import re
import sqlite3
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ramify.core.errors import failure_classes
from ramify.view.queries import RunQueries
from ramify.view.server import STATIC_DIR, build_app
from tests.support.sample_runs import write_eval_run, write_rl_run

MAX_PAGE_BYTES = 500_000
HOST = "http://127.0.0.1:7420"


@pytest.fixture(scope="module")
def queries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    write_rl_run(folder / "run")
    write_eval_run(folder / "eval")
    queries = RunQueries(folder)
    yield queries
    queries.close()


@pytest.fixture
def client(queries):
    return TestClient(build_app(queries), base_url=HOST)


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs",
        "/api/run?run=run",
        "/api/config?run=run",
        "/api/metrics?run=run&name=entropy&name=rollouts&after=3",
        "/api/rollouts?run=run&sort=reward&order=asc&step=1&min_reward=0.1&page=1",
        "/api/excerpts?run=run&id=1.0&id=1.1",
        "/api/rollout?run=run&id=1.0",
        "/api/tokens?run=run&id=1.0&trace=0&node=0&node=1",
        "/api/message?run=run&id=1.0&trace=0&node=1&start=2",
        "/api/group?run=run&group=1",
        "/api/forest?run=eval&task=task-0",
    ],
)
def test_every_query_is_answered_with_json(client, path):
    response = client.get(path)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/run?run=nothing", 404),
        ("/api/run?run=../outputs", 404),
        ("/api/run", 400),
        ("/api/rollout?run=run&id=99.9", 404),
        ("/api/rollouts?run=run&step=x", 400),
        ("/api/rollouts?run=run&min_reward=x", 400),
        ("/api/rollouts?run=run&page=99999999999999999999", 400),
        ("/api/rollouts?run=run&group=-99999999999999999999", 400),
        ("/api/rollouts?run=run&page=9007199254740991&text=a%00b", 200),
        ("/api/tokens?run=run&id=1.0&node=99999999999999999999", 400),
        ("/api/tokens?run=run&id=1.0&node=x", 400),
        ("/api/message?run=run&id=1.0&node=1&start=99999999999999999999", 400),
        ("/api/group?run=run&group=9007199254740992", 400),
        ("/api/group?run=run&group=9007199254740991", 404),
        ("/api/metrics?run=run&after=99999999999999999999", 400),
        ("/api/file?run=run", 400),
        ("/api/media?run=run&id=1.0", 400),
        ("/api/rollouts?run=run&sort=secret", 404),
        ("/api/tokens?run=run&id=1.0&trace=7&node=0", 404),
        ("/api/tokens?run=run&id=1.0&node=99", 404),
        ("/api/group?run=run&group=99", 404),
        ("/api/media?run=eval&id=task-0.0&hash=x", 404),
        ("/static/../server.py", 404),
        ("/static/%2e%2e/server.py", 404),
    ],
)
def test_what_is_not_there_is_refused_with_a_reason(client, path, status):
    response = client.get(path)
    assert response.status_code == status
    if status >= 400 and response.headers.get("content-type") == "application/json":
        assert response.json()["message"]


def test_a_damaged_run_is_answered_with_a_named_failure(tmp_path):
    path = write_rl_run(tmp_path / "run")
    write_eval_run(tmp_path / "intact")
    (path / "config.toml").write_bytes(b'model = "\xff"\n[[not toml')
    with sqlite3.connect(path / "run.sqlite") as connection:
        connection.execute("UPDATE rollouts SET summary = x'c1' WHERE id = '1.1'")
        connection.execute("UPDATE events SET fields = x'c1'")
        connection.execute("UPDATE attempts SET notes = x'c1' WHERE number = 1")
    client = TestClient(build_app(RunQueries(tmp_path)), base_url=HOST, raise_server_exceptions=False)
    assert client.get("/api/config?run=run").json()["values"] == {}
    assert "[[not toml" in client.get("/api/config?run=run").json()["text"]
    names = [run["name"] for run in client.get("/api/runs").json()]
    assert sorted(names) == ["intact", "run"]
    for path in (
        "run",
        "rollouts",
        "rollout?id=1.1",
        "rollout?id=1.0",
        "group?group=1",
        "forest?group=1",
        "file?id=1.1",
    ):
        address, _, query = path.partition("?")
        response = client.get(f"/api/{address}?run=run&{query}")
        assert response.headers["content-type"] == "application/json", path
        if response.status_code != 200:
            assert response.json()["name"] in failure_classes(), response.text
    assert client.get("/api/rollout?run=run&id=1.1").json()["name"] == "RunDamaged"
    assert client.get("/api/rollout?run=run&id=2.0").status_code == 200


@pytest.mark.parametrize(
    "config", ["model = 1\ntrain = 2", "[model]\nname = []\n[[train]]\ntaskset = 1", "train = [1]"]
)
def test_a_configuration_of_another_shape_is_shown(tmp_path, config):
    write_rl_run(tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text(config)
    client = TestClient(build_app(RunQueries(tmp_path)), base_url=HOST, raise_server_exceptions=False)
    for path in ("runs", "run?run=run", "config?run=run", "rollout?run=run&id=1.0"):
        assert client.get(f"/api/{path}").status_code == 200, path


def test_a_group_that_its_batch_does_not_have_is_shown_without_it(tmp_path):
    path = write_rl_run(tmp_path / "run")
    with sqlite3.connect(path / "run.sqlite") as connection:
        connection.execute("UPDATE groups SET step = 0 WHERE number = 3")
    client = TestClient(build_app(RunQueries(tmp_path)), base_url=HOST)
    assert client.get("/api/rollout?run=run&id=3.0").status_code == 200
    assert client.get("/api/forest?run=run&group=3").status_code == 200


def test_an_unexpected_error_is_answered_as_json_and_logged(queries, monkeypatch, caplog):
    def fail(run):
        raise KeyError("run")

    monkeypatch.setattr(queries, "get_run", fail)
    client = TestClient(build_app(queries), base_url=HOST)
    response = client.get("/api/run?run=run")
    assert (response.status_code, response.json()["name"]) == (500, "KeyError")
    assert "/api/run" in caplog.text


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/runs", "/api/rollout?run=run&id=1.0"])
@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}])
def test_other_web_pages_are_refused(client, path, headers):
    assert client.get(path, headers=headers).status_code == 403
    assert client.get(path, headers={"origin": HOST}).status_code == 200
    assert client.get(path, headers={"host": "localhost:9999"}).status_code == 200
    assert client.post(path).status_code == 405


def test_every_answer_has_a_strict_policy(client):
    for path in ("/", "/static/main.js", "/api/runs", "/api/run?run=nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_images_are_sent_with_their_type_and_cannot_run_scripts(client):
    node = client.get("/api/rollout?run=eval&id=task-0.0").json()["traces"][0]["nodes"][3]
    response = client.get("/api/media", params={"run": "eval", "id": "task-0.0", "hash": node["media"][0]["hash"]})
    assert response.headers["content-type"] == "image/png"
    assert "sandbox" in response.headers["content-security-policy"]


def test_a_rollout_can_be_saved(client):
    response = client.get("/api/file?run=run&id=1.0&format=md")
    assert response.headers["content-disposition"] == 'attachment; filename="rollout-1.0.md"'
    assert response.text.startswith("# Rollout `1.0`")
    assert client.get("/api/file?run=run&id=1.0&format=json").json()["id"] == "1.0"


def test_the_name_of_a_saved_file_is_safe_in_a_header(tmp_path):
    path = write_rl_run(tmp_path / "run", num_groups=1)
    with sqlite3.connect(path / "run.sqlite") as connection:
        connection.execute("UPDATE rollouts SET id = ? WHERE id = '0.0'", ('../é中"\r\nx: y',))
    client = TestClient(build_app(RunQueries(tmp_path)), base_url=HOST)
    response = client.get("/api/file", params={"run": "run", "id": '../é中"\r\nx: y'})
    assert response.headers["content-disposition"] == 'attachment; filename="rollout-..------x--y.json"'


def test_a_token_is_needed_if_the_page_is_bound_elsewhere(queries):
    client = TestClient(build_app(queries, token="secret"), base_url=HOST, follow_redirects=False)
    assert client.get("/").status_code == 401
    assert client.get("/static/main.js").status_code == 401
    assert client.get("/api/runs", params={"token": "wrong"}).status_code == 401
    response = client.get("/?token=secret")
    assert (response.status_code, response.headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=strict"} <= set(re.split("; ?", response.headers["set-cookie"]))
    assert client.get("/api/runs").status_code == 200  # with the cookie


def list_files() -> list[Path]:
    return [file for file in STATIC_DIR.iterdir() if file.is_file()]


def test_the_page_is_small_and_asks_no_other_server():
    assert sum(file.stat().st_size for file in list_files()) <= MAX_PAGE_BYTES
    for file in list_files():
        addresses = set(re.findall(r"https?://[^\s\"')]+", file.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name


def test_the_modules_of_the_page_are_loaded_at_once():
    """Without it, the browser would ask for a module only after it has read the one that imports it."""
    names = {file.name for file in STATIC_DIR.glob("*.js")} - {"main.js", "theme.js"}
    preloaded = re.findall(r'<link rel="modulepreload" href="/static/(.*?)">', (STATIC_DIR / "index.html").read_text())
    assert sorted(preloaded) == sorted(names)


def test_no_text_is_parsed_as_html_or_code():
    for file in list_files():
        unsafe = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", file.read_text()
        )
        assert not unsafe, file.name


def test_no_list_of_any_length_becomes_arguments():
    """Browsers refuse calls with about 100,000 arguments: points of a long run, tokens of a long message."""
    for file in list_files():
        calls = re.findall(r"(?:Math\.\w+|\.(?:append|replaceChildren))\([^;\n]*?\.\.\.", file.read_text())
        assert not calls, file.name
