"""The launch plan of a run: its processes, with their configuration, cores, GPUs and ports.

Everything that can be decided before a process starts is decided here, once; `--dry-run` prints it. A restarted process
follows the same plan, so addresses do not change.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from ramify.core.config import Config, write_toml
from ramify.core.errors import ConfigInvalid
from ramify.core.names import format_count
from ramify.env.chat_client import get_model_variable
from ramify.infer.config import EngineConfig, ExternalConfig, ModelConfig, NamedModelConfig, ServeConfig, VLLMConfig
from ramify.launch.devices import GIB, DeviceAllocation, DeviceAllocations, Gpu, allocate_devices, allocate_for_run
from ramify.launch.last_state import describe_last_state
from ramify.launch.machine import count_usable_cores
from ramify.launch.memory import (
    MemoryEstimate,
    ModelSize,
    check_memory,
    decide_moments,
    estimate_memory,
    find_long_path_warning,
)
from ramify.launch.plan_notes import describe_step_size, list_disk_notes, list_model_notes, list_start_notes
from ramify.launch.ports import HOST, PortReservation, build_source_addresses
from ramify.launch.process import ProcessRole, ProcessSpec
from ramify.launch.process_configs import (
    build_env_server_config,
    build_model_serve_config,
    build_serve_config,
    build_trainer_config,
)
from ramify.launch.published_weights import link_newest_weights
from ramify.launch.run_checks import check_run
from ramify.orchestrate.address_book import MODEL_PREFIX
from ramify.orchestrate.config import RunConfig
from ramify.processes.child import RAMIFY_COMMAND
from ramify.processes.training_lock import TRAINING_LOCK_VARIABLE
from ramify.processes.wire.listener import RESERVED_PORTS_VARIABLE
from ramify.rollout.envserver.config import ElasticPoolConfig, EnvServerConfig, ServedSourceConfig
from ramify.train.process_config import TrainerProcessConfig

ENGINE_MODULES = ("ramify.cli.serve", "ramify.infer.engine", "ramify.infer.server")
TRAINER_MODULES = ("ramify.cli.trainer", "ramify.train.remote_batch_source", "ramify.train.process")
ATTEMPT_SHUTDOWN_TIMEOUT = 2.0  # seconds that attempts in flight get when the run stops; they are retried anyway

SourceT = TypeVar("SourceT", bound=ServedSourceConfig)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The processes of a run, and what they need."""

    config: RunConfig
    process_specs: tuple[ProcessSpec, ...]
    config_files: Mapping[Path, Config]
    """The configuration of each process, by its file."""
    devices: DeviceAllocations
    model: ModelSize | None
    """None if the size of the model is unknown."""
    memory_estimate: MemoryEstimate | None
    orchestrator_address: str
    """Address that the trainer connects to."""
    status_address: str
    """Address of the status server."""
    reservation: PortReservation
    """Holds the ports of all processes until the run ends."""

    def write(self) -> None:
        """Write the configuration of the run and of each process, and the plan as text, to the run directory."""
        write_toml(self.config, self.config.path / "config.toml")
        (self.config.path / "plan.txt").write_text("\n".join([*self.format_lines(), ""]), encoding="utf-8")
        for file, config in self.config_files.items():
            write_toml(config, file)

    def format_lines(self) -> list[str]:
        """Return the plan as lines of text."""
        lines = [describe_run(self.config), describe_step_size(self.config)]
        devices = {"inference": self.devices.inference, "trainer": self.devices.trainer}
        for spec in self.process_specs:
            kind = "inference" if spec.name.startswith(MODEL_PREFIX) else spec.name
            spec_devices = devices.get(kind, self.devices.other)
            lines += ["", f"{spec.name}: {spec_devices}", f"  {shlex.join(spec.command)}"]
            lines += [f"  at {spec.address}, log in {spec.log}" if spec.address else f"  log in {spec.log}"]
        external = [
            f"{name}: {address} (external, not managed by this run)"
            for name, address in _list_external_services(self.config)
        ]
        notes = [*list_disk_notes(self.config), *list_model_notes(self.config), *list_start_notes(self.config)]
        if warning := self.find_memory_warning():
            notes.append(f"warning: {warning}")
        if self.model and self.model.experts_note:
            notes.append(self.model.experts_note)
        return [*lines, *(["", *external] if external else []), "", self._describe_memory(), *notes]

    def find_memory_warning(self) -> str | None:
        """Return why the run may need more memory than its devices have; None if it does not."""
        return find_long_path_warning(self.config, self.model, self.devices) if self.model else None

    def _describe_memory(self) -> str:
        if self.model is None or self.memory_estimate is None:
            return f"memory: unknown, model {self.config.model.name} is not on this machine"
        estimate, (engine_gpus, trainer_gpus) = self.memory_estimate, self.devices.gpus_by_role
        shared = engine_gpus[:1] if self.devices.is_colocated else []
        parts = [("inference", estimate.inference, engine_gpus), ("trainer", estimate.trainer, trainer_gpus)]
        fields = [
            f"{name} {size / GIB:.1f} GiB {'per GPU' if gpus else 'in total'}" for name, size, gpus in parts if size
        ]
        fields += [f"together {(estimate.inference + estimate.trainer) / GIB:.1f} GiB on {gpu.label}" for gpu in shared]
        fields += [f"everything else {estimate.other / GIB:.1f} GiB in total"]
        sizes = {gpu.memory for gpu in (*engine_gpus, *trainer_gpus) if gpu.memory is not None}
        gpu_size = f"; a GPU has {min(sizes) / GIB:.1f} GiB" if sizes else ""
        if self.devices.is_assumed:
            gpu_size += ", as assumed (--cluster.node.gpu_memory_gib)"
        model = f"{self.model.num_parameters:,} parameters, {self.model.origin}"
        moments = "; moments of AdamW in 8 bits" if self.config.trainer.optim.moments == "8bit" else ""
        return f"memory, roughly: {', '.join(fields)}{gpu_size}; {model}{moments}"


