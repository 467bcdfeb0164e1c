"""What a program in a sandbox cannot do. Each test tries it and sees it refused; the sandbox or the worker lives on."""

import asyncio
import contextlib
import errno
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

import ramify
from ramify.core.errors import AgentFailed, ConfigInvalid, SandboxError
from ramify.env import Task
from ramify.env.runtime import Capability, ResourceLimits
from ramify.rollout.runtime import SandboxRuntime, SandboxRuntimeConfig, bwrap, cgroup, sandbox_init, sandbox_process
from ramify.rollout.runtime.bwrap import ALLOW, ARCHITECTURES, FAIL, build_seccomp_filter, read_allowed_calls
from tests.rollout.runtime.conftest import make_ended_owner_name, open_runtime, run_with_runtime, skip_unless_available

pytestmark = [pytest.mark.process, pytest.mark.promise]

# Both kinds have the same mounts, environment, filter and first program. `test_forked_sandbox` compares them, and
# repeats the attacks on the kernel.
SAME_IN_FORKS = pytest.mark.parametrize(
    "sandbox_kind",
    ["sandbox", pytest.param("forked", marks=pytest.mark.full("the same as in a sandbox of bubblewrap"))],
    indirect=True,
)


@pytest.fixture(autouse=True)
def needs_sandbox():
    skip_unless_available("sandbox")


async def run_in_sandbox(kind, command, *, timeout: float = 20, **settings):
    """Run one command in a sandbox of its own."""

    async def test(runtime):
        return await runtime.run(command, timeout=timeout)

    return await run_with_runtime(kind, test, **settings)


async def wait_for_sandbox_file(runtime, path: str) -> None:
    while True:
        with contextlib.suppress(FileNotFoundError):
            await runtime.read(path)
            return
        await asyncio.sleep(0.01)


async def wait_until_refused(runtime) -> None:
    while True:
        await runtime.write("file", b"")
        await asyncio.sleep(0.01)


def requires(*capabilities: Capability):
    missing = [name for name in capabilities if name not in SandboxRuntime().capabilities.available]
    if missing:
        pytest.skip(f"this machine cannot enforce {', '.join(missing)}; a run is refused, see the last tests")


