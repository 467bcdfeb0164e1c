"""The plan of a run: which processes, with what configuration, on which cores, GPUs and ports, and whether it fits.

Everything that can be known before a process starts is decided here, once, and can be read: `--dry-run` prints it. A
restart follows the same plan, so an address that was given out stays true.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from ramify.config import Config, raise_config_invalid, write_toml
from ramify.envserver.config import ElasticPoolConfig, EnvServerConfig
from ramify.errors import ModelNotFound
from ramify.infer.config import EngineConfig, ExternalConfig, ModelConfig, ServeConfig, VLLMConfig
from ramify.launch.devices import DeviceAllocation, DeviceAllocations, Gpu, allocate_devices
from ramify.launch.fit import ASSUMED_GPU_BYTES, GIB, allocate_for_run, check_memory, estimate_run_memory
from ramify.launch.last_state import describe_last_state
from ramify.launch.machine import usable_cores
from ramify.launch.memory import MemoryEstimate, ModelSize
from ramify.launch.ports import HOST, PortReservation, build_source_addresses
from ramify.launch.process import ProcessRole, ProcessSpec
from ramify.launch.process_configs import build_env_server_config, build_serve_config, build_trainer_config
from ramify.launch.published_weights import link_newest_weights
from ramify.model.resolve import fetch_model, resolve_model_path
from ramify.orchestrate.config import RunConfig, RunSourceConfig
from ramify.train.process_config import TrainerProcessConfig
from ramify.wire.listener import RESERVED_PORTS_VARIABLE

ENGINE_MODULES = ("ramify.cli.serve", "ramify.infer.engine", "ramify.infer.server")  # what the commands load
TRAINER_MODULES = ("ramify.cli.trainer", "ramify.train.remote_batch_source", "ramify.train.process")
ATTEMPT_SHUTDOWN_TIMEOUT = 2.0  # seconds that attempts in flight get when the run stops: they are run again anyway

SourceT = TypeVar("SourceT", bound=RunSourceConfig)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What `ramify rl` is about to do."""

    config: RunConfig
    process_specs: tuple[ProcessSpec, ...]
    config_files: Mapping[Path, Config]
    """The configuration of each process, by its file."""
    devices: DeviceAllocations
    model: ModelSize | None
    memory_estimate: MemoryEstimate | None
    orchestrator_address: str
    """Where the trainer finds the orchestrator."""
    status_address: str
    """Where the orchestrator says how the run is."""
    reservation: PortReservation
    """Holds the ports of all processes until the run ends."""

    def write(self) -> None:
        """Write the configurations, the run's own and each process's, and the plan for people."""
        write_toml(self.config, self.config.path / "config.toml")
        (self.config.path / "plan.txt").write_text("\n".join([*self.format_lines(), ""]), encoding="utf-8")
        for file, config in self.config_files.items():
            write_toml(config, file)

    def format_lines(self) -> list[str]:
        """The plan for people."""
        lines = [f"run {self.config.path}: {self.config.model.name}, {self.config.max_steps} steps"]
        for entry in self.process_specs:
            lines += ["", f"{entry.name}: {self._describe_devices(entry)}", f"  {shlex.join(entry.command)}"]
            lines += [f"  at {entry.address}, log in {entry.log}" if entry.address else f"  log in {entry.log}"]
        outside = [
            f"{name}: {where}, which is neither started nor stopped"
            for name, where in _list_external_services(self.config)
        ]
        return [*lines, *(["", *outside] if outside else []), "", *self._describe_memory()]

    def _describe_devices(self, spec: ProcessSpec) -> str:
        named = {"inference": self.devices.inference, "trainer": self.devices.trainer}
        return str(named.get(spec.name, self.devices.other))

    def _describe_memory(self) -> list[str]:
        if self.model is None or self.memory_estimate is None:
            return [f"memory: not known, {self.config.model.name} is not on this machine"]
        parts = {
            "inference": self.memory_estimate.inference,
            "trainer": self.memory_estimate.trainer,
            "everything else": self.memory_estimate.other,
        }
        told = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in parts.items() if size)
        absent = any(gpu.memory is None for gpu in (*self.devices.inference.gpus, *self.devices.trainer.gpus))
        taken = f"; GPUs that are not here are taken as {ASSUMED_GPU_BYTES / GIB:.0f} GiB" if absent else ""
        return [f"memory, roughly: {told}; {self.model.num_parameters:,} parameters, {self.model.origin}{taken}"]


