"""The container runtime: programs in a container of Docker or podman, from the image of their task.

A container runs a shell that waits; every program is an `exec` command. It has no network. The gateway is reached
through a socket that is opened inside the container's network and handed out, so nothing of ours runs in it.

    prepare   a container of the configured image is started
    start     it is taken if the task has the same image and limits; else another is started
    spawn     `docker exec` or `podman exec` runs a shell that starts the program
    stop      the container is removed with all its processes and files

Containers outlive this process if it is killed. Their label names the machine and their name the process that made
them, so that `clean` removes the containers of ended processes.
"""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from ramify.core.errors import AgentFailed, ConfigInvalid, SandboxError
from ramify.env.runtime import Capabilities, ExecResult, ResourceLimits, RuntimeConfig
from ramify.env.task import Task
from ramify.rollout.runtime.config import ContainerRuntimeConfig, find_package_paths
from ramify.rollout.runtime.container_capabilities import (
    build_seccomp_profile,
    find_capabilities,
    find_gateway_problem,
    find_local_problem,
)
from ramify.rollout.runtime.container_engine import (
    MACHINE_LABEL,
    NAME_PREFIX,
    ContainerEngine,
    ContainerProcess,
    build_limit_options,
    fetch_image,
    find_engine,
    find_leftover_containers,
    find_unsupported_reason,
    wait_for_start,
)
from ramify.rollout.runtime.container_socket import open_listener
from ramify.rollout.runtime.host_proxy import HostProxy, build_proxy_variables
from ramify.rollout.runtime.owner import get_machine_id, make_owner_name, remove_leftovers
from ramify.rollout.runtime.port_forward import PortForward
from ramify.rollout.runtime.shell_process import KillFunction, ShellProcess
from ramify.rollout.runtime.shell_runtime import WORKDIR_SCRIPT, ShellRuntime, replace_address

START_TIMEOUT = 120.0  # seconds for a container to start
IDLE_SCRIPT = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"

_numbers = itertools.count()


@dataclass(slots=True)
class _Container:
    """A container, and what it is started with."""

    name: str
    image: str
    limits: ResourceLimits
    has_started: bool = False

    def can_be_used_for(self, image: str, limits: ResourceLimits) -> bool:
        """Return whether it has started with this image and these limits."""
        return self.has_started and (self.image, self.limits) == (image, limits)


