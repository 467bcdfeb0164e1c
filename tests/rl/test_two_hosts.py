"""The configuration and the commands of docs/cluster.md, run on two addresses of this machine."""

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ramify.cli.app import main
from ramify.core.errors import PeerLost
from ramify.processes.wire.listener import PortReservation
from ramify.rollout.envserver import EnvClient

pytestmark = pytest.mark.run

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
HOSTS = {"10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.2"}
STEPS = 2
TIMEOUT = 80.0


def replace_addresses(text: str) -> str:
    """Replace the addresses of the page by addresses of this machine with free ports."""
    local = {}
    for address in re.findall(r"\w+://10\.0\.0\.\d:\d+", text):
        scheme, host, _ = re.split(r"://|:", address)
        local[address] = f"{scheme}://{HOSTS[host]}:0"
    for address, free in PortReservation(local).addresses.items():
        text = text.replace(address, free)
    return text


@pytest.mark.full("starts everything; tests/launch has the parts")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_commands_of_the_page_train_over_two_addresses(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAMIFY_SECRET", "between the two of us")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    file = re.search(r"```toml\n# run.toml\n(.*?)```", PAGE, re.DOTALL)[1]
    config = replace_addresses(file).replace("max_steps = 200", f"max_steps = {STEPS}")
    (tmp_path / "run.toml").write_text(config)
    commands = re.findall(r"^10\.0\.0\.\d\$ ramify (.*)$", PAGE, re.MULTILINE)
    assert [line.split()[0] for line in commands] == ["serve", "env-server", "orchestrator", "trainer"]
    processes = {}
    try:
        for line in commands:
            command = [sys.executable, "-m", "ramify", *line.split()]
            with (tmp_path / f"{line.split()[0]}.txt").open("w") as output:
                processes[line.split()[0]] = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
        address = re.search(r'^address = "(.*?)".*own$', config, re.MULTILINE)[1]
        asyncio.run(check_secret(address))
        deadline = time.monotonic() + TIMEOUT
        for name in ("orchestrator", "trainer"):
            assert processes[name].wait(deadline - time.monotonic()) == 0, (tmp_path / f"{name}.txt").read_text()[
                -3000:
            ]
        for name in ("serve", "env-server"):
            processes[name].terminate()
            assert processes[name].wait(30) == 0, (tmp_path / f"{name}.txt").read_text()[-3000:]
    finally:
        for process in processes.values():
            for child in [process.pid, *(child.pid for child in find_descendants(process.pid))]:
                if psutil.pid_exists(child):
                    os.kill(child, 9)
            process.wait()
    run = tmp_path / "outputs" / "two-hosts"
    assert len(list(run.glob("checkpoints/step_*"))) == 1
    assert main(["why", str(run), "--audit"]) == 0
    assert f"{STEPS} steps: no problems" in capsys.readouterr().out


def find_descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


async def check_secret(address: str) -> None:
    """Check that a client with the secret is answered, and a client without it is not."""
    client = await EnvClient(address, os.environ["RAMIFY_SECRET"]).start(TIMEOUT)
    try:
        assert (await client.health()).state in ("booting", "ok")
        for secret in ("a guess", None):
            with pytest.raises(PeerLost):
                await EnvClient(address, secret).start(0.5)
    finally:
        await client.close()
