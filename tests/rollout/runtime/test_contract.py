"""What every runtime does: start, run, open a process, read, write, copy directories, expose the gateway, stop."""

import asyncio
import os
import shutil

import pytest

from ramify.core.errors import ConfigInvalid, SandboxError
from ramify.env import Task
from tests.rollout.runtime.conftest import RUNTIMES, open_runtime, run_with_runtime

pytestmark = pytest.mark.process


async def test_command_runs_in_the_work_directory_with_input_and_output(kind):
    async with open_runtime(kind) as runtime:
        await runtime.write("deep/name.txt", "ä")
        result = await runtime.run(["cat", "deep/name.txt", "-"], stdin=b"\x00\xff", timeout=10)
        assert (result.returncode, result.stdout, result.stderr) == (0, "ä".encode() + b"\x00\xff", b"")
        result = await runtime.run("pwd; echo oops >&2; exit 3", timeout=10)
        assert (result.returncode, result.text.strip(), result.stderr) == (3, str(runtime.workdir), b"oops\n")
        await runtime.run("printf '\\000\\377' > made", timeout=10)
        assert await runtime.read("made") == b"\x00\xff"
        assert await runtime.read(runtime.workdir / "made") == b"\x00\xff"


async def test_command_that_cannot_run_returns_an_exit_code(kind):
    async with open_runtime(kind) as runtime:
        assert (await runtime.run(["no-such-program"], timeout=10)).returncode == 127
        assert (await runtime.run(["cat"], cwd="no-such-place", timeout=10)).returncode == 127
        await runtime.write("data", "x")
        assert (await runtime.run(["./data"], timeout=10)).returncode == 126
        assert (await runtime.run(["sh", "-c", "kill -9 $$"], timeout=10)).returncode == -9
        assert (await runtime.run([], timeout=10)).returncode == 126
        for line in ("echo a\0b", "echo \ud800"):
            assert (await runtime.run(line, timeout=10)).returncode == 126


async def test_program_is_searched_in_the_path_of_its_environment(kind):
    async with open_runtime(kind) as runtime:
        await runtime.write("bin/ls", "#!/bin/sh\necho mine\n")
        await runtime.run("chmod +x bin/ls", timeout=10)
        env = {"PATH": f"{runtime.workdir}/bin:/usr/bin:/bin"}
        assert (await runtime.run(["ls"], env=env, timeout=10)).stdout == b"mine\n"
        assert (await runtime.run(["cat", "bin/ls"], env=env, timeout=10)).returncode == 0


async def test_task_names_the_directory_in_which_programs_start(kind):
    async def test(runtime):
        assert (await runtime.run("pwd", timeout=10)).text.strip() == str(runtime.workdir)
        assert runtime.workdir.name == "deep"

    await run_with_runtime(kind, test, Task(workdir="very/deep"))
    with pytest.raises(ConfigInvalid, match="outside"):
        await run_with_runtime(kind, test, Task(workdir="../other"))


async def test_environment_has_only_what_the_config_and_the_call_give(kind, monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "sk-1")

    async with open_runtime(kind, env={"FROM_CONFIG": "2"}) as runtime:
        result = await runtime.run(["env"], env={"MINE": "1"}, timeout=10)
        env = dict(line.split("=", 1) for line in result.text.splitlines())
        assert "SECRET_API_KEY" not in env
        assert (env["MINE"], env["FROM_CONFIG"]) == ("1", "2")
        probe = "test -d $HOME && test -w $HOME && test -w $TMPDIR && case $HOME in $PWD*) exit 1;; esac"
        assert (await runtime.run(probe, timeout=10)).returncode == 0


async def test_timeout_kills_the_program_and_all_it_started(kind):
    async with open_runtime(kind) as runtime:
        tree = "setsid sh -c 'while :; do echo x >> beat; sleep 0.05; done' & sleep 1000"
        result = await runtime.run(f"echo begun; {tree}", timeout=1)
        assert result.timed_out and result.returncode == 124 and result.stdout == b"begun\n"
        beats = len(await runtime.read("beat"))
        await asyncio.sleep(0.3)
        assert len(await runtime.read("beat")) == beats


async def test_cancelling_a_run_kills_the_program(kind):
    async with open_runtime(kind) as runtime:
        task = asyncio.create_task(runtime.run("while :; do echo x >> beat; sleep 0.05; done", timeout=100))
        while True:
            try:
                await runtime.read("beat")
                break
            except FileNotFoundError:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        beats = len(await runtime.read("beat"))
        await asyncio.sleep(0.3)
        assert len(await runtime.read("beat")) == beats


