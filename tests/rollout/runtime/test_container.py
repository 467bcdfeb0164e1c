"""What is particular to containers: their isolation, the way to the gateway, and what a killed worker leaves.

Those that need an engine run with `make test-containers`; the others ask a stand-in for the engine's program.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

import ramify
from ramify.core.errors import AgentFailed, ConfigInvalid, SandboxError
from ramify.env import Task
from ramify.env.runtime import Capability
from ramify.rollout.runtime import ContainerRuntime, ContainerRuntimeConfig, container_engine
from ramify.rollout.runtime.container_engine import ContainerEngine
from ramify.rollout.runtime.container_socket import open_listener
from tests.rollout.runtime.conftest import RUNTIMES, open_runtime, run_with_runtime, skip_unless_available
from tests.support.processes import async_wait_until

ISOLATION = Capability.ISOLATION
DOCKER_INFO = {
    "ServerVersion": "27.1.0",
    "MemoryLimit": True,
    "PidsLimit": True,
    "CpuCfsQuota": False,
    "SecurityOptions": ["name=seccomp"],
}


@pytest.fixture
def needs_engine():
    skip_unless_available("container")


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    """Make a program `docker` whose `info` and `pull` are given, and which fails at everything else."""

    def make(info, pull="true"):
        folder = tmp_path / uuid.uuid4().hex
        folder.mkdir()
        cases = f"*info*) echo '{json.dumps(info)}';; pull*) {pull};; *) echo broken >&2; exit 1;;"
        (folder / "docker").write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
        (folder / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.delenv("DOCKER_HOST", raising=False)

    return make


async def run_in_container(command, *, timeout: float = 20, **settings):
    async def test(runtime):
        return await runtime.run(command, timeout=timeout)

    return await run_with_runtime("container", test, **settings)


def test_missing_engine_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigInvalid, match="docker or podman is not installed"):
        ContainerRuntime().check_task(Task())
    with pytest.raises(ConfigInvalid, match="podman is not installed"):
        ContainerRuntime(ContainerRuntimeConfig(engine="podman")).check_task(Task())


@pytest.mark.process
def test_limit_that_the_engine_does_not_have_is_refused(make_engine):
    make_engine(DOCKER_INFO)
    runtime = ContainerRuntime()
    runtime.check_task(Task(image="debian:12", requires=("isolation", "private_network")))
    with pytest.raises(ConfigInvalid, match=r"cpus in the task's resources needs cpu_limit .* docker info reports"):
        runtime.check_task(Task(resources={"cpus": 1}))


@pytest.mark.process
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"engine_host": "ssh://me@far"}, "a container on ssh://me@far without a network has no way to it"),
        ({"network": "bridge"}, "set gateway_url"),
    ],
)
def test_missing_way_to_the_gateway_is_refused(make_engine, settings, reason):
    make_engine(DOCKER_INFO)
    capabilities = ContainerRuntime(ContainerRuntimeConfig(**settings)).capabilities
    with pytest.raises(ConfigInvalid, match=reason):
        capabilities.check(Capability.GATEWAY, "the harness 'program'", "container")


@pytest.mark.process
def test_open_network_is_not_called_private(make_engine):
    make_engine(DOCKER_INFO)
    runtime = ContainerRuntime(ContainerRuntimeConfig(network="bridge", gateway_url="http://gateway.example:80"))
    assert Capability.GATEWAY in runtime.capabilities.available
    with pytest.raises(ConfigInvalid, match="needs private_network"):
        runtime.check_task(Task(requires=("private_network",)))


@pytest.mark.process
def test_engine_that_lets_sockets_to_the_host_pass_has_no_private_network(make_engine):
    make_engine({**DOCKER_INFO, "ServerVersion": "20.10.5"})
    with pytest.raises(ConfigInvalid, match=r"needs private_network .*AF_VSOCK"):
        ContainerRuntime().check_task(Task(requires=("private_network",)))


@pytest.mark.process
@pytest.mark.parametrize(
    "args",
    [
        ["--privileged"],
        ["--network", "host"],
        ["--net=host"],
        ["--pid=host"],
        ["-v", "/:/host"],
        ["-v/:/host"],
        ["--security-opt", "seccomp=unconfined"],
        ["--cap-add", "SYS_ADMIN"],
        ["--device=/dev/kvm"],
        ["--runtime", "runc", "--an-option-of-the-future"],
    ],
)
def test_argument_that_opens_a_container_withdraws_its_isolation(make_engine, args):
    make_engine(DOCKER_INFO)
    runtime = ContainerRuntime(ContainerRuntimeConfig(engine_args=args))
    for name in (ISOLATION, Capability.PRIVATE_NETWORK):
        with pytest.raises(ConfigInvalid, match=rf"needs {name} .* engine_args set -"):
            runtime.check_task(Task(requires=(name,)))


@pytest.mark.process
def test_harmless_arguments_keep_the_isolation(make_engine):
    make_engine(DOCKER_INFO)
    args = ["--runtime", "runc", "--ulimit", "nofile=1024:1024", "--shm-size=1g"]
    runtime = ContainerRuntime(ContainerRuntimeConfig(engine_args=args))
    runtime.check_task(Task(requires=(ISOLATION, "private_network")))


@pytest.mark.process
def test_argument_that_sets_a_limit_withdraws_it(make_engine):
    make_engine(DOCKER_INFO)
    runtime = ContainerRuntime(ContainerRuntimeConfig(engine_args=["--memory=0"]))
    with pytest.raises(ConfigInvalid, match=r"memory_mb .* engine_args set --memory; set runtime\.limits instead"):
        runtime.check_task(Task())


@pytest.mark.process
@pytest.mark.parametrize("options", [[], ["name=seccomp,profile=unconfined"]])
def test_engine_without_seccomp_has_no_isolation(make_engine, options):
    make_engine({**DOCKER_INFO, "SecurityOptions": options})
    for name in (ISOLATION, Capability.PRIVATE_NETWORK):
        with pytest.raises(ConfigInvalid, match=f"needs {name} .* no seccomp filter"):
            ContainerRuntime().check_task(Task(requires=(name,)))


@pytest.mark.process
def test_network_of_the_machine_is_no_isolation(make_engine):
    make_engine(DOCKER_INFO)
    runtime = ContainerRuntime(ContainerRuntimeConfig(network="host", gateway_url="http://127.0.0.1:80"))
    with pytest.raises(ConfigInvalid, match=f"needs {ISOLATION} .* the network of the machine"):
        runtime.check_task(Task(requires=(ISOLATION,)))


@pytest.mark.process
def test_engine_of_another_user_has_no_way_to_the_gateway(make_engine, monkeypatch):
    make_engine(DOCKER_INFO)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reasons = ContainerRuntime().capabilities.reasons
    assert "only root may enter the networks of this docker" in reasons[Capability.GATEWAY]


@pytest.mark.process
async def test_container_that_does_not_start_is_a_failure_of_the_sandbox(make_engine):
    make_engine(DOCKER_INFO)

    async with asyncio.timeout(30):
        runtime = ContainerRuntime()
        with pytest.raises(SandboxError, match="broken"):
            await runtime.start(Task())
        with pytest.raises(SandboxError, match="broken"):
            await runtime.run("true", timeout=5)


@pytest.mark.process
async def test_cancelled_fetch_of_an_image_leaves_no_process(make_engine, tmp_path):
    pid_file = tmp_path / "pid"
    make_engine(DOCKER_INFO, f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; sleep 600 & wait")

    async with asyncio.timeout(30):
        start = asyncio.create_task(ContainerRuntime().start(Task()))
        while not pid_file.exists():
            await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(start, 5)
    group = int(pid_file.read_text())
    await async_wait_until(lambda: not any(_is_running_in(group, process) for process in psutil.process_iter()))


def _is_running_in(group: int, process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.process
async def test_command_of_the_engine_that_takes_too_long_is_named():
    with pytest.raises(SandboxError, match=r"podman -f did not end in 0.2 s"):
        await ContainerEngine("podman", ("tail",), None).run("-f", "/dev/null", timeout=0.2)


@pytest.mark.process
@pytest.mark.timeout(60)
async def test_command_of_the_engine_ends_although_its_descendants_hold_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(container_engine, "KILL_TIMEOUT", 0.2)
    program, pid_file = tmp_path / "podman", tmp_path / "pid"
    script = f"echo $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 600"
    program.write_text(f"#!/bin/sh\nsetsid sh -c '{script}' &\nsleep 600\n")
    program.chmod(0o755)

    await (await asyncio.create_subprocess_exec("true")).wait()  # opens what every later one uses
    num_fds = psutil.Process().num_fds()
    command = asyncio.create_task(ContainerEngine("podman", (str(program),), None).run("rm", timeout=60.0))
    while not pid_file.exists():
        await asyncio.sleep(0.01)
    try:
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        await asyncio.sleep(0)  # transports close in the next iteration of the loop
        assert psutil.Process().num_fds() == num_fds
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


@pytest.mark.process
async def test_network_of_the_machine_is_not_entered_as_a_containers():
    arguments = psutil.Process().cmdline()
    with pytest.raises(PermissionError, match="the container has the network of this machine"):
        await open_listener(os.getpid(), arguments[0])
    with pytest.raises(ProcessLookupError, match="not the container's first process"):
        await open_listener(os.getpid(), "ramify-1-2-3")


@pytest.mark.parametrize("name", ["", "a=b", "ramify.machine"])
def test_label_that_is_reserved_or_has_no_name_is_refused(name):
    with pytest.raises(ValueError, match="cannot be a label"):
        ContainerRuntimeConfig(labels={name: "x"})


def test_hosts_can_be_allowed_only_without_a_network(make_engine):
    for entry in ("https://example.org", ":443", "example.org:https"):
        with pytest.raises(ValueError, match="is not a host"):
            ContainerRuntimeConfig(allow_hosts=[entry])
    with pytest.raises(ValueError, match="allow_hosts needs network = 'none'"):
        ContainerRuntimeConfig(network="bridge", allow_hosts=["example.org"])
    make_engine(DOCKER_INFO)
    runtime = ContainerRuntime(ContainerRuntimeConfig(engine="docker", limits={}, allow_hosts=["example.org"]))
    with pytest.raises(ConfigInvalid, match="allow_hosts lets programs reach example"):
        runtime.check_task(Task(requires=("private_network",)))


def test_hosts_and_paths_need_containers_of_this_machine(make_engine, tmp_path):
    make_engine(DOCKER_INFO)
    for settings in ({"allow_hosts": ["example.org"]}, {"read_only": [str(tmp_path)]}):
        config = ContainerRuntimeConfig(engine="docker", engine_host="ssh://other", limits={}, **settings)
        with pytest.raises(ConfigInvalid, match=f"{next(iter(settings))} .*ssh://other"):
            ContainerRuntime(config).check_task(Task())


@pytest.mark.process
async def test_labels_are_seen_in_the_engine(needs_engine):
    async with open_runtime("container", labels={"team": "agents", "note": "a b=c"}) as runtime:
        labels = json.loads(await runtime._inspect("{{json .Config.Labels}}"))
        assert labels["team"] == "agents" and labels["note"] == "a b=c" and "ramify.machine" in labels


@pytest.mark.process
async def test_paths_of_this_machine_are_read_only(needs_engine, tmp_path):
    (tmp_path / "agent").write_text("#!/bin/sh\necho from the host\n")
    (tmp_path / "agent").chmod(0o755)
    settings = {"read_only": [f"{tmp_path}:/agents"], "prepend_path": ["/agents"]}
    result = await run_in_container("agent; touch /agents/x; echo $?; ls /bin/sh", **settings)
    assert result.text.splitlines() == ["from the host", "1", "/bin/sh"] and not (tmp_path / "x").exists()


@pytest.mark.process
async def test_package_with_the_answers_is_hidden(needs_engine):
    directory = Path(ramify.__file__).parents[1]
    settings = {"read_only": [f"{directory}:/packages"]}
    result = await run_in_container("ls -A /packages/ramify; touch /packages/ramify/x || echo refused", **settings)
    assert result.text == "refused\n"


@pytest.mark.process
async def test_programs_reach_allowed_hosts_and_no_others(needs_engine):
    async def greet(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    script = """
