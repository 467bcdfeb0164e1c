"""Sandboxes that are forks of a template with imported packages: what their programs see, share and can attack."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import uuid
from pathlib import Path

import psutil
import pytest

from ramify.core.errors import ConfigInvalid, EnvironmentFault, SandboxError
from ramify.env import Task
from ramify.rollout.harness.program import ProgramHarnessConfig
from ramify.rollout.runtime import SandboxRuntime, SandboxRuntimeConfig
from ramify.rollout.runtime.config import PreloadConfig
from ramify.rollout.runtime.running_sandbox import BwrapSandbox
from ramify.rollout.runtime.template import SandboxTemplate, TemplateTimeouts, find_isolation_problem, read_namespaces
from tests.rollout.runtime.conftest import PYTHON, open_runtime, skip_unless_available
from tests.rollout.runtime.test_sandbox import CALLS, NUMBERS, RECENT_CALLS
from tests.support.attempts import OneTask, load_env

pytestmark = [pytest.mark.process, pytest.mark.promise]

NUM_CANARIES = 1000 if os.environ.get("RAMIFY_FULL") else 12
NUM_AT_ONCE = 32


@pytest.fixture(autouse=True)
def needs_sandbox():
    skip_unless_available("forked")


async def run_agent(runtime, script: str, *arguments: str, command=PYTHON, **options):
    """Run a script as the agent's program."""
    await runtime.write("agent.py", script)
    process = await runtime.spawn_agent([*command, "agent.py", *arguments], **options)
    return await process.wait(20)


@contextlib.asynccontextmanager
async def open_template(tmp_path=None, source: str = "", timeouts=None, **settings):
    """A template that has imported a module with this source, and a function that starts runtimes of it."""
    if tmp_path is not None:
        (tmp_path / "preloaded_module.py").write_text(source)
        settings["read_only"] = [f"{tmp_path}:/packages"]
    config = SandboxRuntimeConfig(**settings)
    modules, env = (("preloaded_module",), {"PYTHONPATH": "/packages"}) if tmp_path else (("json",), {})
    template = SandboxTemplate(config, PreloadConfig(PYTHON, modules, env), timeouts)

    @contextlib.asynccontextmanager
    async def open_one():
        runtime = SandboxRuntime(config, template)
        try:
            await runtime.start(Task())
            yield runtime
        finally:
            await runtime.stop()

    async with asyncio.timeout(200):
        try:
            yield open_one
        finally:
            await template.close()


# -- a fork runs its program as Python does ---------------------------------------------------------------------------

DESCRIBE = """
import json, os, resource, signal, socket, subprocess, sys
mounts = {}
for line in open("/proc/self/mountinfo"):
    fields = line.split()
    flags = set(fields[5].split(","))
    mounts[fields[4]] = [fields[line.split().index("-") + 1], "ro" in flags, "nosuid" in flags or "/dev/" in fields[4]]
for target in ("/.init.py", "/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus"):  # all /proc is read-only
    mounts.pop(target, None)
streams = [
    [s.name, s.encoding, s.errors, s.line_buffering, s.isatty(), s.fileno(), s.seekable(), type(s.buffer).__name__]
    for s in (sys.stdin, sys.stdout, sys.stderr)
]
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "file": __file__, "name": __name__,
    "spec": __spec__, "loader": type(__loader__).__name__, "globals": sorted(globals()),
    "flags": str(sys.flags), "executable": sys.executable, "prefix": sys.prefix,
    "cwd": os.getcwd(), "env": dict(sorted(os.environ.items())), "umask": os.umask(0),
    "inherited": sorted(subprocess.check_output(["env"], text=True).splitlines()),
    "ids": [os.getresuid(), os.getresgid(), os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getppid()],
    "files": sorted(os.listdir("/proc/self/fd"))[:3], "hostname": socket.gethostname(),
    "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.Signals)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "limits": [resource.getrlimit(number) for number in range(10)],
    "streams": streams, "input": sys.stdin.read(), "mounts": mounts,
    "root": sorted(set(os.listdir("/")) - {".init.py"}),
    "devices": sorted(os.listdir("/dev")), "marker": open("/proc/self/environ").read().count("RAMIFY_SANDBOX="),
    "arguments": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "status": [line for line in open("/proc/self/status") if line.startswith(("Cap", "NoNew", "Seccomp", "Groups"))],
}))
"""


async def test_program_sees_the_same_as_after_a_start_from_nothing():
    described = []
    for kind in ("sandbox", "forked"):
        async with open_runtime(kind) as runtime:
            result = await run_agent(runtime, DESCRIBE, "-x", "1", env={"KEY": "value"}, stdin=b"the task")
            assert result.returncode == 0, result.stderr.decode()
            described.append(json.loads(result.text))
    assert described[1] == described[0]