def describe_run(config: RunConfig) -> str:
    """Return the first line of a plan."""
    return f"run {config.path}: {config.model.name}, {format_count(config.max_steps, 'step')}"


def build_plan(config: RunConfig, *, dry_run: bool = False, gpus: list[Gpu] | None = None) -> LaunchPlan:
    """Build the plan of a run. Raises ConfigInvalid if the run is not possible, PortTaken for a port in use.

    With `dry_run`, the plan may be for another machine: GPUs and the model need not exist here.
    """
    check_run(config, dry_run=dry_run)
    devices = allocate_for_run(config, dry_run=dry_run, gpus=gpus)
    if config.weights.transport == "ipc" and not (
        isinstance(config.inference, EngineConfig) and devices.inference.gpus == devices.trainer.gpus
    ):
        needed = "a native engine that the run starts, on the same GPU as the trainer"
        raise ConfigInvalid(f"weights.transport: 'ipc' needs {needed}; use 'disk' or 'shm'")
    model = ModelSize.from_name(config.model.name)
    estimate = None
    if model is not None:
        config = decide_moments(config, model, devices)
        check_memory(config, model, devices)
        estimate = estimate_memory(config, model, devices)
    builder = _PlanBuilder(config, devices)
    services = (*builder.build_inference_specs(), *builder.build_model_specs(), *builder.build_env_server_specs())
    return builder.build((*services, builder.build_orchestrator_spec(), builder.build_trainer_spec()), model, estimate)


def build_orchestrator_plan(config: RunConfig) -> LaunchPlan:
    """Build the plan of an orchestrator and the env servers it starts, without engine and trainer."""
    devices = allocate_devices(count_usable_cores(), [], inference="none", trainer="cpu", placement="auto")
    builder = _PlanBuilder(config, devices)
    return builder.build((*builder.build_env_server_specs(), builder.build_orchestrator_spec()))