class ContainerRuntime(ShellRuntime):
    """A runtime whose programs run in a container of Docker or podman."""

    config: ContainerRuntimeConfig

    def __init__(self, config: ContainerRuntimeConfig | None = None) -> None:
        config = config or ContainerRuntimeConfig()
        super().__init__(config, config.workdir)
        self._container: _Container | None = None
        self._forward: PortForward | None = None  # to the gateway
        self._proxy: HostProxy | None = None  # to the hosts of `allow_hosts`

    @property
    def capabilities(self) -> Capabilities:
        """Isolation, images and a private network; limits as far as the engine has them."""
        return find_capabilities(self._get_engine(), self.config)

    def check_task(self, task: Task) -> None:
        """Raise ConfigInvalid if there are no containers here, or if they lack what the task needs."""
        engine = self._get_engine()
        if reason := find_unsupported_reason(engine):
            raise ConfigInvalid(f"the runtime 'container' does not work on this machine: {reason}")
        if problem := find_local_problem(engine, self.config):
            raise ConfigInvalid(problem, key="runtime")
        super().check_task(task)

    async def prepare(self) -> None:
        """Start a container of the configured image with the limits of the configuration."""
        if self._container is None:
            await self._start_container(self.config.image, self.config.limits)

    async def start(self, task: Task) -> None:
        """Take the prepared container if it has the image and the limits of the task, or start one."""
        await asyncio.to_thread(self.check_task, task)
        image, limits = task.image or self.config.image, self.get_limits(task)
        if self._container is not None and not self._container.can_be_used_for(image, limits):
            await self._remove_sandbox()
        if self._container is None:
            await self._start_container(image, limits)
        try:
            if self.config.allow_hosts:
                await self._start_proxy()
            await self._prepare_workdir(task)
        except BaseException:
            with contextlib.suppress(SandboxError):  # `stop` tries again and reports it
                await self._remove_sandbox()
            raise

    async def stop(self) -> None:
        """Close the connections of the container, copy its work directory out if that is configured, and remove it."""
        await self._close_forwards()
        await super().stop()

    async def expose(self, base_url: str) -> str:
        """Forward a socket in the container's network to the server of `base_url`; return the URL that reaches it."""
        engine, url = self._get_engine(), urlsplit(base_url)
        if reason := find_gateway_problem(engine, self.config):
            raise ConfigInvalid(f"programs of a container cannot reach the gateway: {reason}")
        if self.config.network != "none" and self.config.gateway_url is not None:
            return replace_address(base_url, self.config.gateway_url)
        if self._forward is not None or url.hostname is None or url.port is None:
            raise ConfigInvalid(f"a container exposes one address with a port; {base_url} cannot be exposed")
        forward = PortForward(url.hostname, url.port)
        port = await self._start_forward(forward)
        self._forward = forward
        return url._replace(netloc=f"127.0.0.1:{port}").geturl()

    @classmethod
    def clean(cls, config: RuntimeConfig) -> Iterable[str]:
        """Remove the containers of processes of this machine that have ended."""
        assert isinstance(config, ContainerRuntimeConfig)
        engine = find_engine(config)
        if engine is None or find_unsupported_reason(engine):
            return ()
        return remove_leftovers(find_leftover_containers(engine))

    def _make_process(
        self, max_output_bytes: int, kill_marked: KillFunction | None, *, interactive: bool
    ) -> ContainerProcess:
        self._get_container()
        return ContainerProcess(max_output_bytes, kill_marked, interactive=interactive)

    async def _open_shell(
        self, process: ShellProcess, args: Sequence[str], env: Mapping[str, str], stdin: bytes | None
    ) -> None:
        assert isinstance(process, ContainerProcess)
        command = [*self._get_engine().command, "exec"]
        if self.config.user is not None:
            command += ["--user", self.config.user]
        await process.start(
            command, self._get_container().name, args, env, stdin, prepend_path=self.config.prepend_path
        )

    async def _start_proxy(self) -> None:
        """Start the proxy to the allowed hosts, and set the variables by which programs find it."""
        proxy = HostProxy(self.config.allow_hosts)
        port = await self._start_forward(proxy)
        self._proxy = proxy
        self._variables |= build_proxy_variables(port)

    async def _start_forward(self, forward: PortForward) -> int:
        """Start a forward with a listening socket in the container's network; return its port there."""
        pid = await self._inspect("{{.State.Pid}}")
        try:
            listener = await open_listener(int(pid), self._get_container().name)
        except (OSError, ValueError) as error:
            raise ConfigInvalid(
                f"a socket cannot be opened in the network of a container, through which programs reach the gateway: "
                f"{error}; is {self._get_engine().name} on this machine, and is this user allowed?"
            ) from error
        await forward.start(listener)
        return listener.getsockname()[1]

    async def _close_forwards(self) -> None:
        forwards, self._forward, self._proxy = (self._forward, self._proxy), None, None
        for forward in forwards:
            if forward is not None:
                await forward.close()

    async def _make_workdir(self, workdir: str) -> ExecResult:
        """Create the work directory as root: the user of the image may not be allowed to."""
        script = ["sh", "-c", WORKDIR_SCRIPT, "sh", workdir]
        return await self._get_engine().run("exec", "--user", "0", self._get_container().name, *script)

    async def _raise_unreachable(self, reason: str) -> None:
        state = await self._inspect("{{.State.Running}} {{.State.OOMKilled}}")
        if state.startswith("false"):
            cause = "its programs used more memory than the limit" if "true" in state else "its first process ended"
            raise AgentFailed(f"the container has ended: {cause}")
        raise SandboxError(f"the container does not run programs: {reason[-500:]}")

    async def _kill_marked(self, marker: str) -> None:
        """Kill programs one by one, or the container if it is too full to start the program that kills."""
        try:
            await super()._kill_marked(marker)
        except SandboxError:
            await self._get_engine().run("kill", self._get_container().name)

    async def _start_container(self, image: str, limits: ResourceLimits) -> None:
        engine, owner = self._get_engine(), make_owner_name(next(_numbers))
        await fetch_image(engine, image, self.config)  # apart from the start, which must not be interrupted
        container = _Container(f"{NAME_PREFIX}{owner}", image, limits)
        command = ["run", "--detach", "--name", container.name, "--hostname", "sandbox"]
        for label, value in {**self.config.labels, MACHINE_LABEL: get_machine_id()}.items():
            command += ["--label", f"{label}={value}"]
        for source, target in self.config.read_only_paths:
            command += ["--volume", f"{source}:{target}:ro"]
        for directory in find_package_paths(self.config.read_only_paths):
            # podman would copy the hidden files into it
            command += ["--tmpfs", f"{directory}:ro" + (",notmpcopyup" if engine.name == "podman" else "")]
        command += ["--network", self.config.network, "--security-opt", "no-new-privileges", "--entrypoint", "sh"]
        command += [
            "--pull",
            "never" if self.config.pull == "never" else "missing",
            "--workdir",
            "/",
            *build_limit_options(limits),
        ]
        if engine.name == "podman":
            command.append("--http-proxy=false")  # their addresses may hold a password
        if self.config.max_starts_per_second is not None:
            await wait_for_start(self.config.max_starts_per_second)
        command_end = [*self.config.engine_args, image, "-c", IDLE_SCRIPT, container.name]
        self._container = container
        start = asyncio.create_task(_run_with_profile(engine, command, command_end))
        try:
            result = await asyncio.shield(start)
            if result.returncode:
                raise SandboxError(f"a container of {image} cannot be started: {result.error_text.strip()[-1000:]}")
            container.has_started = True
        except BaseException:
            await asyncio.wait([start])  # a container could appear after it was removed; `run` has a timeout
            with contextlib.suppress(SandboxError):  # `stop` tries again and reports it
                await self._remove_sandbox()
            raise

    async def _remove_sandbox(self) -> None:
        """Remove the container, if there is one. It is forgotten when it is gone, so that this can be repeated."""
        container = self._container
        if container is None:
            return
        await self._close_forwards()
        processes, self._processes = self._processes, []
        try:
            for process in processes:
                await process.close()
        finally:
            engine = self._get_engine()
            time_option = ["--time", "0"] if engine.name == "podman" else []
            result = await engine.run("rm", "--force", "--volumes", *time_option, container.name)
            if result.returncode and "no such" not in result.error_text.lower():
                raise SandboxError(
                    f"the container {container.name} cannot be removed: {result.error_text.strip()[-500:]}"
                )
            self._container = None

    async def _inspect(self, template: str) -> str:
        container = self._get_container()
        result = await self._get_engine().run("inspect", "--type", "container", "--format", template, container.name)
        if result.returncode:
            error = AgentFailed if "no such" in result.error_text.lower() else SandboxError
            raise error(f"the container has ended: {result.error_text.strip()[-500:]}")
        return result.text.strip()

    def _get_engine(self) -> ContainerEngine:
        engine = find_engine(self.config)
        if engine is None:
            name = "docker or podman" if self.config.engine == "auto" else self.config.engine
            raise ConfigInvalid(
                f"the runtime 'container' does not work on this machine: {name} is not installed, or not in PATH"
            )
        return engine

    def _get_container(self) -> _Container:
        if self._container is None:
            raise SandboxError("the runtime was stopped or not started; it cannot run anything")
        return self._container


async def _run_with_profile(engine: ContainerEngine, command: list[str], command_end: list[str]) -> ExecResult:
    """Run a command that starts a container, with the seccomp profile of containers."""
    profile = await asyncio.to_thread(build_seccomp_profile, engine)
    with tempfile.NamedTemporaryFile("w", prefix="ramify-seccomp-", suffix=".json") as file:
        if profile is not None:
            file.write(profile)
            file.flush()
            command = [*command, "--security-opt", f"seccomp={file.name}"]
        return await engine.run(*command, *command_end, timeout=START_TIMEOUT)
