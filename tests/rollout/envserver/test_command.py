"""The command `ramify env-server`: its output, and what remains when a process is killed or stopped."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ramify.cli import main
from ramify.core.config import write_toml
from ramify.core.errors import ConfigInvalid, PeerLost, RequestCancelled, StorageFailed
from ramify.rollout import server_process
from ramify.rollout.envserver import EnvClient
from ramify.rollout.envserver.client import EnvServerProcess
from tests.support.processes import async_wait_until as wait_until
from tests.support.processes import async_wait_until_ended, list_descendants
from tests.support.tricky_env_server import QUICK, make_config, task

pytestmark = pytest.mark.process

PARENT = """
import asyncio, sys
from pathlib import Path
from ramify.core.config import parse
from ramify.rollout.envserver import EnvServerProcess, EnvServerConfig

async def main():
    config = parse(EnvServerConfig, ["@", sys.argv[1]])
    async with EnvServerProcess(config, Path(sys.argv[1] + ".child.toml")) as child:
        print(child.pid, child.address, flush=True)
        await child.wait()

asyncio.run(main())
"""


async def start_shell_rollouts(client: EnvClient, tmp_path: Path, count: int = 2) -> list[asyncio.Task]:
    """Start rollouts that run shells, and return when the shells run."""
    files = [tmp_path / f"shell-{number}" for number in range(count)]
    rollouts = [
        asyncio.create_task(client.run(task(number, does="shell", file=str(file), nap=86399), id=f"b{number}"))
        for number, file in enumerate(files)
    ]
    await wait_until(lambda: all(file.exists() and file.read_text().strip() for file in files), "the shells")
    for file in files:
        file.unlink()
    return rollouts


async def test_killing_any_process_kills_all_below_it_and_fails_open_requests(engine, tmp_path, monkeypatch):
    config = make_config(engine.url, tmp_path, pool={"type": "static", "workers": 1}, address_file=tmp_path / "address")
    file, temp_dir = tmp_path / "config.toml", tmp_path / "tmp"
    temp_dir.mkdir()
    monkeypatch.setenv("TMPDIR", str(temp_dir))
    write_toml(config, file)

    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(file)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, address = (await asyncio.to_thread(parent.stdout.readline)).split()
    assert (tmp_path / "address").read_text().strip() == address
    async with EnvClient(address, settings=QUICK) as client:
        rollouts = await start_shell_rollouts(client, tmp_path)
        processes = [psutil.Process(int(pid)), *list_descendants(int(pid))]
        assert len(processes) >= 6  # server, watcher, worker, shells
        parent.kill()
        parent.wait()
        await async_wait_until_ended(processes, "the server, its worker and the shells")
        for rollout in rollouts:
            with pytest.raises((PeerLost, RequestCancelled, StorageFailed)):
                await rollout
    parent.stdout.close()
    # then the server itself, and another one at the same address
    config.train[0].address = address
    child = await EnvServerProcess(config, file).start()
    async with EnvClient(address, settings=QUICK) as client:
        rollouts = await start_shell_rollouts(client, tmp_path)
        processes = list_descendants(child.pid)
        os.kill(child.pid, signal.SIGKILL)
        await async_wait_until_ended(processes, "the worker and the shells")
        for rollout in rollouts:
            with pytest.raises(PeerLost, match=r"no message for|forgotten"):
                await rollout
        await child.stop()
        async with EnvServerProcess(config, file) as restarted:
            completed = await client.run(task(1), id="after", timeout=60)
            assert completed.episode.traces[0].rewards["right"] == (1.0, 1.0)
            # then a stop under load
            rollouts = await start_shell_rollouts(client, tmp_path)
            processes = list_descendants(restarted.pid)
            assert await restarted.stop() == 0
            await async_wait_until_ended(processes, "the worker and the shells")
            for rollout in rollouts:
                with pytest.raises((PeerLost, RequestCancelled, StorageFailed)):
                    await rollout
            assert re.fullmatch(r"serving \S+ at \S+", restarted.log.tail())
    log = (tmp_path / "logs" / "env" / "train" / "tricky.log").read_text()
    assert "Traceback" not in log
    assert re.search(r"broker closing cancelled_attempts=2\n(.* rollout stopped .*\n)*.*broker closed\n", log)
    await wait_until(lambda: not list(temp_dir.iterdir()), "the temporary directories to be gone")


async def test_invalid_source_is_reported_before_serving(engine, tmp_path):
    config = make_config(engine.url, tmp_path, taskset={"boots": "x"}, pool={"type": "static", "workers": 1})
    with pytest.raises(ConfigInvalid, match="did you mean"):
        await EnvServerProcess(config, tmp_path / "config.toml").start()


async def test_files_that_cannot_be_written_have_a_named_error(tmp_path):
    (tmp_path / "file").touch()
    config = make_config("http://127.0.0.1:9", tmp_path)
    with pytest.raises(StorageFailed, match=r"cannot be used: .*File exists"):
        await EnvServerProcess(config, tmp_path / "file" / "config.toml").start()


OUTPUT_SCRIPT = """#!{python} -u
import signal, sys
print()
print("x" * 300_000)
print("serving it at tcp://127.0.0.1:9")
for _ in range(20):
    print("y" * 300_000)
print("the last word")
signal.sigwait([signal.SIGTERM])
"""


async def test_all_output_is_read_and_the_address_is_found(engine, tmp_path, monkeypatch):
    script = tmp_path / "talker"
    script.write_text(OUTPUT_SCRIPT.format(python=sys.executable))
    script.chmod(0o755)
    config = make_config(engine.url, tmp_path)
    monkeypatch.setattr(server_process, "RAMIFY_COMMAND", (str(script),))

    async with EnvServerProcess(config, tmp_path / "config.toml", start_timeout=60) as child:
        assert child.address == "tcp://127.0.0.1:9"
        await wait_until(lambda: child.log.tail().endswith("the last word"), "the last word")


def test_public_address_without_a_secret_is_refused(engine, tmp_path, capsys):
    write_toml(make_config(engine.url, tmp_path, address="tcp://0.0.0.0:0"), tmp_path / "config.toml")
    assert main(["env-server", "@", str(tmp_path / "config.toml"), "--dry-run"]) == 2
    assert "set a secret" in capsys.readouterr().err