def build_plan(config: RunConfig, *, dry_run: bool = False, gpus: list[Gpu] | None = None) -> LaunchPlan:
    """The plan. Raises ConfigInvalid for what cannot be or does not fit, PortTaken for a port that is not free.

    A `dry` plan may be of a run for another machine: of GPUs and a model that are not here.
    """
    _check_model(config, dry_run=dry_run)
    if config.monitor.sinks:
        from ramify.monitor import check_sinks_installed  # brings numpy, and a run without sinks starts sooner

        check_sinks_installed(config)
    shares = allocate_for_run(config, dry_run=dry_run, gpus=gpus)
    model = ModelSize.from_name(config.model.name)
    need = estimate_run_memory(shares, config, model) if model else None
    if need is not None:
        check_memory(need, shares)
    return _PlanBuilder(config, shares).build_full_plan(model, need)


def build_orchestrator_plan(config: RunConfig) -> LaunchPlan:
    """The plan of an orchestrator that starts its env servers itself. Engines and the trainer are others' business."""
    shares = allocate_devices(usable_cores(), [], inference="none", trainer="cpu", mode="auto")
    return _PlanBuilder(config, shares).build_orchestrator_plan()


class _PlanBuilder:
    """Puts the processes together, every one with its part of the run's configuration.

    All start at once and wait for each other where they have to: loading takes as long for each of them.
    """

    def __init__(self, config: RunConfig, devices: DeviceAllocations) -> None:
        self.config, self.path, self.devices = config, config.path, devices
        own = {"orchestrator.address": config.orchestrator.address, "orchestrator.status": config.orchestrator.status}
        engine = {} if isinstance(config.inference, ExternalConfig) else {"inference": f"http://{HOST}:0"}
        self.reservation = PortReservation({**own, **engine, **build_source_addresses(config)})
        self.addresses = self.reservation.addresses
        if isinstance(config.inference, VLLMConfig):
            self.reservation.release("inference")  # vLLM binds its port without SO_REUSEPORT
        self.run_config = _with_addresses(config, self.addresses)
        self.config_files: dict[Path, Config] = {}

    def build_full_plan(self, model: ModelSize | None, memory_estimate: MemoryEstimate | None) -> LaunchPlan:
        """All that has no address yet."""
        return self._build_plan(
            (*self._inference_specs(), *self._env_server_specs(), self._orchestrator_spec(), self._trainer_spec()),
            model,
            memory_estimate,
        )

    def build_orchestrator_plan(self) -> LaunchPlan:
        """The orchestrator, and the env servers that it needs."""
        return self._build_plan((*self._env_server_specs(), self._orchestrator_spec()))

    def _build_plan(
        self,
        process_specs: tuple[ProcessSpec, ...],
        model: ModelSize | None = None,
        memory_estimate: MemoryEstimate | None = None,
    ) -> LaunchPlan:
        told = self.run_config.orchestrator
        return LaunchPlan(
            config=self.config,
            process_specs=process_specs,
            config_files=self.config_files,
            devices=self.devices,
            model=model,
            memory_estimate=memory_estimate,
            orchestrator_address=told.address,
            status_address=told.status,
            reservation=self.reservation,
        )

    def _inference_specs(self) -> list[ProcessSpec]:
        if isinstance(self.config.inference, ExternalConfig):
            return []
        place = urlsplit(self.addresses["inference"])
        table = build_serve_config(self.config, self.devices.trainer.gpus)
        table["server"] |= {"host": place.hostname, "port": place.port, "shutdown": ATTEMPT_SHUTDOWN_TIMEOUT}
        if isinstance(self.config.inference, VLLMConfig):
            table["inference"].setdefault("log", str(self.path / "logs" / "vllm.log"))
        served = ServeConfig(**table)
        file = self._add_config_file("inference", served)
        weights = self.config.weights.directory_for(self.path)

        def prepare() -> None:
            """A restart serves the newest weights there are."""
            found = link_newest_weights(weights)
            name = str(found.resolve()) if found is not None else self.config.model.name
            write_toml(served.model_copy(update={"model": ModelConfig(name=name)}), file)

        return [
            ProcessSpec(
                "inference",
                _ramify_command("serve", "@", str(file)),
                self.path / "logs" / "inference.log",
                env=self._build_environment(self.devices.inference, "inference"),
                address=f"{self.addresses['inference']}/health",
                ready_timeout=self.config.launch.start_deadline,
                prepare=prepare,
                preload_modules=ENGINE_MODULES
                if self._is_cpu_only and isinstance(self.config.inference, EngineConfig)
                else (),
            )
        ]

    def _env_server_specs(self) -> list[ProcessSpec]:
        return [self._env_server_spec(name) for name in build_source_addresses(self.config)]

    def _env_server_spec(self, name: str) -> ProcessSpec:
        deadline = self.config.launch.start_deadline
        server = EnvServerConfig(
            **build_env_server_config(self.run_config, name), grace=ATTEMPT_SHUTDOWN_TIMEOUT, boot_timeout=2 * deadline
        )
        picked = server.select_source()
        file = self._add_config_file(f"env-{picked.kind}-{picked.source_name.replace('/', '-')}", server)
        return ProcessSpec(
            f"env/{name}",
            _ramify_command("env-server", "@", str(file)),
            picked.log_path(self.path),
            env=self._build_environment(self.devices.other, name),
            address=self.addresses[name],
            ready_timeout=deadline,
        )

    def _orchestrator_spec(self) -> ProcessSpec:
        file = self._add_config_file("orchestrator", _with_default_pools(self.run_config))
        return ProcessSpec(
            "orchestrator",
            _ramify_command("orchestrator", "@", str(file)),
            self.path / "logs" / "orchestrator.log",
            ProcessRole.LEADER,
            env=self._build_environment(self.devices.other, "orchestrator.address", "orchestrator.status"),
            address=f"{self.addresses['orchestrator.status']}/health",
            ready_timeout=2 * self.config.launch.start_deadline,  # it waits for engines, then for env servers
            hang_timeout=self.config.launch.hang_timeout,
            last_state=lambda: describe_last_state(self.path),
        )

    def _trainer_spec(self) -> ProcessSpec:
        file = self._add_config_file("trainer", TrainerProcessConfig(**build_trainer_config(self.run_config)))
        kept = ("--record", str(self.path / "batches")) if self.config.record else ()
        words = ("trainer", "@", str(file), *kept)
        gpus = len(self.devices.trainer.gpus)
        spread = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m", "ramify")
        command = (sys.executable, "-m", *spread, *words) if gpus > 1 else _ramify_command(*words)
        log, env = self.path / "logs" / "trainer.log", self.devices.trainer.env
        loads = TRAINER_MODULES if self._is_cpu_only else ()
        return ProcessSpec("trainer", command, log, ProcessRole.FOLLOWER, env=env, preload_modules=loads)

    def _build_environment(self, devices: DeviceAllocation, *listeners: str) -> dict[str, str]:
        """Return the environment variables of a process, with the ports that are reserved for it."""
        return {**devices.env, RESERVED_PORTS_VARIABLE: self.reservation.ports(*listeners)}

    @property
    def _is_cpu_only(self) -> bool:
        """Whether nobody has a GPU, which belongs to whoever has touched it: what is forked could not."""
        return not self.devices.inference.gpus and not self.devices.trainer.gpus

    def _add_config_file(self, name: str, config: Config) -> Path:
        file = self.path / "configs" / f"{name}.toml"
        self.config_files[file] = config
        return file


