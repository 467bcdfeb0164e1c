"""The command `ramify env-server`: what becomes of everything when somebody is killed, or asked to go."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ramify.config import write_toml
from ramify.envserver import EnvClient
from ramify.envserver.server_process import EnvServerProcess
from ramify.errors import ConfigInvalid, PeerLost, RequestCancelled
from tests.cli.installed_command import ramify_command
from tests.envserver.stage import QUICK, configured, family, gone, task, until

PARENT = """
import asyncio, sys
from pathlib import Path
from ramify.config import parse
from ramify.envserver import EnvServerProcess, EnvServerConfig

async def main():
    config = parse(EnvServerConfig, ["@", sys.argv[1]])
    async with EnvServerProcess(config, Path(sys.argv[1] + ".child.toml")) as child:
        print(child.pid, child.address, flush=True)
        await child.wait()

asyncio.run(main())
"""


async def busy(client: EnvClient, tmp_path: Path, count: int = 2) -> list[asyncio.Task]:
    """Rollouts that run shells, once they do."""
    files = [tmp_path / f"shell-{number}" for number in range(count)]
    rollouts = [
        asyncio.create_task(client.run(task(number, does="shell", file=str(file), nap=86399), id=f"b{number}"))
        for number, file in enumerate(files)
    ]
    await until(lambda: all(file.exists() and file.read_text().strip() for file in files), "the shells")
    for file in files:
        file.unlink()
    return rollouts


def test_whoever_is_killed_takes_all_below_along_and_the_client_hears_of_it(engine, tmp_path, monkeypatch):
    config = configured(engine.url, tmp_path, pool={"type": "static", "workers": 1}, address_file=tmp_path / "address")
    file, temporary = tmp_path / "config.toml", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    write_toml(config, file)

    async def scene():
        # the parent of the server
        parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file)], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        pid, address = (await asyncio.to_thread(parent.stdout.readline)).split()
        assert (tmp_path / "address").read_text().strip() == address
        async with EnvClient(address, settings=QUICK) as client:
            rollouts = await busy(client, tmp_path)
            processes = [psutil.Process(int(pid)), *family(int(pid))]
            assert len(processes) >= 6  # server, keeper, worker, shells
            parent.kill()
            parent.wait()
            await gone(processes, "the server, its worker and the shells", 5)
            for rollout in rollouts:
                with pytest.raises((PeerLost, RequestCancelled)):
                    await rollout
        parent.stdout.close()
        # the server itself, and another one at its address
        config.train[0].address = address
        child = await EnvServerProcess(config, file).start()
        async with EnvClient(address, settings=QUICK) as client:
            rollouts = await busy(client, tmp_path)
            processes = family(child.pid)
            os.kill(child.pid, signal.SIGKILL)
            await gone(processes, "the worker and the shells", 5)
            for rollout in rollouts:
                with pytest.raises(PeerLost, match=r"no message for|forgotten"):
                    await rollout
            await child.stop()
            async with EnvServerProcess(config, file) as again:
                done = await client.run(task(1), id="after", timeout=60)
                assert done.episode.traces[0].rewards["right"] == (1.0, 1.0)
                # and asked to go, under load
                rollouts = await busy(client, tmp_path)
                processes = family(again.pid)
                assert await again.stop() == 0
                await gone(processes, "the worker and the shells", 5)
                for rollout in rollouts:
                    with pytest.raises((PeerLost, RequestCancelled)):
                        await rollout
                assert again.output_tail == ""
        log = (tmp_path / "logs" / "env" / "train" / "tricky.log").read_text()
        assert "Traceback" not in log
        assert re.search(r"broker closing, 2 attempts are cancelled\n.*broker closed\n", log)
        await until(lambda: not list(temporary.iterdir()), "the temporary directories to be gone", 5)

    asyncio.run(scene())


def test_what_is_wrong_with_a_source_is_said_before_anything_is_served(engine, tmp_path):
    async def scene():
        config = configured(engine.url, tmp_path, taskset={"boots": "x"}, pool={"type": "static", "workers": 1})
        with pytest.raises(ConfigInvalid, match="did you mean"):
            await EnvServerProcess(config, tmp_path / "config.toml").start()

    asyncio.run(scene())


TALKER = """#!{python} -u
import signal, sys
print()
print("x" * 300_000)
print("serving it at tcp://127.0.0.1:9")
for _ in range(20):
    print("y" * 300_000)
print("the last word")
signal.sigwait([signal.SIGTERM])
"""


def test_whatever_a_server_says_is_read_and_its_address_found(engine, tmp_path, monkeypatch):
    talker = tmp_path / "talker"
    talker.write_text(TALKER.format(python=sys.executable))
    talker.chmod(0o755)
    config = configured(engine.url, tmp_path)
    monkeypatch.setattr(sys, "executable", str(talker))

    async def scene():
        async with EnvServerProcess(config, tmp_path / "config.toml", start_timeout=20) as child:
            assert child.address == "tcp://127.0.0.1:9"
            await until(lambda: child.output_tail.endswith("the last word"), "the last word", 20)

    asyncio.run(scene())


def test_a_public_address_without_a_secret_is_refused(engine, tmp_path):
    write_toml(configured(engine.url, tmp_path, address="tcp://0.0.0.0:0"), tmp_path / "config.toml")
    done = ramify_command("env-server", "@", str(tmp_path / "config.toml"), "--dry-run")
    assert done.returncode == 2
    assert "set a secret" in done.stderr