@SAME_IN_FORKS
async def test_files_of_the_machine_cannot_be_read(sandbox_kind, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    places = [
        secret,
        Path.home() / ".bashrc",
        Path(ramify.__file__),
        Path("/etc/shadow"),
        Path("/run"),
        Path("/var/log"),
    ]
    async with open_runtime(sandbox_kind) as runtime:
        for path in places:
            result = await runtime.run(["ls", str(path)], timeout=20)
            assert result.returncode != 0, path
            assert b"No such file" in result.stderr
        listing = (await runtime.run("ls -A / /etc /home /root 2>/dev/null", timeout=20)).text.split()
    assert not {"work", "srv", "mnt", "run", "var", "shadow", ".ssh"} & set(listing)


@SAME_IN_FORKS
async def test_system_is_read_only(sandbox_kind):
    async with open_runtime(sandbox_kind) as runtime:
        for target in ("/usr/x", "/etc/x", "/x", "/dev/x", f"{sys.base_prefix}/x", "/.init.py"):
            assert (await runtime.run(f"echo x > {target}", timeout=20)).returncode != 0, target


async def test_named_paths_are_readable_and_no_others(sandbox_kind, tmp_path):
    for name in ("agent", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool").write_text(f"#!/bin/sh\necho {name}\n")
        (tmp_path / name / "tool").chmod(0o755)
    result = await run_in_sandbox(
        sandbox_kind,
        f"tool; {tmp_path}/agent/tool; echo x > /agent/tool; ls {tmp_path}",
        read_only=[f"{tmp_path}/agent:/agent", f"{tmp_path}/agent/tool"],
        prepend_path=["/agent"],
    )
    assert result.text.split() == ["agent", "agent", "agent"]
    assert b"Read-only file system" in result.stderr
    both = [f"{tmp_path}/agent:/agent", f"{tmp_path}/agent:/other"]
    assert (await run_in_sandbox(sandbox_kind, "/agent/tool; /other/tool", read_only=both)).text.split() == [
        "agent",
        "agent",
    ]
    with pytest.raises(ValueError, match="/agent twice"):
        SandboxRuntimeConfig(read_only=[f"{tmp_path}/agent:/agent", f"{tmp_path}/other:/agent"])
    for entry in ("/no/such/place", f"{tmp_path}:relative"):
        with pytest.raises(ValueError, match=r"does not exist|must be absolute"):
            SandboxRuntimeConfig(read_only=[entry])


@SAME_IN_FORKS
async def test_python_of_the_sandbox_has_no_ramify(sandbox_kind):
    source = Path(ramify.__file__).parent.parent
    async with open_runtime(sandbox_kind, read_only=[f"{source}:/source"]) as runtime:
        for interpreter in ("python3", f"{sys.base_prefix}/bin/python3"):
            script = "import sys; print(1); import ramify"
            result = await runtime.run([interpreter, "-c", script], timeout=20)
            assert result.stdout == b"1\n"
            assert b"ModuleNotFoundError: No module named 'ramify'" in result.stderr
        result = await runtime.run("ls -A /source/ramify; ls /source", timeout=20)
    assert result.text.split() == [path.name for path in sorted(source.iterdir()) if not path.name.startswith(".")]


@SAME_IN_FORKS
async def test_programs_are_found_in_the_configured_path(sandbox_kind):
    async def test(runtime):
        await runtime.write("bin/hello", "#!/bin/sh\necho hello\n")
        await runtime.run("chmod +x bin/hello", timeout=20)
        return await runtime.run(["hello"], timeout=20)

    result = await run_with_runtime(sandbox_kind, test, prepend_path=[f"{bwrap.WORK_DIR}/bin"])
    assert (result.returncode, result.text) == (0, "hello\n")


@SAME_IN_FORKS
async def test_files_of_other_rollouts_cannot_be_read(sandbox_kind):
    async with asyncio.timeout(60):
        async with open_runtime(sandbox_kind) as first, open_runtime(sandbox_kind) as second:
            await first.write("mine", "first")
            await first.run("echo first > $HOME/mine; echo first > /tmp/mine; echo first > /dev/shm/mine", timeout=10)
            search = "cat mine ~/mine /tmp/mine /dev/shm/mine; find / /sandbox /dev/shm -xdev -name mine"
            result = await second.run(search, timeout=20)
            assert result.stdout == b""


@SAME_IN_FORKS
async def test_processes_of_the_machine_are_invisible(sandbox_kind):
    async with open_runtime(sandbox_kind) as runtime:
        result = await runtime.run("ls /proc | grep '^[0-9]*$' | wc -l", timeout=20)
        assert int(result.text) < 10
        assert (await runtime.run(f"kill -0 {os.getpid()}", timeout=20)).returncode != 0


@SAME_IN_FORKS
async def test_network_of_the_machine_is_unreachable(sandbox_kind):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        script = """
import socket, sys
for host in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "8.8.8.8"):
    try:
        socket.create_connection((host, int(sys.argv[1])), 1)
        print("reached", host)
    except OSError as error:
        print(error)
"""
        result = await run_in_sandbox(sandbox_kind, ["python3", "-S", "-c", script, str(port)])
        assert result.returncode == 0 and b"reached" not in result.stdout
        with pytest.raises(TimeoutError):
            server.accept()


@SAME_IN_FORKS
async def test_sockets_of_the_machine_are_unreachable(sandbox_kind, tmp_path):
    abstract = f"\0ramify-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as hidden:
        named.bind(str(tmp_path / "s"))
        named.listen()
        hidden.bind(abstract)
        hidden.listen()
        script = """
import socket, sys
for address in (sys.argv[1], "\\0" + sys.argv[2]):
    try:
        socket.socket(socket.AF_UNIX).connect(address)
        print("reached")
    except OSError as error:
        print(error)
"""
        result = await run_in_sandbox(sandbox_kind, ["python3", "-S", "-c", script, str(tmp_path / "s"), abstract[1:]])
        assert result.returncode == 0 and b"reached" not in result.stdout
    search = f"find / '(' -path /usr -o -path {sys.base_prefix}/lib ')' -prune -o -type s -print 2>/dev/null"
    sockets = await run_in_sandbox(sandbox_kind, search)
    assert sockets.stdout == b""


FAMILIES = {"vsock": 40, "netlink": 16, "packet": 17, "alg": 38, "xdp": 44}


@SAME_IN_FORKS
async def test_other_socket_families_are_refused(sandbox_kind):
    script = f"""
import socket
for family in {list(FAMILIES.values())}:
    try:
        print(socket.socket(family, 1))
    except OSError as error:
        print(error.strerror)
"""
    answers = (await run_in_sandbox(sandbox_kind, ["python3", "-S", "-c", script])).text.splitlines()
    refusal = "Address family not supported by protocol"
    assert dict(zip(FAMILIES, answers, strict=True)) == dict.fromkeys(FAMILIES, refusal)


CALLS = {
    "ptrace": "libc.ptrace(0, 0, 0, 0)",
    "unshare": "libc.unshare(0x10000000)",
    "mount": "libc.mount(b'none', b'/sandbox/work', b'tmpfs', 0, None)",
    "chroot": "libc.chroot(b'/sandbox')",
    "bpf": "libc.syscall(numbers['bpf'], 0, 0, 0)",
    "io_uring_setup": "libc.syscall(425, 8, ctypes.create_string_buffer(120))",
    "keyctl": "libc.syscall(numbers['keyctl'], 0, -3, 1)",
    "clone with a namespace": "libc.syscall(numbers['clone'], 0x10000000 | 17, 0, 0, 0, 0)",
    "setns": "libc.setns(0, 0)",
    "personality": "libc.personality(0xffffffff)",
    "limits of another process": "libc.prlimit(1, 0, None, None)",
}
IS_ARM = os.uname().machine == "aarch64"
NUMBERS = {"bpf": 280, "keyctl": 219, "clone": 220} if IS_ARM else {"bpf": 321, "keyctl": 250, "clone": 56}
RECENT_CALLS = {"memfd_secret": 447, "statmount": 457, "listmount": 458, "open_tree_attr": 467, "not known yet": 9999}


async def make_calls(kind, calls) -> dict[str, str]:
    """Run calls of C functions in a sandbox, and return the result and the error of each."""
    script = f"""
import ctypes, os
numbers = {NUMBERS}
libc = ctypes.CDLL(None, use_errno=True)
for call in {list(calls.values())}:
    print(eval(call), os.strerror(ctypes.get_errno()))
"""
    return dict(
        zip(calls, (await run_in_sandbox(kind, ["python3", "-S", "-c", script])).text.splitlines(), strict=True)
    )


@SAME_IN_FORKS
async def test_dangerous_system_calls_are_refused(sandbox_kind):
    assert await make_calls(sandbox_kind, CALLS) == dict.fromkeys(CALLS, "-1 Operation not permitted")


@SAME_IN_FORKS
async def test_recent_system_calls_are_not_implemented(sandbox_kind):
    calls = {name: f"libc.syscall({number}, 0, 0, 0, 0, 0)" for name, number in RECENT_CALLS.items()}
    assert await make_calls(sandbox_kind, calls) == dict.fromkeys(calls, "-1 Function not implemented")


def test_numbers_of_system_calls_are_those_of_the_kernels_headers():
    headers = {
        "x86_64": [
            *Path("/usr/include").glob("x86_64-linux-gnu/asm/unistd_64.h"),
            Path("/usr/include/asm/unistd_64.h"),
        ],
        "aarch64": [Path("/usr/include/asm-generic/unistd.h")],  # the table of all new architectures
    }
    existing = [(machine, path) for machine, paths in headers.items() for path in paths if path.is_file()]
    if not existing:
        pytest.skip("no headers of the kernel here; install linux-libc-dev")
    for machine, path in existing:
        defines = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text(), re.MULTILINE)
        numbers = {name: int(number) for name, number in defines if name != "syscalls"}  # how many there are
        numbers.setdefault("newfstatat", numbers.get("fstatat", 0))  # the generic header's name of it
        allowed = read_allowed_calls(machine)
        names = {number: name for name, number in numbers.items()}  # a call that is newer than the headers has none
        assert {name for name, number in allowed.items() if names.get(number, name) != name} == set()
        assert {name for name, number in allowed.items() if numbers.get(name, number) != number} == set()


def run_filter(program: bytes, machine: str, number: int, argument: int = 0) -> int:
    """Return what a filter answers to a call; `argument` is its first one."""
    words = {0: number, 4: ARCHITECTURES[machine], 16: argument}
    instructions = list(struct.iter_unpack("=HBBI", program))
    position = value = 0
    while True:
        operation, if_true, if_false, operand = instructions[position]
        position += 1
        if operation == 0x06:
            return operand
        if operation == 0x20:
            value = words.get(operand, 0)
        else:
            is_true = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
            position += if_true if is_true else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_allows_the_listed_system_calls_only(machine):
    program = build_seccomp_filter(machine)
    assert program is not None
    allowed = read_allowed_calls(machine)
    sockets = {allowed["socket"], allowed["socketpair"]}
    answers = {number: run_filter(program, machine, number, int(number in sockets)) for number in range(600)}
    assert {number for number, answer in answers.items() if answer == ALLOW} == set(allowed.values())
    assert run_filter(program, machine, allowed["prlimit64"], 1) == FAIL | errno.EPERM
    assert run_filter(program, machine, 435) == FAIL | errno.ENOSYS
    assert build_seccomp_filter("riscv64") is None


@SAME_IN_FORKS
async def test_settings_of_the_kernel_cannot_be_written(sandbox_kind):
    async with open_runtime(sandbox_kind) as runtime:
        for file in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches"):
            result = await runtime.run(f": >> {file}", timeout=20)
            assert b"Read-only file system" in result.stderr or b"Permission denied" in result.stderr, result


async def test_limits_of_a_prepared_sandbox_are_raised_and_lowered_for_a_task():
    requires(Capability.MEMORY_LIMIT)
    script = "data = bytearray(300 << 20); data[:: 4096] = b'x' * len(data[:: 4096]); print('allocated')"

    async def test(memory_mb):
        runtime = SandboxRuntime(SandboxRuntimeConfig(limits=ResourceLimits(memory_mb=512)))
        await runtime.prepare()
        try:
            await runtime.start(Task(resources={"memory_mb": memory_mb}))
            return (await runtime.run(["python3", "-S", "-c", script], timeout=30)).stdout
        finally:
            await runtime.stop()

    assert await test(1024) == b"allocated\n"
    assert await test(128) == b""


@SAME_IN_FORKS
async def test_program_gains_no_privileges(sandbox_kind):
    script = "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status"
    fields = dict(line.split(":\t") for line in (await run_in_sandbox(sandbox_kind, script)).text.splitlines())
    assert fields == {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}


@SAME_IN_FORKS
async def test_secrets_of_the_worker_are_not_in_the_environment_or_proc(sandbox_kind, monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "sk-the-secret")
    script = "cat /proc/*/environ /proc/*/cmdline; grep -ra sk-the-secret /proc/*/environ"
    result = await run_in_sandbox(sandbox_kind, script)
    assert b"sk-the-secret" not in result.stdout.replace(b"sk-the-secret /proc", b"")
    assert b"SECRET_API_KEY" not in result.stdout


async def test_too_few_processes_for_a_sandbox_are_named(sandbox_kind):
    requires(Capability.PROCESS_LIMIT)

    for _ in range(8 if sandbox_kind == "sandbox" else 1):  # bwrap may exit before or after it is looked at
        with pytest.raises(SandboxError, match=r"runtime\.limits\.max_processes = 1 is probably too low"):
            async with open_runtime(sandbox_kind, limits={"max_processes": 1}, num_prepared=0):
                pass


async def test_fork_bomb_is_contained(sandbox_kind):
    requires(Capability.PROCESS_LIMIT)

    async with open_runtime(sandbox_kind, limits={"max_processes": 32, "memory_mb": 512, "disk_mb": 16}) as runtime:
        bomb = "f() { f | f & }; f; sleep 0.2; echo survived"
        result = await runtime.run(bomb, timeout=20)
        assert result.returncode != 0 or b"survived" in result.stdout
        async with open_runtime("sandbox") as other:
            assert (await other.run("echo fine", timeout=20)).stdout == b"fine\n"


async def test_full_disk_is_contained(sandbox_kind):
    async with open_runtime(sandbox_kind, limits={"disk_mb": 32}) as runtime:
        result = await runtime.run("head -c 100000000 /dev/zero > big; echo $?", timeout=20)
        assert b"No space left" in result.stderr
        for place in ("/tmp", "$HOME", "/dev/shm"):
            result = await runtime.run(f"head -c 100000000 /dev/zero > {place}/big", timeout=20)
            assert result.returncode != 0, place
        with pytest.raises(OSError, match="No space left"):
            await runtime.write("more", b"x" * 40_000_000)


async def test_allocation_of_four_gigabytes_is_killed(sandbox_kind):
    requires(Capability.MEMORY_LIMIT)
    script = "data = bytearray(4 << 30); data[:: 4096] = b'x' * len(data[:: 4096]); print('allocated')"
    result = await run_in_sandbox(
        sandbox_kind, ["python3", "-S", "-c", script], limits={"memory_mb": 256, "disk_mb": 16}
    )
    assert result.returncode != 0 and b"allocated" not in result.stdout


@SAME_IN_FORKS
async def test_variable_with_an_invalid_name_does_not_end_the_sandbox(sandbox_kind):
    async with open_runtime(sandbox_kind) as runtime:
        assert (await runtime.run("true", env={"a=b": "c"}, timeout=10)).returncode == 126
        assert (await runtime.run("echo fine", timeout=10)).stdout == b"fine\n"


async def test_prepared_sandbox_that_was_killed_is_replaced():
    async def test():
        runtime = SandboxRuntime()
        await runtime.prepare()
        assert runtime._sandbox is not None and runtime._sandbox._bwrap is not None
        os.kill(runtime._sandbox._bwrap.pid, 9)
        while not runtime._sandbox.channel.is_closed:
            await asyncio.sleep(0.01)
        await runtime.start(Task())
        try:
            return (await runtime.run("echo fine", timeout=10)).stdout
        finally:
            await runtime.stop()

    assert await asyncio.wait_for(test(), 60) == b"fine\n"


def stop_first_program(runtime) -> None:
    """Let the sandbox answer no more, as if its programs used all its processor time."""
    psutil.Process(runtime._sandbox._bwrap.pid).children()[0].suspend()


async def test_agent_is_blamed_for_a_sandbox_that_does_not_answer(monkeypatch):
    async def start_another(runtime):
        await runtime.spawn("sleep 1000")
        stop_first_program(runtime)
        monkeypatch.setattr(sandbox_process, "REPLY_TIMEOUT", 0.3)
        with pytest.raises(AgentFailed, match="does not answer"):
            await runtime.run("echo again", timeout=10)
        with pytest.raises(AgentFailed, match="the sandbox has ended"):
            await wait_until_refused(runtime)

    async def time_out(runtime):
        monkeypatch.setattr(sandbox_process, "REPLY_TIMEOUT", 20.0)
        process = await runtime.spawn("sleep 1000")
        stop_first_program(runtime)
        monkeypatch.setattr(sandbox_process, "REPLY_TIMEOUT", 0.3)
        with pytest.raises(AgentFailed, match="does not answer"):
            await process.wait(0.1)

    await run_with_runtime("sandbox", start_another)
    await run_with_runtime("sandbox", time_out)


async def test_cancelling_a_run_in_a_stopped_sandbox_stays_a_cancellation(monkeypatch):
    async with open_runtime("sandbox") as runtime:
        run = asyncio.create_task(runtime.run("touch started; sleep 1000", timeout=100))
        await wait_for_sandbox_file(runtime, "started")
        stop_first_program(runtime)
        monkeypatch.setattr(sandbox_process, "REPLY_TIMEOUT", 0.3)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run


@SAME_IN_FORKS
async def test_cancelled_start_leaves_no_program(sandbox_kind):
    async with open_runtime(sandbox_kind) as runtime:
        for num_steps in range(15):  # some of them end between the request and its answer
            start = asyncio.create_task(runtime.spawn(["sleep", "1000"]))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            start.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await start).kill()
        listing = await runtime.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=10)
        assert "sleep 1000" not in listing.text