async def test_background_program_does_not_delay_the_result_and_is_reachable(kind):
    async with open_runtime(kind) as runtime:
        result = await runtime.run("mkfifo pipe; (cat pipe > got; touch done) & echo started", timeout=10)
        assert result.stdout == b"started\n"
        assert (
            await runtime.run("echo hello > pipe; while [ ! -e done ]; do sleep 0.01; done", timeout=10)
        ).returncode == 0
        assert await runtime.read("got") == b"hello\n"


async def test_interactive_program_answers_line_by_line(kind):
    async with open_runtime(kind) as runtime:
        program = await runtime.spawn("while read line; do echo got $line; done; echo end", interactive=True)
        for number in range(3):
            await program.write(f"{number}\n".encode())
            assert await program.read_line(10) == f"got {number}\n".encode()
        with pytest.raises(TimeoutError):
            await program.read_line(0.05)
        await program.kill()
        assert await program.read_line(10) == b""
        with pytest.raises(BrokenPipeError):
            await program.write(b"more\n")


async def test_output_is_bounded(kind):
    async with open_runtime(kind, max_output_bytes=1000) as runtime:
        result = await runtime.run("head -c 3000000 /dev/zero | tr '\\0' x; echo end", timeout=30)
        assert len(result.stdout) < 1200 and result.stdout.endswith(b"xend\n")


async def test_only_regular_files_beneath_the_root_are_read_and_written(kind):
    async with open_runtime(kind) as runtime:
        commands = [
            "ln -s /etc/passwd link",
            "ln -s /dev/zero zero",
            "ln -s / root",
            "mkfifo pipe",
            "mkdir directory",
            "ln -s $HOME directory/home",
            "ln -s ../../../../../../etc/passwd climb",
        ]
        assert (await runtime.run("; ".join(commands), timeout=10)).returncode == 0
        refused = ["link", "zero", "root/etc/passwd", "pipe", "directory", "directory/home/x", "climb", "nothing"]
        outside = ["../../../etc/passwd", "/proc/self/environ", "/dev/zero", "/"]
        if kind in ("local", "sandbox", "forked"):  # the others have a file system of their own
            outside.append("/etc/passwd")
        for path in [*refused, *outside]:
            with pytest.raises(FileNotFoundError):
                await asyncio.wait_for(runtime.read(path), 5)
            if path != "nothing":
                with pytest.raises(FileNotFoundError):
                    await asyncio.wait_for(runtime.write(path, b"x"), 5)


async def test_large_file_is_refused(kind, tmp_path):
    async with open_runtime(kind, max_file_mb=1) as runtime:
        await runtime.run("head -c 2000000 /dev/zero > large; mkdir d; cp large d; echo x > small", timeout=10)
        assert await runtime.read("small") == b"x\n"
        with pytest.raises(ValueError, match="larger"):
            await runtime.read("large")
        with pytest.raises(ValueError, match="more than"):
            await runtime.download("d", tmp_path)