PROGRAMS = {
    "exits with a number": "import sys; sys.exit(3)",
    "exits with a text": "import sys; sys.exit('the reason')",
    "raises": "def f():\n    raise ValueError('wrong')\nf()",
    "has a syntax error": "def f(:",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "leaves threads, handlers and open files": """
import atexit, threading, time
atexit.register(print, "handler")
thread = threading.Thread(target=lambda: (time.sleep(0.1), print("thread")))
thread.start()
file = open("left", "w")
file.write("written")
print("end")
""",
    "imports its neighbour": "import neighbour; print(neighbour.__file__)",
}


async def test_program_ends_as_after_a_start_from_nothing():
    results = []
    for kind in ("sandbox", "forked"):
        async with open_runtime(kind) as runtime:
            await runtime.write("neighbour.py", "")
            outcomes = {}
            for name, script in PROGRAMS.items():
                result = await run_agent(runtime, script)
                outcomes[name] = (result.returncode, result.stdout, result.stderr)
            outcomes["file"] = await runtime.read("left")
            process = await runtime.spawn_agent([*PYTHON, "-m", "neighbour", "x"])
            outcomes["module"] = await process.wait(20)
            missing = await (await runtime.spawn_agent([*PYTHON, "missing.py"])).wait(20)
            outcomes["missing"] = (missing.returncode, b"can't open file" in missing.stderr)
            results.append(outcomes)
    assert results[1] == results[0]


async def test_program_and_its_processes_are_killed():
    async with open_runtime("forked") as runtime:
        script = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
subprocess.Popen(["setsid", "sleep", "1000"])
print("started", flush=True)
time.sleep(1000)
"""
        await runtime.write("agent.py", script)
        process = await runtime.spawn_agent([*PYTHON, "agent.py"])
        result = await process.wait(1.0)
        assert result.timed_out and result.stdout == b"started\n"
        listing = await runtime.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=20)
        assert "agent.py" not in listing.text and "sleep" not in listing.text


# -- what a fork can attack -------------------------------------------------------------------------------------------

# Tries all calls that a sandbox refuses, and looks for anything of the template or of the first program.
ATTACK = f"""
import ctypes, glob, json, os, resource, signal, socket, sys
numbers = {NUMBERS}
libc = ctypes.CDLL(None, use_errno=True)
report = {{name: [eval(call), os.strerror(ctypes.get_errno())] for name, call in {CALLS}.items()}}
for name, number in {RECENT_CALLS}.items():
    report[name] = [libc.syscall(number, 0, 0, 0, 0, 0), os.strerror(ctypes.get_errno())]
report["files"] = sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]
report["processes"] = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
report["sockets"] = [line.split()[-1] for line in open("/proc/net/unix").readlines()[1:] if "/" in line or "@" in line]
report["reached"] = []
for attack in (
    'open("/proc/1/mem", "rb")',
    'os.readlink("/proc/1/fd/0")',
    'open("/proc/1/fd/0", "rb")',
    'os.readlink("/proc/1/root")',
    'os.readlink("/proc/1/cwd")',
    'open("/proc/1/environ").read()',
    'open("/proc/1/maps").read()',
    'open("/proc/1/auxv", "rb").read()',
    'os.listdir("/proc/1/map_files")',
    'resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))',
    'open("/proc/1/oom_score_adj", "w")',
    'open("/proc/self/uid_map", "w")',
    'open("/proc/sys/kernel/core_pattern", "w")',
    'open("/x", "w")',
    'open("/dev/x", "w")',
    'os.mknod("/sandbox/work/device", 0o60600, 1)',
):
    try:
        eval(attack)
        report["reached"].append(attack)
    except OSError:
        pass
report["shared memory"] = [line for line in open("/proc/self/maps") if line.split()[1][1::2] == "ws"]
for number in set(signal.Signals) - {{signal.SIGCHLD}}:
    os.kill(1, number)