@SAME_IN_FORKS
async def test_program_that_constantly_calls_exec_is_killed(sandbox_kind):
    """A process has no environment, and so no marker, for a moment of each `exec`."""

    async with open_runtime(sandbox_kind) as runtime:
        await runtime.write("becomes", ": > begun; exec sh ./becomes\n")
        for _ in range(5):
            program = await runtime.spawn("setsid sh ./becomes & echo $! > pid")
            await program.wait(20)
            await wait_for_sandbox_file(runtime, "begun")
            await program.kill()
            assert (await runtime.run("rm begun; kill -0 $(cat pid)", timeout=20)).returncode != 0


@SAME_IN_FORKS
async def test_finished_programs_are_forgotten(sandbox_kind):
    async with open_runtime(sandbox_kind) as runtime:
        for _ in range(3):
            await runtime.run("true", timeout=10)
        program = await runtime.spawn("setsid sleep 1000 & echo $! > pid")
        await program.wait(10)
        assert runtime._sandbox.channel._handlers == {}
        await program.kill()
        assert (await runtime.run("kill -0 $(cat pid)", timeout=10)).returncode != 0


async def test_program_whose_processes_cannot_all_be_killed_ends_its_sandbox(monkeypatch):
    """Processes that start others faster than they are killed: the sandbox, which holds them, is killed as a whole."""
    source = Path(sandbox_init.__file__).read_text().replace("KILL_TIMEOUT = 5.0", "KILL_TIMEOUT = 0.0")

    async def test(runtime):
        with pytest.raises(AgentFailed, match="does not end"):
            await runtime.run("setsid sleep 1000 & sleep 1000", timeout=0.1)

    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(source)
        file.flush()
        monkeypatch.setattr(sandbox_init, "__file__", file.name)
        await run_with_runtime("sandbox", test)