import http.client, os, sys, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["https_proxy"])
for port in sys.argv[1:]:
    connection = http.client.HTTPConnection(proxy.hostname, proxy.port, timeout=10)
    connection.set_tunnel("localhost", int(port))
    try:
        connection.request("GET", "/")
        print(connection.getresponse().read().decode())
    except OSError as error:
        print(error)
"""
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with open_runtime("container", allow_hosts=[f"localhost:{port}", f"127.0.0.1:{port}"]) as runtime:
            result = await runtime.run(["python3", "-c", script, str(port), "1"], timeout=20)
    assert result.text.splitlines() == ["hello", "Tunnel connection failed: 403 Forbidden"]


@pytest.mark.process
async def test_network_and_processes_of_the_machine_are_unreachable(needs_engine):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        script = """
import os, socket, sys
for host in ("127.0.0.1", "10.0.0.1", "169.254.169.254"):
    try:
        socket.create_connection((host, int(sys.argv[1])), 1)
        print("reached", host)
    except OSError as error:
        print(error)
print(len([name for name in os.listdir("/proc") if name.isdigit()]))
"""
        result = await run_in_container(["python3", "-c", script, str(server.getsockname()[1])])
        assert b"reached" not in result.stdout and int(result.text.split()[-1]) < 10
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.process
async def test_only_ordinary_sockets_can_be_opened(needs_engine):
    script = """