print(json.dumps(report))
"""


async def test_agent_reaches_neither_the_template_nor_the_first_program():
    async with open_runtime("forked") as runtime:
        result = await run_agent(runtime, ATTACK)
        assert result.returncode == 0, result.stderr.decode()
        report = json.loads(result.text)
        for name in CALLS:
            assert report.pop(name) == [-1, "Operation not permitted"], name
        for name in RECENT_CALLS:
            assert report.pop(name) == [-1, "Function not implemented"], name
        assert report == {"files": [0, 1, 2], "processes": [1, 2], "sockets": [], "reached": [], "shared memory": []}
        await run_agent(runtime, "import os; os.kill(-1, 9)")
        assert (await runtime.run("echo alive", timeout=20)).text == "alive\n"


async def test_first_program_of_a_fork_holds_only_its_own_socket():
    async with open_runtime("forked") as first, open_runtime("forked") as second:
        for runtime in (first, second):
            await runtime.run("true", timeout=20)
        pids = [find_first_process(runtime) for runtime in (first, second)]
        for pid in pids:
            targets = [file.readlink() for file in Path(f"/proc/{pid}/fd").iterdir()]
            kinds = sorted(str(target).split(":")[0] for target in targets)
            assert kinds == ["/dev/null"] * 3 + ["pipe"] * 2 + ["socket"]
        ids = [read_namespaces(pid) for pid in (os.getpid(), *pids)]
        assert all(len({each[name] for each in ids}) == 3 for name in ids[0])


def find_first_process(runtime) -> int:
    fields = Path(f"/proc/self/fdinfo/{runtime._sandbox._first_process_fd}").read_text().split()
    return int(fields[fields.index("Pid:") + 1])


BWRAP = ["bwrap", "--unshare-all", "--unshare-user", "--as-pid-1", "--die-with-parent", "--ro-bind", "/", "/"]
OPEN_PROCESSES = {
    "no cgroup namespace of its own": [],
    "expected 0000000000000000": [*BWRAP, "--cap-add", "CAP_NET_RAW"],
    "Seccomp 0, expected 2": [*BWRAP, "--cap-drop", "ALL"],
}


@pytest.mark.parametrize("problem", OPEN_PROCESSES)
def test_host_notices_a_process_that_is_not_closed(problem):
    command = [*OPEN_PROCESSES[problem], "sh", "-c", "echo; sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            pid = psutil.Process(process.pid).children()[0].pid if OPEN_PROCESSES[problem] else process.pid
            assert problem in (find_isolation_problem(pid, [read_namespaces(os.getpid())]) or "")
        finally:
            process.kill()


# -- what forks share -------------------------------------------------------------------------------------------------

USED_STATES = """
import random, ssl, tempfile, uuid
random.seed(1)
random.random()
ssl.RAND_bytes(8)
uuid.uuid1()
tempfile._get_candidate_names().rng.random()
"""
PRINT_STATES = """
import os, random, ssl, tempfile, uuid
states = [random.random(), ssl.RAND_bytes(8).hex(), str(uuid.uuid4()), os.urandom(8).hex()]
states.append(next(tempfile._get_candidate_names()))
print(states)
"""


async def test_forks_have_random_states_of_their_own(tmp_path):
    async with open_template(tmp_path, USED_STATES) as open_one:
        states = []
        for _ in range(3):
            async with open_one() as runtime:
                for _ in range(2):
                    result = await run_agent(runtime, PRINT_STATES)
                    states.append(eval(result.text))
    for values in zip(*states, strict=True):
        assert len(set(values)) == 6, values


# Looks for canaries in its memory, files, environment, sockets and processes, and then leaves its own in all of them.
CANARY = """
import ctypes, gc, glob, os, socket, sys, sysconfig, json
mark = "CANA" + "RY-"
found = []
own = os.environ["OWN"]
assert own.startswith(mark)
if any(mark in value for name, value in os.environ.items() if name != "OWN"):
    found.append("environment")
for root in ("/sandbox", "/tmp", "/dev/shm", "/var/tmp", "/run"):
    for folder, _, names in os.walk(root):
        if any(mark in name for name in names) or mark in folder:
            found.append("file")
for line in open("/proc/net/unix"):
    if mark in line:
        found.append("socket")
for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
    try:
        if mark in open(path, errors="replace").read().replace(own, ""):
            found.append("process")
    except OSError:
        pass
for key in range(1, 4):
    if ctypes.CDLL(None).shmget(key, 4096, 0) != -1 or ctypes.CDLL(None).msgget(key, 0) != -1:
        found.append("ipc")
try:
    socket.socket(socket.AF_UNIX).connect("\\0" + mark)
    found.append("abstract socket")
except OSError:
    pass
for port in (7001, 7002):
    try:
        socket.create_connection(("127.0.0.1", port), 1)
        found.append("port")
    except OSError:
        pass
