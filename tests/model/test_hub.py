"""A hub id that is not in the cache is downloaded; without a network one line says how to bring the files."""

import json
import shutil
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from ramify.cli import main
from ramify.errors import ModelNotFound
from ramify.model import hub
from ramify.model.resolve import fetch_model, resolve_model_path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "org/small"


class Hub(ThreadingHTTPServer):
    """Speaks as much of the hub's protocol as a download needs, for one model."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.sent, self.gated = files, [], False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        files = self.server.files
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        if self.server.gated:
            return self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"}, body=body)
        if path == f"/api/models/{NAME}/revision/main":
            siblings = [{"rfilename": name} for name in files]
            about = {"id": NAME, "sha": COMMIT, "private": False, "siblings": siblings}
            return self.reply(200, json.dumps(about).encode(), {"Content-Type": "application/json"}, body=body)
        if path == f"/api/models/{NAME}/tree/{COMMIT}":
            return self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body=body)
        name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
        if name in files:
            if body:
                self.server.sent.append(name)
            headers = {"ETag": f'"{sha1(files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return self.reply(200, files[name], headers, body=body)
        return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

    def reply(self, code: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A hub with `tiny` under another name, beside formats that nobody here reads; and an empty cache."""
    files = {path.name: path.read_bytes() for path in resolve_model_path("tiny").iterdir()}
    server = Hub(
        {**files, "pytorch_model.bin": b"old", "onnx/model.onnx": b"other", "original/consolidated.json": b"{}"}
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_that_is_not_here_is_downloaded_once(remote, capsys):
    with pytest.raises(ModelNotFound, match=f"'ramify model fetch {NAME}' downloads it"):
        resolve_model_path(NAME)
    lines = []
    path = fetch_model(NAME, log=lines.append)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (path / name).read_bytes() == (resolve_model_path("tiny") / name).read_bytes()
    assert not {"pytorch_model.bin", "onnx/model.onnx", "original/consolidated.json"} & set(remote.sent)
    assert lines[0].startswith(f"downloading {NAME} from {remote.url}")
    assert lines[-1].startswith(f"downloaded {NAME}")
    assert path == resolve_model_path(NAME) == fetch_model(NAME, log=lines.append)
    assert len(lines) == 2
    assert main(["model", "fetch", NAME]) == 0
    assert capsys.readouterr().out == f"{path}\n"


def test_an_interrupted_download_is_completed(remote):
    path = fetch_model(NAME, log=lambda line: None)
    (path / "model.safetensors").resolve().unlink()
    (path / "model.safetensors").unlink()
    remote.sent.clear()
    assert fetch_model(NAME, log=lambda line: None) == path
    assert remote.sent == ["model.safetensors"]
    assert (path / "model.safetensors").is_file()


def test_progress_is_told_where_there_is_no_terminal(remote, monkeypatch):
    told = threading.Event()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if "so far" in line:
            told.set()

    send = Answer.reply

    def slow(self, code, data, headers, *, body):
        if body and len(data) > 1_000_000:
            assert told.wait(30)
        send(self, code, data, headers, body=body)

    monkeypatch.setattr(hub, "INTERVAL", 0.05)
    monkeypatch.setattr(Answer, "reply", slow)
    fetch_model(NAME, log=say)
    assert any(line.startswith(f"downloading {NAME}: ") and line.endswith("MB so far") for line in lines)


def unreachable(remote, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def offline(remote, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("without", [unreachable, offline])
def test_without_a_network_one_line_says_how_to_bring_the_files(remote, monkeypatch, without):
    without(remote, monkeypatch)
    with pytest.raises(ModelNotFound) as refused:
        fetch_model(NAME, log=lambda line: None)
    assert "\n" not in refused.value.message
    assert "hf download org/small --local-dir small" in refused.value.message
    assert ("HF_HUB_OFFLINE is set" in refused.value.message) == (without is offline)
    assert remote.sent == []


def test_a_model_that_the_hub_does_not_have_or_does_not_give_is_named(remote):
    with pytest.raises(ModelNotFound, match=f"'org/smal' is no directory here and not on {remote.url}: check the name"):
        fetch_model("org/smal", log=lambda line: None)
    remote.gated = True
    with pytest.raises(ModelNotFound, match=f"accept its terms at {remote.url}/{NAME}"):
        fetch_model(NAME, log=lambda line: None)


def test_names_that_are_no_hub_ids_ask_nobody(remote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(resolve_model_path("tiny"), tmp_path / "a" / "b")
    assert fetch_model("a/b", log=pytest.fail) == tmp_path / "a" / "b"
    for name in ("tinny", "./models/small", "/models/small", "a/b/c"):
        with pytest.raises(ModelNotFound):
            fetch_model(name, log=pytest.fail)


def test_a_command_downloads_before_it_starts_and_a_dry_run_does_not(remote, tmp_path, capsys):
    asked = ["eval", "reverse-text", "-m", NAME, "-o", str(tmp_path), "--num_tasks", "1", "--sampling.max_tokens", "4"]
    assert main([*asked, "--dry-run"]) == 2
    assert f"ramify model fetch {NAME}" in capsys.readouterr().err
    assert remote.sent == []
    assert main(asked) == 0
    assert f"downloading {NAME}" in capsys.readouterr().err
    assert "model.safetensors" in remote.sent
