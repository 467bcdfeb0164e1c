"""A stand-in for the HTTP API of prime-sandboxes: each sandbox is a directory of this machine, without isolation.

It has the routes that the SDK calls for a sandbox's life, its files and its live processes. The latter speak the
Connect protocol: messages of protobuf, each behind a byte of flags and its length.
"""

import asyncio
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import struct
import sys
import threading
import uuid
from pathlib import Path

import psutil
from aiohttp import web

END_OF_STREAM = 2
WORKDIR = re.compile(
    r"(?<!\w)/sandbox/work"
)  # which commands name, and which is a directory of its own for each sandbox
SERVICE = "command_session.CommandSession"


class PrimeFake:
    """The server, in a thread of its own. `requests` has the bodies of the requests that created sandboxes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.sandboxes: dict[str, dict] = {}
        self.requests: list[dict] = []
        self.url = ""
        self._sessions: dict[str, asyncio.subprocess.Process] = {}

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *error):
        for sandbox_id in list(self.sandboxes):
            self.remove(sandbox_id)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def remove(self, sandbox_id: str) -> None:
        """Kill the programs of a sandbox and remove its files."""
        self.sandboxes.pop(sandbox_id, None)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PRIME_FAKE") == sandbox_id:
                    process.kill()
        shutil.rmtree(self._root / sandbox_id, ignore_errors=True)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 30)
        gateway = "/gateway/ns/{id}"
        app.add_routes(
            [
                web.post("/api/v1/sandbox", self._create),
                web.get("/api/v1/sandbox", self._list),
                web.post("/api/v1/sandbox/status:batchGet", self._statuses),
                web.get("/api/v1/sandbox/{id}", self._get),
                web.delete("/api/v1/sandbox/{id}", self._delete),
                web.post("/api/v1/sandbox/{id}/auth", self._auth),
                web.get("/api/v1/sandbox/{id}/error-context", self._error_context),
                web.post(gateway + "/upload", self._upload),
                web.post(f"{gateway}/{SERVICE}/Start", self._start),
                web.post(f"{gateway}/{SERVICE}/SendInput", self._send_input),
                web.post(f"{gateway}/{SERVICE}/SendSignal", self._send_signal),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _create(self, request):
        if request.headers.get("Authorization") != "Bearer key":
            return web.json_response({"detail": "wrong key"}, status=401)
        body = await request.json()
        self.requests.append(body)
        sandbox_id = uuid.uuid4().hex
        for name in ("home", "tmp"):
            (self._root / sandbox_id / name).mkdir(parents=True)
        now = datetime.datetime.now(datetime.UTC).isoformat()
        self.sandboxes[sandbox_id] = {
            "id": sandbox_id,
            "name": body["name"],
            "dockerImage": body["docker_image"],
            "cpuCores": body["cpu_cores"],
            "memoryGB": body["memory_gb"],
            "diskSizeGB": body["disk_size_gb"],
            "diskMountPath": "/",
            "gpuCount": 0,
            "status": "RUNNING",
            "timeoutMinutes": body["timeout_minutes"],
            "labels": body["labels"],
            "createdAt": now,
            "updatedAt": now,
        }
        return web.json_response(self.sandboxes[sandbox_id])

    async def _list(self, request):
        wanted = set(request.query.getall("labels", []))
        sandboxes = [sandbox for sandbox in self.sandboxes.values() if wanted <= set(sandbox["labels"])]
        page = {"total": len(sandboxes), "page": 1, "perPage": 50, "hasNext": False}
        return web.json_response({"sandboxes": sandboxes, **page})

    async def _statuses(self, request):
        statuses, errors = [], []
        for sandbox_id in (await request.json())["sandbox_ids"]:
            if sandbox_id in self.sandboxes:
                statuses.append({"sandbox_id": sandbox_id, "status": self.sandboxes[sandbox_id]["status"]})
            else:
                errors.append({"sandbox_id": sandbox_id, "code": "NOT_FOUND", "message": "gone"})
        return web.json_response({"statuses": statuses, "errors": errors})

    async def _get(self, request):
        sandbox = self.sandboxes.get(request.match_info["id"])
        return web.json_response(sandbox or {"detail": "not found"}, status=200 if sandbox else 404)

    async def _delete(self, request):
        if request.match_info["id"] not in self.sandboxes:
            return web.json_response({"detail": "not found"}, status=404)
        await asyncio.to_thread(self.remove, request.match_info["id"])
        return web.json_response({"message": "deleted"})

    async def _auth(self, request):
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
        names = {"gateway_url": f"{self.url}/gateway", "user_ns": "ns", "job_id": request.match_info["id"]}
        return web.json_response({**names, "token": "token", "expires_at": expires.isoformat()})

    async def _error_context(self, request):
        sandbox = self.sandboxes.get(request.match_info["id"], {"status": "TERMINATED"})
        return web.json_response({"status": sandbox["status"]})

    async def _upload(self, request):
        field = await (await request.multipart()).next()
        data = bytes(await field.read())
        path = Path(request.query["path"])
        await asyncio.to_thread(path.write_bytes, data)
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return web.json_response({"success": True, "path": str(path), "size": len(data), "timestamp": now})

    async def _start(self, request):
        from prime_sandboxes._proto.command_session import command_session_pb2 as messages

        sandbox_id = request.match_info["id"]
        body = await request.read()
        start = messages.StartRequest.FromString(body[5:])
        response = web.StreamResponse(headers={"Content-Type": "application/connect+proto"})
        await response.prepare(request)
        if sandbox_id not in self.sandboxes:
            await _end_stream(response, {"error": {"code": "not_found", "message": "no such sandbox"}})
            return response
        folder = self._root / sandbox_id
        path = os.pathsep.join([f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"])
        env = {"PATH": path, "HOME": str(folder / "home"), "PRIME_FAKE": sandbox_id, **start.command.envs}
        process = await asyncio.create_subprocess_exec(
            start.command.cmd,
            *(WORKDIR.sub(rf"{folder}\g<0>", argument) for argument in start.command.args),
            stdin=asyncio.subprocess.PIPE if start.stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            cwd=folder,
            start_new_session=True,
        )
        self._sessions[start.session_uuid] = process

        async def send(**event):
            await _send_message(response, messages.StartResponse(event=messages.CommandSessionEvent(**event)))

        async def copy(name, stream):
            while data := await stream.read(1 << 16):
                await send(data=messages.CommandSessionEvent.DataEvent(**{name: data}))

        with contextlib.suppress(ConnectionError):
            await send(start=messages.CommandSessionEvent.StartEvent(pid=process.pid))
            await asyncio.gather(copy("stdout", process.stdout), copy("stderr", process.stderr))
            status = await process.wait()
            end = messages.CommandSessionEvent.EndEvent(exit_code=status if status >= 0 else 128 - status, exited=True)
            await send(end=end)
            await _end_stream(response, {})
        return response

    async def _send_input(self, request):
        from prime_sandboxes._proto.command_session import command_session_pb2 as messages

        message = messages.SendInputRequest.FromString(await request.read())
        process = self._sessions[message.session.session_uuid]
        process.stdin.write(message.input.stdin)
        return web.Response(headers={"Content-Type": "application/proto"})

    async def _send_signal(self, request):
        from prime_sandboxes._proto.command_session import command_session_pb2 as messages

        message = messages.SendSignalRequest.FromString(await request.read())
        number = signal.SIGKILL if message.signal == messages.SIGNAL_SIGKILL else signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._sessions[message.session.session_uuid].pid, number)
        return web.Response(headers={"Content-Type": "application/proto"})


async def _send_message(response, message) -> None:
    data = message.SerializeToString()
    await response.write(struct.pack(">BI", 0, len(data)) + data)


async def _end_stream(response, result) -> None:
    data = json.dumps(result).encode()
    await response.write(struct.pack(">BI", END_OF_STREAM, len(data)) + data)