class _PlanBuilder:
    """Builds the specs of the processes, each with its part of the run's configuration.

    All processes start at once, because each takes long to load, and wait for each other if they have to.
    """

    def __init__(self, config: RunConfig, devices: DeviceAllocations) -> None:
        self.config, self.path, self.devices = config, config.path, devices
        orchestrator = config.orchestrator
        addresses = {
            "orchestrator.address": orchestrator.address,
            "orchestrator.status_address": orchestrator.status_address,
        }
        if not isinstance(config.inference, ExternalConfig):
            addresses["inference"] = f"http://{HOST}:0"
        managed_models = {name: model for name, model in config.all_models.items() if model.is_managed}
        addresses |= {f"{MODEL_PREFIX}{name}": f"http://{HOST}:0" for name in managed_models}
        self.reservation = PortReservation({**addresses, **build_source_addresses(config)})
        self.addresses = self.reservation.addresses
        if isinstance(config.inference, VLLMConfig):
            self.reservation.release("inference")  # vLLM binds its port without SO_REUSEPORT
        for name, model in managed_models.items():
            if isinstance(model.inference, VLLMConfig):
                self.reservation.release(f"{MODEL_PREFIX}{name}")
        self.run_config = _with_addresses(config, self.addresses)
        self.config_files: dict[Path, Config] = {}

    def build(
        self, specs: tuple[ProcessSpec, ...], model: ModelSize | None = None, estimate: MemoryEstimate | None = None
    ) -> LaunchPlan:
        """Build the plan of these processes."""
        return LaunchPlan(
            config=self.config,
            process_specs=specs,
            config_files=self.config_files,
            devices=self.devices,
            model=model,
            memory_estimate=estimate,
            orchestrator_address=self.run_config.orchestrator.address,
            status_address=self.run_config.orchestrator.status_address,
            reservation=self.reservation,
        )

    def build_inference_specs(self) -> list[ProcessSpec]:
        """Return the inference engine, unless inference is external."""
        if isinstance(self.config.inference, ExternalConfig):
            return []
        url = urlsplit(self.addresses["inference"])
        table = build_serve_config(self.config, self.devices.trainer.gpus)
        table["server"] |= {"host": url.hostname, "port": url.port, "shutdown_timeout": ATTEMPT_SHUTDOWN_TIMEOUT}
        if isinstance(self.config.inference, VLLMConfig):
            table["inference"].setdefault("log_file", str(self.path / "logs" / "vllm.log"))
        config = ServeConfig(**table)
        file = self._add_config_file("inference", config)

        def prepare() -> None:
            """Configure the engine to serve the newest weights, unless it fetches them when it joins the run."""
            weights = link_newest_weights(self.config) if self.config.weights.url is None else None
            name = str(weights.absolute()) if weights is not None else self.config.model.name
            write_toml(config.model_copy(update={"model": ModelConfig(name=name)}), file)

        is_preloadable = self._is_cpu_only and isinstance(self.config.inference, EngineConfig)
        return [
            ProcessSpec(
                "inference",
                (*RAMIFY_COMMAND, "serve", "@", str(file)),
                self.path / "logs" / "inference.log",
                env={**self._build_environment(self.devices.inference, "inference"), **self._training_lock_env},
                address=f"{self.addresses['inference']}/health",
                ready_timeout=self.config.launch.startup_timeout,
                prepare=prepare,
                preload_modules=ENGINE_MODULES if is_preloadable else (),
            )
        ]

    def build_model_specs(self) -> list[ProcessSpec]:
        """Return the engines of the other models that the run starts; their weights never change."""
        managed = {name: model for name, model in self.config.all_models.items() if model.is_managed}
        return [self._build_model_spec(f"{MODEL_PREFIX}{name}", model) for name, model in managed.items()]

    def _build_model_spec(self, process_name: str, model: NamedModelConfig) -> ProcessSpec:
        file_name, address = process_name.replace("/", "-"), self.addresses[process_name]
        url, table = urlsplit(address), build_model_serve_config(self.config, model, self.devices.inference.gpus)
        table["server"] |= {"host": url.hostname, "port": url.port, "shutdown_timeout": ATTEMPT_SHUTDOWN_TIMEOUT}
        if isinstance(model.inference, VLLMConfig):
            table["inference"].setdefault("log_file", str(self.path / "logs" / f"{file_name}-vllm.log"))
        file = self._add_config_file(file_name, ServeConfig(**table))
        is_preloadable = self._is_cpu_only and isinstance(model.inference, EngineConfig)
        return ProcessSpec(
            process_name,
            (*RAMIFY_COMMAND, "serve", "@", str(file)),
            self.path / "logs" / f"{file_name}.log",
            env=self._build_environment(self.devices.inference, process_name),
            address=f"{address}/health",
            ready_timeout=self.config.launch.startup_timeout,
            preload_modules=ENGINE_MODULES if is_preloadable else (),
        )

    def build_env_server_specs(self) -> list[ProcessSpec]:
        """Return the env servers of all sources without an address."""
        return [self._build_env_server_spec(name) for name in build_source_addresses(self.config)]

    def _build_env_server_spec(self, name: str) -> ProcessSpec:
        timeout, table = self.config.launch.startup_timeout, build_env_server_config(self.run_config, name)
        config = EnvServerConfig(**table, shutdown_timeout=ATTEMPT_SHUTDOWN_TIMEOUT, worker_startup_timeout=2 * timeout)
        source = config.select_source()
        file = self._add_config_file(f"env-{source.kind}-{source.source_name.replace('/', '-')}", config)
        return ProcessSpec(
            f"env/{name}",
            (*RAMIFY_COMMAND, "env-server", "@", str(file)),
            source.log_path(self.path),
            env={**self._build_environment(self.devices.other, name), **self._build_model_variables()},
            address=self.addresses[name],
            ready_timeout=timeout,
        )

    def build_orchestrator_spec(self) -> ProcessSpec:
        """Return the orchestrator."""
        file = self._add_config_file("orchestrator", with_default_pools(self.run_config))
        return ProcessSpec(
            "orchestrator",
            (*RAMIFY_COMMAND, "orchestrator", "@", str(file)),
            self.path / "logs" / "orchestrator.log",
            ProcessRole.LEADER,
            env=self._build_environment(self.devices.other, "orchestrator.address", "orchestrator.status_address"),
            address=f"{self.addresses['orchestrator.status_address']}/health",
            ready_timeout=2 * self.config.launch.startup_timeout,  # it waits for engines, then for env servers
            hang_timeout=self.config.launch.hang_timeout,
            last_state=lambda: describe_last_state(self.path),
        )

    def build_trainer_spec(self) -> ProcessSpec:
        """Return the trainer, with one process per GPU."""
        file = self._add_config_file("trainer", TrainerProcessConfig(**build_trainer_config(self.run_config)))
        record = ("--record", str(self.path / "batches")) if self.config.record_batches else ()
        arguments = ("trainer", "@", str(file), *record)
        num_gpus = len(self.devices.trainer.gpus)
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus), "-m", "ramify")
        command = (sys.executable, "-m", *torchrun, *arguments) if num_gpus > 1 else (*RAMIFY_COMMAND, *arguments)
        log, env = self.path / "logs" / "trainer.log", {**self.devices.trainer.env, **self._training_lock_env}
        modules = TRAINER_MODULES if self._is_cpu_only else ()
        return ProcessSpec("trainer", command, log, ProcessRole.FOLLOWER, env=env, preload_modules=modules)

    def _build_model_variables(self) -> dict[str, str]:
        """Return the environment variables with the addresses of the run's other models, for judges and users."""
        models = self.run_config.models
        return {get_model_variable(name): f"{model.base_url[0]} {model.name}" for name, model in models.items()}

    def _build_environment(self, devices: DeviceAllocation, *listeners: str) -> dict[str, str]:
        """Return the environment variables of a process, with the ports that are reserved for it."""
        return {**devices.env, RESERVED_PORTS_VARIABLE: self.reservation.format_ports(*listeners)}

    @property
    def _training_lock_env(self) -> dict[str, str]:
        """The environment variable that makes the engine wait while a trainer on its GPU computes a step."""
        path = str(self.path.resolve() / "training.lock")
        return {TRAINING_LOCK_VARIABLE: path} if self.devices.is_colocated else {}

    @property
    def _is_cpu_only(self) -> bool:
        """Whether no process uses a GPU. CUDA does not survive a fork, so only CPU processes are preforked."""
        return not self.devices.inference.gpus and not self.devices.trainer.gpus

    def _add_config_file(self, name: str, config: Config) -> Path:
        file = self.path / "configs" / f"{name}.toml"
        self.config_files[file] = config
        return file