import ctypes, os, socket
for family in (1, 2, 10, 16, 17, 38, 40, 44):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print(family)
    except OSError:
        pass
libc = ctypes.CDLL(None, use_errno=True)
print("io_uring", libc.syscall(425, 8, ctypes.create_string_buffer(120)))
"""
    assert (await run_in_container(["python3", "-c", script])).text.split() == ["1", "2", "10", "io_uring", "-1"]


@pytest.mark.process
async def test_secrets_of_the_worker_are_not_passed_on(needs_engine, monkeypatch):
    for name in ("SECRET_API_KEY", "http_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "sk-the-secret")
    result = await run_in_container("cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'")
    assert b"the-secret" not in result.stdout and b"PATH=" in result.stdout


@pytest.mark.process
async def test_values_of_variables_are_exact_and_not_in_the_arguments_of_the_engine(needs_engine):
    async with open_runtime("container") as runtime:
        value = "a\nb 'c' \"$HOME\" `id` é"
        process = await runtime.spawn('printf %s "$VALUE"; sleep 1', env={"VALUE": value, "PATH": "/bin"})
        arguments = subprocess.run(["ps", "-eo", "args"], stdout=subprocess.PIPE, check=True).stdout.decode()
        assert "`id` é" not in arguments
        assert (await process.wait(10)).text == value
        assert (await runtime.run("true", env={"not a name": "x"}, timeout=10)).returncode == 126


@pytest.mark.process
async def test_input_that_a_program_does_not_read_costs_no_output(needs_engine):
    async with open_runtime("container") as runtime:
        for _ in range(3):
            result = await runtime.run("echo seen", stdin=b"x" * 100_000, timeout=20)
            assert (result.returncode, result.stdout) == (0, b"seen\n")


@pytest.mark.process
async def test_fork_bomb_and_allocation_are_contained(needs_engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async with open_runtime("container", limits={"max_processes": 64, "memory_mb": 256}) as runtime:
        script = "data = bytearray(4 << 30); data[:: 4096] = b'x' * len(data[:: 4096]); print('allocated')"
        result = await runtime.run(["python3", "-c", script], timeout=30)
        assert result.returncode != 0 and b"allocated" not in result.stdout
        try:
            await runtime.run("f() { f | f & }; f; sleep 1000", timeout=2)
            await runtime.run("true", timeout=10)
        except AgentFailed:
            return  # a container that is too full to kill its programs is killed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
async def test_agent_that_ends_its_container_is_blamed_for_it(needs_engine):
    async with open_runtime("container") as runtime:
        with pytest.raises(AgentFailed, match="the container has ended"):
            for _ in range(3):
                await runtime.run("kill -TERM 1; sleep 1", timeout=10)


@pytest.mark.process
async def test_work_directory_of_the_image_and_its_user(needs_engine):
    async with open_runtime("container", Task(workdir="/etc"), user="1000") as runtime:
        assert str(runtime.workdir) == "/etc"
        assert (await runtime.run("id -u; pwd", timeout=10)).text.split() == ["1000", "/etc"]
        assert (await runtime.read("passwd")).startswith(b"root:")
        with pytest.raises(PermissionError):
            await runtime.write("passwd", "x")


@pytest.mark.process
async def test_prepared_container_is_taken_only_for_the_same_limits(needs_engine):
    async with asyncio.timeout(60):
        runtime_class, make_config = RUNTIMES["container"]
        runtime = runtime_class(make_config(limits={"memory_mb": 300}))
        await runtime.prepare()
        first = await runtime._inspect("{{.Id}}")
        await runtime.start(Task())
        assert await runtime._inspect("{{.Id}}") == first
        await runtime.start(Task(resources={"memory_mb": 200}))
        assert await runtime._inspect("{{.Id}} {{.HostConfig.Memory}}") != first
        assert (await runtime._inspect("{{.HostConfig.Memory}}")) == str(200 << 20)
        await runtime.stop()


@pytest.mark.process
async def test_container_of_a_killed_worker_is_cleaned_and_no_other(needs_engine):
    config = RUNTIMES["container"][1]()
    script = f"""