pattern, size = mark.encode(), 0
with open("/proc/self/mem", "rb", 0) as memory:
    for line in open("/proc/self/maps"):
        fields = line.split()
        if fields[1][0] != "r" or (len(fields) > 5 and fields[5] in ("[vvar]", "[vsyscall]", "[vvar_vclock]")):
            continue
        start, end = (int(text, 16) for text in fields[0].split("-"))
        try:
            memory.seek(start)
            data = memory.read(end - start)
        except (OSError, OverflowError, ValueError):
            continue
        size += len(data)
        position = data.find(pattern)
        while position >= 0:
            text = data[position : position + 43]
            if b"-left-by-" in text and own.encode() not in text:
                found.append("memory: " + repr(text))
            position = data.find(pattern, position + 1)
        del data
import encodings, json.decoder
json.decoder.left = kept = [own + "-left-by-" + own] * 3
text = kept[0]
os.environ["LEFT"] = text
sys.modules["left"] = text
for folder in ("/sandbox/work", "/sandbox/home", "/tmp", "/dev/shm"):
    open(folder + "/" + text, "w").write(text)
for place in ("/usr/lib", "/etc", "/", os.path.dirname(os.__file__), "/dev"):
    try:
        open(place + "/" + text, "w").write(text)
        found.append("could write to " + place)
    except OSError:
        pass
left = [socket.create_server(("127.0.0.1", 7001)), socket.socket(socket.AF_UNIX)]
left[1].bind("\\0" + mark)
left[1].listen()
libc = ctypes.CDLL(None)
address_of = libc.shmat
address_of.restype = ctypes.c_void_p
shared = address_of(libc.shmget(1, 4096, 0o1666), None, 0)
ctypes.memmove(shared, text.encode(), len(text))
libc.msgget(2, 0o1666)
if os.fork() == 0:
    os.setsid()
    import time
    time.sleep(1000)
print(json.dumps([found, size]))
"""


@pytest.mark.timeout(900)
async def test_canary_of_a_rollout_is_found_by_no_other():
    """Each rollout looks for what others left, and leaves canaries; many run at once and after each other."""
    reports = []
    async with open_template(limits={"memory_mb": None, "max_processes": None, "disk_mb": 16}) as open_one:
        slots = asyncio.Semaphore(NUM_AT_ONCE)

        async def run_one() -> None:
            async with slots, open_one() as runtime:
                assert runtime._sandbox is not None and runtime._sandbox.is_forked
                result = await run_agent(runtime, CANARY, env={"OWN": f"CANARY-{uuid.uuid4().hex}"})
                assert result.returncode == 0, result.stderr.decode()
                reports.append(json.loads(result.text))

        await asyncio.gather(*(run_one() for _ in range(NUM_CANARIES)))
    assert len(reports) == NUM_CANARIES
    assert [found for found, _ in reports if found] == []
    assert all(size > 1 << 20 for _, size in reports)


# -- where sandboxes cannot be forked ---------------------------------------------------------------------------------


async def test_use_of_a_template_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "ramify.runtimes"):
        async with open_template() as open_one:
            for _ in range(2):
                async with open_one():
                    pass
    messages = [record.message for record in caplog.records if record.name == "ramify.runtimes"]
    assert messages == ["sandboxes are forked from a template that has imported json"]


REFUSED = {
    "started threads": "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "all forks would share: ": "import mmap; memory = mmap.mmap(-1, 4096)",
    "opened files or sockets": "import socket; connection = socket.socketpair()",
}


@pytest.mark.parametrize("reason", REFUSED)
async def test_package_that_forks_would_share_is_started_from_nothing(tmp_path, caplog, reason):
    async with open_template(tmp_path, REFUSED[reason]) as open_one:
        with caplog.at_level(logging.WARNING, "ramify.runtimes"):
            for _ in range(2):
                async with open_one() as runtime:
                    assert not runtime._sandbox.is_forked
                    assert (await run_agent(runtime, "print('fine')")).text == "fine\n"
    (message,) = [record.message for record in caplog.records if record.name == "ramify.runtimes"]
    assert "started without preloaded packages" in message and reason in message


async def test_kernel_that_refuses_namespaces_leads_to_a_start_from_nothing(tmp_path, caplog):
    """A filter that the template's package adds stands for such a kernel."""
    source = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
import struct
unshare = 97 if os.uname().machine == "aarch64" else 272
instructions = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
program = Filter(4, b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions))
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
"""
    async with open_template(tmp_path, source) as open_one:
        with caplog.at_level(logging.WARNING, "ramify.runtimes"):
            for _ in range(2):
                async with open_one() as runtime:
                    assert not runtime._sandbox.is_forked
                    assert (await run_agent(runtime, "print('fine')")).text == "fine\n"
    (message,) = [record.message for record in caplog.records if record.name == "ramify.runtimes"]
    assert "no new namespaces: Operation not permitted" in message


async def test_package_that_cannot_be_imported_is_named(tmp_path):
    async with open_template(tmp_path, "import no_such_package") as open_one:
        with pytest.raises(EnvironmentFault, match=r"harness\.preload: preloaded_module cannot .* 'no_such_package'"):
            async with open_one():
                pass


FAIL_TO_FORK = """
import errno, os, sys
fork, num_calls = os.fork, 0
def fail_once():
    global num_calls
    if sys._getframe(1).f_code.co_name == "_fork_on_request":
        num_calls += 1
        if num_calls == 2:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = fail_once
