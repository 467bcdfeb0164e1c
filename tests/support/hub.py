"""A stand-in for the Hugging Face hub: an HTTP server with the part of its API that downloads and uploads call."""

import json
import re
import threading
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

API_PATTERN = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/(.+)")
UPLOAD_PATTERN = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/(.+)")
FILE_PATTERN = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+|refs/[^/]+/[^/]+)/(.+)")


@dataclass
class FakeRepo:
    """A repository: the files of each commit, and the commit of each branch and tag."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], ref: str = "main") -> str:
        """Add a commit with these files, to which `ref` then refers, and return it."""
        contents = "".join(f"{name}:{sha1(data).hexdigest()}" for name, data in files.items())
        commit = sha1(f"{len(self.commits)}{contents}".encode()).hexdigest()
        self.commits[commit], self.refs[ref] = dict(files), commit
        return commit


class FakeHub(ThreadingHTTPServer):
    """A hub with some repositories. `sent` lists the files whose contents were requested, with the range if any."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repos: dict[tuple[str, str], FakeRepo] = {}
        self.sent: list[str] = []
        self.gated = False
        self.broken_after: dict[str, int] = {}  # bytes of a file after which its next transfer breaks off
        self.before_body = lambda data: None  # called with the contents before they are sent

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, kind: str, name: str, files: Mapping[str, bytes]) -> FakeRepo:
        """Add a repository of this kind, `models` or `datasets`, whose branch `main` has these files."""
        repo = self.repos[kind, name] = FakeRepo()
        repo.commit(files)
        return repo


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def do_HEAD(self) -> None:
        self.respond(body=False)

    def do_GET(self) -> None:
        self.respond(body=True)

    def do_POST(self) -> None:
        """Create a repository, or commit files to a model's branch."""
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            table = json.loads(data)
            name = f"{table['organization']}/{table['name']}" if table.get("organization") else table["name"]
            self.server.add("models", name, {})
            return self.reply_json({"url": f"{self.server.url}/{name}"})
        if path == "/api/validate-yaml":  # of a model card
            return self.reply_json({"errors": [], "warnings": []})
        match = UPLOAD_PATTERN.fullmatch(path)
        if match is None:
            return self.reply(404, b"{}", {}, body=True)
        name, action, branch = match.groups()
        if action == "preupload":
            files = json.loads(data)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self.reply_json({"files": modes})
        entries = [json.loads(line) for line in data.splitlines()]
        files = {
            entry["value"]["path"]: b64decode(entry["value"]["content"]) for entry in entries if entry["key"] == "file"
        }
        commit = self.server.repos["models", name].commit(files, branch)
        url = f"{self.server.url}/{name}/commit/{commit}"
        return self.reply_json({"commitUrl": url, "commitOid": commit, "pullRequestUrl": None})

    def reply_json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body=True)

    def respond(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.server.gated:
            return self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"}, body=body)
        if match := API_PATTERN.fullmatch(path):
            kind, name, action, revision = match.groups()
        elif match := FILE_PATTERN.fullmatch(path):
            kind, name, revision, action = "datasets" if match[1] else "models", match[2], match[3], "resolve"
        else:
            return self.reply(404, b"{}", {}, body=body)
        repo = self.server.repos.get((kind, name))
        if repo is None:
            return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
        files = repo.commits[commit]
        if action == "resolve":
            return self.send_file(files, match[4], commit, body=body)
        siblings = [{"rfilename": name} for name in files]
        info = {"id": name, "sha": commit, "private": False, "siblings": siblings}
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        data = json.dumps(info if action == "revision" else tree).encode()
        return self.reply(200, data, {"Content-Type": "application/json"}, body=body)

    def send_file(self, files: Mapping[str, bytes], name: str, commit: str, *, body: bool) -> None:
        if name not in files:
            return self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"}, body=body)
        data, headers = files[name], {"ETag": f'"{sha1(files[name]).hexdigest()}"', "X-Repo-Commit": commit}
        if not body:
            return self.reply(200, data, headers, body=False)
        start = int(re.sub(r"bytes=(\d+)-.*", r"\1", self.headers.get("Range", "bytes=0-")))
        self.server.sent.append(f"{name} from {start}" if start else name)
        self.server.before_body(data)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        break_after = self.server.broken_after.pop(name, None)
        return self.reply(206 if start else 200, data[start:], headers, body=True, break_after=break_after)

    def reply(
        self, code: int, data: bytes, headers: Mapping[str, str], *, body: bool, break_after: int | None = None
    ) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data[:break_after])
        if break_after is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """Serve an empty hub."""
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