async def test_directories_are_copied_both_ways_without_links(kind, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "tool.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "sub" / "tool.sh").chmod(0o755)
    (source / "empty").mkdir()

    async with open_runtime(kind) as runtime:
        await runtime.upload(source, "in")
        result = await runtime.run("in/sub/tool.sh && test -d in/empty && ls -A in", timeout=10)
        assert (result.returncode, result.text.split()) == (0, ["ran", "empty", "sub"])
        await runtime.run(
            "ln -s /etc in/etc; ln -s /etc/passwd in/passwd; mkfifo in/pipe; echo new > in/sub/new", timeout=10
        )
        await runtime.download("in", target)
        with pytest.raises(FileNotFoundError):
            await runtime.download("nothing", target)
    files = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert files == {"sub/tool.sh": "#!/bin/sh\necho ran\n", "sub/new": "new\n"}
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert os.access(target / "sub" / "tool.sh", os.X_OK)


async def test_single_file_is_copied_with_its_mode(kind, tmp_path):
    async with open_runtime(kind, max_file_mb=1) as runtime:
        await runtime.run("printf '#!/bin/sh\\n' > tool; chmod 755 tool; echo x > data; chmod 644 data", timeout=10)
        await runtime.run("ln -s data link; mkfifo pipe; head -c 2000000 /dev/zero > large", timeout=10)
        await runtime.download("tool", tmp_path / "tool")
        await runtime.download("data", tmp_path / "data")
        for path in ("link", "pipe", "nothing"):
            with pytest.raises(FileNotFoundError):
                await runtime.download(path, tmp_path / "other")
        with pytest.raises(ValueError, match="1048576 bytes"):
            await runtime.download("large", tmp_path / "other")
    assert (tmp_path / "tool").read_text() == "#!/bin/sh\n" and (tmp_path / "data").read_text() == "x\n"
    assert os.access(tmp_path / "tool", os.X_OK) and not (tmp_path / "data").stat().st_mode & 0o111


async def test_kept_files_are_found(kind, tmp_path):
    async with open_runtime(kind, keep_workdir=True) as runtime:
        await runtime.write("answer", b"x")
        assert runtime.kept_workdir is None
        await runtime.stop()
        assert runtime.kept_workdir is not None
        assert (runtime.kept_workdir / "answer").read_bytes() == b"x"
        shutil.rmtree(runtime.kept_workdir.parent if kind == "local" else runtime.kept_workdir)


async def test_exposed_server_is_reachable(kind):
    async def answer(reader, writer):
        line = await reader.readline()
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nanswer to " + line.split()[1])
        writer.close()

    async with asyncio.timeout(60):
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        settings = {"gateway_url": f"http://127.0.0.1:{port}"} if kind == "hosted" else {}
        async with server, open_runtime(kind, **settings) as runtime:
            url = await runtime.expose(f"http://127.0.0.1:{port}/v1")
            script = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1] + '/x', timeout=5).read().decode())"
            result = await runtime.run(["python3", "-S", "-c", script, url], timeout=20)
            assert result.stdout == b"answer to /v1/x\n", result


async def test_stopped_runtime_runs_nothing_and_stops_again(kind):
    async with open_runtime(kind) as runtime:
        await runtime.run("echo x > file", timeout=10)
        await runtime.stop()
        await runtime.stop()
        with pytest.raises(SandboxError, match="stopped"):
            await runtime.run("true", timeout=10)
        with pytest.raises(SandboxError, match="stopped"):
            await runtime.read("file")


async def test_prepared_runtime_starts_and_an_unused_one_stops(kind):
    async with asyncio.timeout(60):
        runtime_class, config_class = RUNTIMES[kind]
        used, unused = runtime_class(config_class()), runtime_class(config_class())
        await asyncio.gather(used.prepare(), unused.prepare())
        await used.start(Task(workdir="here"))
        assert (await used.run("pwd", timeout=10)).text.strip().endswith("/here")
        await asyncio.gather(used.stop(), unused.stop())


def test_what_the_runtime_cannot_enforce_is_refused_by_name(kind):
    runtime_class, config_class = RUNTIMES[kind]
    runtime = runtime_class(config_class())
    if kind in ("local", "sandbox", "forked"):
        with pytest.raises(ConfigInvalid, match=r"image 'debian:12' needs images of the runtime"):
            runtime.check_task(Task(image="debian:12"))
    else:
        runtime.check_task(Task(image="debian:12"))
    with pytest.raises(ConfigInvalid, match=r"resources.memory_gb is unknown, expected memory_mb"):
        runtime.check_task(Task(resources={"memory_gb": 1}))
    if kind == "local":
        with pytest.raises(ConfigInvalid, match=r"needs isolation of the runtime 'local'.*not isolated"):
            runtime.check_task(Task(requires=("isolation",)))
        with pytest.raises(ConfigInvalid, match="disk_mb in the task's resources needs disk_limit"):
            runtime.check_task(Task(resources={"disk_mb": 100}))
        with pytest.raises(ConfigInvalid, match=r"disk_mb in runtime.limits .* needs disk_limit"):
            runtime_class(config_class(limits={"disk_mb": 100})).check_task(Task())
    elif kind == "container":
        runtime.check_task(Task(requires=("isolation", "private_network"), resources={"cpus": 0.5}))
        with pytest.raises(ConfigInvalid, match="disk_mb in the task's resources needs disk_limit"):
            runtime.check_task(Task(resources={"disk_mb": 100}))
    elif kind == "hosted":
        runtime.check_task(Task(requires=("isolation",), resources={"disk_mb": 10_000}))
        with pytest.raises(ConfigInvalid, match="needs private_network of the runtime 'hosted'"):
            runtime.check_task(Task(requires=("private_network",)))
        with pytest.raises(ConfigInvalid, match="max_processes in the task's resources needs process_limit"):
            runtime.check_task(Task(resources={"max_processes": 100}))
    else:
        runtime.check_task(Task(requires=("isolation", "private_network"), resources={"disk_mb": 100}))