"""


async def test_failed_fork_does_not_end_other_sandboxes(tmp_path):
    async with open_template(tmp_path, FAIL_TO_FORK) as open_one, open_one() as first:
        with pytest.raises(SandboxError, match=r"cannot be started: .* temporarily unavailable"):
            async with open_one():
                pass
        async with open_one() as third:
            for runtime in (first, third):
                assert runtime._sandbox.is_forked
                assert (await run_agent(runtime, "print('fine')")).text == "fine\n"


def find_template() -> psutil.Process:
    """Return the parent of the only template of this process."""
    (template,) = [child for child in psutil.Process().children() if "sandbox_template" in str(child.cmdline())]
    return template


async def test_crash_during_the_import_is_named(tmp_path):
    async with open_template(tmp_path, "import ctypes; ctypes.string_at(0)") as open_one:
        with pytest.raises(SandboxError, match=r"harness\.preload: the template .* was killed by SIGSEGV"):
            async with open_one():
                pass


async def test_stopped_template_is_replaced():
    async with open_template(timeouts=TemplateTimeouts(fork=1.0)) as open_one, open_one():
        (template,) = find_template().children()
        template.suspend()
        with pytest.raises(SandboxError, match=r"did not fork after 1 s, and was killed"):
            async with open_one():
                pass
        async with open_one() as second:
            assert second._sandbox.is_forked
        assert not template.is_running()


async def test_slow_import_goes_on_after_a_sandbox_has_stopped_waiting(tmp_path):
    source = "import os, time\nwhile not os.path.exists('/packages/continue'):\n    time.sleep(0.01)"
    async with open_template(tmp_path, source, TemplateTimeouts(wait=1.0)) as open_one:
        with pytest.raises(SandboxError, match=r"harness\.preload: preloaded_module: not imported after 1 s"):
            async with open_one():
                pass
        template = find_template()
        (tmp_path / "continue").touch()
        async with open_one() as runtime:
            assert runtime._sandbox.is_forked and find_template() == template


async def test_killed_template_ends_its_sandboxes_and_is_started_again():
    async with open_template() as open_one:
        async with open_one() as first:
            process = await first.spawn("sleep 1000")
            template = find_template()
            descendants = template.children(recursive=True)
            template.kill()
            with pytest.raises(SandboxError, match="killed from outside"):
                await process.wait(20)
            assert not psutil.wait_procs(descendants, 20)[1]
        async with open_one() as second:
            assert second._sandbox.is_forked
            assert (await run_agent(second, "print('fine')")).text == "fine\n"


@pytest.mark.parametrize(
    "settings",
    [
        {"command": ["node", "agent.js"]},
        {"command": ["python3", "-c", "print()"]},
        {"command": ["python3"]},
        {"command": ["python3", "agent.py"], "env": {"PYTHONPATH": "{workdir}"}},
    ],
)
def test_preload_needs_a_python_script(settings):
    with pytest.raises(ValueError, match="preload"):
        ProgramHarnessConfig.model_validate({**settings, "preload": ["json"]})


def test_preload_needs_a_sandbox():
    harness = {"id": "program", "command": ["python3", "-u", "-m", "agent"], "preload": ["json"]}
    with pytest.raises(ConfigInvalid, match="needs the runtime 'sandbox', not 'local'"):
        load_env(OneTask, harness=harness)
    env = load_env(OneTask, harness=harness, runtime={"id": "sandbox"})
    assert env.sandbox_template is not None and env.sandbox_template.preload.python == ("python3", "-u")


async def test_a_sandbox_that_ended_while_it_started_closes_no_file_twice():
    sandbox, (ours, theirs) = BwrapSandbox(None), socket.socketpair()
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["true"]) as ended, ours:
        ended.wait(10)
        sandbox._first_process_fd = os.pidfd_open(first.pid)
        with pytest.raises(ProcessLookupError):
            sandbox._take_files([os.open(".", os.O_RDONLY), theirs.detach()], ended.pid)
        other_fd = os.open(os.devnull, os.O_RDONLY)  # gets the lowest number that is free
        await sandbox.stop()
        assert first.wait(10) == -signal.SIGKILL
        os.close(other_fd)