async def test_failed_removal_of_a_sandbox_is_tried_again(sandbox_kind, monkeypatch):
    requires(Capability.MEMORY_LIMIT)

    async def test(runtime):
        group = runtime._sandbox._cgroup
        monkeypatch.setattr(group, "remove", raise_busy)
        for _ in range(2):
            with pytest.raises(SandboxError, match="busy"):
                await runtime.stop()
            with pytest.raises(SandboxError, match="stopped"):
                await runtime.run("true", timeout=10)
        monkeypatch.undo()
        await runtime.stop()
        assert not any(directory.exists() for directory in group._directories.values())

    def raise_busy():
        raise SandboxError("the control group is busy")

    await run_with_runtime(sandbox_kind, test)


async def test_killed_worker_leaves_no_process():
    nap = f"98765.{os.getpid()}"
    script = f"""
import asyncio
from ramify.env import Task
from ramify.rollout.runtime import SandboxRuntime
async def main():
    runtime = SandboxRuntime()
    await runtime.start(Task())
    await runtime.spawn(["sleep", "{nap}"])
    print("ready", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"

    def list_groups() -> list[Path]:
        """The control groups of the worker; other tests have groups, and clean up, at the same time."""
        parents = cgroup.find_cgroup_parents().directories.values()
        return [group for parent in parents for group in parent.glob(f"{cgroup.GROUP_PREFIX}{worker.pid}-*")]

    assert bool(list_groups()) == bool(cgroup.find_cgroup_parents().directories)
    worker.kill()
    worker.wait(60)

    async with asyncio.timeout(60):
        while nap.encode() in subprocess.run(["ps", "-eo", "args"], stdout=subprocess.PIPE, check=True).stdout:
            await asyncio.sleep(0.05)
    list(SandboxRuntime.clean(SandboxRuntimeConfig()))
    assert list_groups() == []


def test_run_is_refused_where_a_limit_cannot_be_enforced(monkeypatch):
    reason = "no control group for memory can be created"
    parents = cgroup.CgroupParents({}, dict.fromkeys(("memory", "pids", "cpu"), reason))
    monkeypatch.setattr(cgroup, "find_cgroup_parents", lambda: parents)
    bwrap.find_capabilities.cache_clear()
    try:
        with pytest.raises(ConfigInvalid, match=r"memory_mb in runtime.limits .* needs memory_limit.*no control group"):
            SandboxRuntime().check_task(Task())
        limits = ResourceLimits(memory_mb=None, max_processes=None)
        SandboxRuntime(SandboxRuntimeConfig(limits=limits)).check_task(Task())
    finally:
        bwrap.find_capabilities.cache_clear()


def test_missing_program_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    bwrap.find_unsupported_reason.cache_clear()
    try:
        with pytest.raises(ConfigInvalid, match="bwrap is missing; install the package bubblewrap"):
            SandboxRuntime().check_task(Task())
    finally:
        bwrap.find_unsupported_reason.cache_clear()


def test_first_sandbox_of_a_process_removes_groups_of_killed_ones():
    requires(Capability.MEMORY_LIMIT)
    parent = cgroup.find_cgroup_parents().directories["memory"]
    leftover = parent / f"{cgroup.GROUP_PREFIX}{make_ended_owner_name(0)}"
    leftover.mkdir(exist_ok=True)
    script = """
import asyncio
from ramify.env import Task
from ramify.rollout.runtime import SandboxRuntime

async def main():
    runtime = SandboxRuntime()
    await runtime.start(Task())
    await runtime.stop()

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert not leftover.exists()