import asyncio
from ramify.env import Task
from ramify.rollout.runtime import ContainerRuntime, ContainerRuntimeConfig
async def main():
    runtime = ContainerRuntime(ContainerRuntimeConfig.model_validate_json({config.model_dump_json()!r}))
    await runtime.start(Task())
    print(runtime._get_container().name, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    name = worker.stdout.readline().decode().strip()

    try:
        async with asyncio.timeout(60):
            async with open_runtime("container") as runtime:
                assert list(ContainerRuntime.clean(config)) == []
                worker.kill()
                worker.wait(10)
                assert list(ContainerRuntime.clean(config)) == [f"container {name}"]
                assert list(ContainerRuntime.clean(config)) == []
                assert (await runtime.run("echo lives", timeout=10)).stdout == b"lives\n"
    finally:
        worker.kill()


@pytest.mark.process
async def test_cancelled_start_leaves_no_container(needs_engine):
    async with asyncio.timeout(60):
        runtime_class, make_config = RUNTIMES["container"]
        runtime = runtime_class(make_config())
        start = asyncio.create_task(runtime.start(Task()))
        await asyncio.sleep(0.2)
        name = runtime._get_container().name
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        listing = await runtime._get_engine().run("ps", "--all", "--format", "{{.Names}}")
        assert name not in listing.text