def _with_addresses(config: RunConfig, addresses: Mapping[str, str]) -> RunConfig:
    """The run's configuration with the address of everything that listens."""

    def with_address(kind: str, source: SourceT) -> SourceT:
        return source.model_copy(update={"address": source.address or addresses[f"{kind}/{source.source_name}"]})

    own = {"address": addresses["orchestrator.address"], "status": addresses["orchestrator.status"]}
    engine = {"inference": ExternalConfig(base_url=[addresses["inference"]])} if "inference" in addresses else {}
    return config.model_copy(
        update={
            "name": config.path.name,
            "train": [with_address("train", source) for source in config.train],
            "eval": [with_address("eval", source) for source in config.eval],
            "orchestrator": config.orchestrator.model_copy(update=own),
            **engine,
        }
    )


def _with_default_pools(config: RunConfig) -> RunConfig:
    """As those see it who only ask: a server at an address has a pool of its own."""
    bare = {"pool": ElasticPoolConfig()}
    train = [source.model_copy(update=bare) for source in config.train]
    evals = [source.model_copy(update=bare) for source in config.eval]
    return config.model_copy(update={"train": train, "eval": evals})


def _ramify_command(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "ramify", *words)


def _list_external_services(config: RunConfig) -> list[tuple[str, str]]:
    inference = config.inference
    found = [("inference", ", ".join(inference.base_url))] if isinstance(inference, ExternalConfig) else []
    sources = [*(("train", source) for source in config.train), *(("eval", source) for source in config.eval)]
    return found + [(f"env/{kind}/{source.title}", source.address) for kind, source in sources if source.address]


def _check_model(config: RunConfig, *, dry_run: bool) -> None:
    try:
        find_model = resolve_model_path if dry_run else fetch_model
        find_model(config.model.name)
    except ModelNotFound as error:
        if not dry_run:
            raise_config_invalid([("model.name", error.message)], cause=error)