def _with_addresses(config: RunConfig, addresses: Mapping[str, str]) -> RunConfig:
    """Return the configuration with the addresses of all processes that the run starts."""

    def with_address(kind: str, source: SourceT) -> SourceT:
        return source.model_copy(update={"address": source.address or addresses[f"{kind}/{source.source_name}"]})

    orchestrator = {
        "address": addresses["orchestrator.address"],
        "status_address": addresses["orchestrator.status_address"],
    }
    inference = {"inference": ExternalConfig(base_url=[addresses["inference"]])} if "inference" in addresses else {}
    models = {
        name: NamedModelConfig(name=model.name, base_url=[addresses[f"{MODEL_PREFIX}{name}"]])
        if model.is_managed
        else model
        for name, model in config.all_models.items()
    }
    return config.model_copy(
        update={
            "name": config.path.name,
            "models": models,
            "train": [with_address("train", source) for source in config.train],
            "eval": [with_address("eval", source) for source in config.eval],
            "orchestrator": config.orchestrator.model_copy(update=orchestrator),
            **inference,
        }
    )


def with_default_pools(config: RunConfig) -> RunConfig:
    """Return the configuration with the default `pool`, because no other is allowed beside an `address`."""
    default = {"pool": ElasticPoolConfig()}
    train = [source.model_copy(update=default) for source in config.train]
    evals = [source.model_copy(update=default) for source in config.eval]
    return config.model_copy(update={"train": train, "eval": evals})


def _list_external_services(config: RunConfig) -> list[tuple[str, str]]:
    """Return name and address of every service that the run uses but does not start."""
    services: list[tuple[str, str]] = []
    if isinstance(config.inference, ExternalConfig):
        services.append(("inference", ", ".join(config.inference.base_url)))
    services += [
        (f"{MODEL_PREFIX}{name}", ", ".join(model.base_url)) for name, model in config.models.items() if model.base_url
    ]
    for kind, sources in (("train", config.train), ("eval", config.eval)):
        services += [
            (f"env/{kind}/{source.source_name}", ", ".join(source.addresses)) for source in sources if source.addresses
        ]
    return services
