"""Hub models are downloaded into the cache; without a network one line says how to get the files."""

import json
import shutil
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from ramify.cli import main
from ramify.core.errors import ModelNotFound
from ramify.model import resolve
from ramify.model.resolve import fetch_model, resolve_model_path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "org/small"


class FakeHub(ThreadingHTTPServer):
    """A hub with one model: as much of the protocol as a download needs."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files, self.sent, self.gated = files, [], False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_HEAD(self) -> None:
        self.respond(body=False)

    def do_GET(self) -> None:
        self.respond(body=True)

    def respond(self, *, body: bool) -> None:
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
            info = {"id": NAME, "sha": COMMIT, "private": False, "siblings": siblings}
            return self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body=body)
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
    """A hub with `tiny` under another name and other formats of it; and an empty cache."""
    files = {path.name: path.read_bytes() for path in resolve_model_path("tiny").iterdir()}
    server = FakeHub(
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


def test_missing_model_is_downloaded_once(remote, capsys):
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


def test_interrupted_download_is_completed(remote):
    path = fetch_model(NAME, log=lambda line: None)
    (path / "model.safetensors").resolve().unlink()
    (path / "model.safetensors").unlink()
    remote.sent.clear()
    assert fetch_model(NAME, log=lambda line: None) == path
    assert remote.sent == ["model.safetensors"]
    assert (path / "model.safetensors").is_file()


def test_progress_is_logged_without_a_terminal(remote, monkeypatch):
    progress_logged = threading.Event()
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        if "so far" in line:
            progress_logged.set()

    reply = HubHandler.reply

    def reply_slowly(self, code, data, headers, *, body):
        if body and len(data) > 1_000_000:
            assert progress_logged.wait(30)
        reply(self, code, data, headers, body=body)

    monkeypatch.setattr(resolve, "PROGRESS_INTERVAL", 0.05)
    monkeypatch.setattr(HubHandler, "reply", reply_slowly)
    fetch_model(NAME, log=log)
    assert any(line.startswith(f"downloading {NAME}: ") and line.endswith("MB so far") for line in lines)


def unreachable(remote, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def offline(remote, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("disconnect", [unreachable, offline])
def test_without_a_network_the_error_says_how_to_get_the_files(remote, monkeypatch, disconnect):
    disconnect(remote, monkeypatch)
    with pytest.raises(ModelNotFound) as error:
        fetch_model(NAME, log=lambda line: None)
    assert "\n" not in error.value.message
    assert "hf download org/small --local-dir small" in error.value.message
    assert ("HF_HUB_OFFLINE is set" in error.value.message) == (disconnect is offline)
    assert remote.sent == []


def test_unknown_and_gated_models_are_reported(remote):
    with pytest.raises(
        ModelNotFound, match=f"'org/smal' is neither a directory here nor on {remote.url}: check the name"
    ):
        fetch_model("org/smal", log=lambda line: None)
    remote.gated = True
    with pytest.raises(ModelNotFound, match=f"accept its terms at {remote.url}/{NAME}"):
        fetch_model(NAME, log=lambda line: None)


def test_other_names_do_not_use_the_hub(remote, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(resolve_model_path("tiny"), tmp_path / "a" / "b")
    assert fetch_model("a/b", log=pytest.fail) == tmp_path / "a" / "b"
    for name in ("tinny", "./models/small", "/models/small", "a/b/c"):
        with pytest.raises(ModelNotFound):
            fetch_model(name, log=pytest.fail)


EVAL = ("eval", "reverse-text", "-m", NAME, "--num_tasks", "1", "--sampling.max_tokens", "4", "-o")


@pytest.mark.process
def test_dry_runs_do_not_download(remote, tmp_path, capsys):
    assert main([*EVAL, str(tmp_path), "--dry-run"]) == 2
    assert f"ramify model fetch {NAME}" in capsys.readouterr().err
    assert remote.sent == []


@pytest.mark.process
@pytest.mark.full("starts an engine")
def test_commands_download(remote, tmp_path, capsys):
    assert main([*EVAL, str(tmp_path)]) == 0
    assert f"downloading {NAME}" in capsys.readouterr().err
    assert "model.safetensors" in remote.sent
