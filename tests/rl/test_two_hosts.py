"""docs/scaling.md, done as a reader would do it: its file, its commands, on two addresses of this machine."""

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
from ramify.envserver import EnvClient
from ramify.errors import PeerLost
from ramify.launch.ports import PortReservation

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
HOSTS = {"10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.2"}
STEPS = 2
DEADLINE = 80.0


def on_this_machine(text: str) -> str:
    """The page's addresses as addresses of this machine, with ports that are free."""
    here = {}
    for address in re.findall(r"\w+://10\.0\.0\.\d:\d+", text):
        scheme, host, _ = re.split(r"://|:", address)
        here[address] = f"{scheme}://{HOSTS[host]}:0"
    for address, free in PortReservation(here).addresses.items():
        text = text.replace(address, free)
    return text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_the_commands_of_the_page_train_over_two_addresses(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAMIFY_SECRET", "between the two of us")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    file = re.search(r"```toml\n# run.toml\n(.*?)```", PAGE, re.DOTALL)[1]
    short = on_this_machine(file).replace("max_steps = 200", f"max_steps = {STEPS}")
    (tmp_path / "run.toml").write_text(short)
    commands = re.findall(r"^10\.0\.0\.\d\$ ramify (.*)$", PAGE, re.MULTILINE)
    assert [line.split()[0] for line in commands] == ["serve", "env-server", "orchestrator", "trainer"]
    started = {}
    try:
        for line in commands:
            command = [sys.executable, "-m", "ramify", *line.split()]
            with (tmp_path / f"{line.split()[0]}.txt").open("w") as said:
                started[line.split()[0]] = subprocess.Popen(command, cwd=tmp_path, stdout=said, stderr=said)
        address = re.search(r'^address = "(.*?)".*own$', short, re.MULTILINE)[1]
        asyncio.run(stranger(address))
        end = time.monotonic() + DEADLINE
        for part in ("orchestrator", "trainer"):
            assert started[part].wait(end - time.monotonic()) == 0, (tmp_path / f"{part}.txt").read_text()[-3000:]
        for part in ("serve", "env-server"):
            started[part].terminate()
            assert started[part].wait(30) == 0, (tmp_path / f"{part}.txt").read_text()[-3000:]
    finally:
        for process in started.values():
            for child in [process.pid, *(one.pid for one in family(process.pid))]:
                if psutil.pid_exists(child):
                    os.kill(child, 9)
            process.wait()
    run = tmp_path / "outputs" / "two-hosts"
    assert len(list(run.glob("checkpoints/step_*"))) == 1
    assert main(["why", str(run), "--audit"]) == 0
    assert f"{STEPS} steps: no problems" in capsys.readouterr().out


def family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


async def stranger(address: str) -> None:
    """Somebody who knows the address and not the secret is not answered; who knows it is."""
    known = await EnvClient(address, os.environ["RAMIFY_SECRET"]).start(DEADLINE)
    try:
        assert (await known.health()).state in ("booting", "ok")
        for secret in ("a guess", None):
            with pytest.raises(PeerLost):
                await EnvClient(address, secret).start(0.5)
    finally:
        await known.close()
