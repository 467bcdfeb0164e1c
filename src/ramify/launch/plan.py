"""The launch plan of a run: its processes, where each one runs, and how each one is started there.

What a process needs is in `demands`, its place in `placement`. The address of a process is known only when the
launcher has opened its slot, and may change at a restart. So the plan has, for every process, a function that builds
its command and configuration for a slot. Env servers start after engines have a place, and the orchestrator after both,
so that they know the first addresses; they learn later ones from the address book. `--dry-run` prints the plan.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from ramify.core.config import CONFIG_FILE, PLAN_FILE, Config, dump_toml, write_toml
from ramify.core.errors import ConfigInvalid
from ramify.core.files import write_atomically
from ramify.core.names import format_count
from ramify.env.chat_client import get_model_variable
from ramify.infer.config import (
    EngineConfig,
    ExternalServersConfig,
    NamedModelConfig,
    ServeConfig,
    VLLMConfig,
)
from ramify.launch.capacity import find_long_path_warning, list_assumption_notes, place_run, plan_sizes
from ramify.launch.demands import ENGINE_PREFIX, ENV_PREFIX, ORCHESTRATOR, TRAINER, build_service_demands
from ramify.launch.launcher import ClusterNode, PlacementRequest, ProcessRole, ProcessSlot, ProcessSpec, ProcessStart
from ramify.launch.machine import GIB
from ramify.launch.memory import DiskEstimate, estimate_disk
from ramify.launch.pinned_datasets import list_dataset_notes
from ramify.launch.placement import Assignments, ProcessDemand, RunPlacement, place_processes
from ramify.launch.process_configs import (
    build_env_server_config,
    build_model_serve_config,
    build_serve_config,
    build_source_addresses,
    build_trainer_config,
    publishes_adapters,
)
from ramify.launch.published_weights import choose_transport, describe_weights, is_beside_trainer, link_newest_weights
from ramify.launch.run_checks import describe_step_size, list_model_notes, list_start_notes
from ramify.launch.status_line import describe_last_state
from ramify.orchestrate.address_book import INFERENCE_KEY, MODEL_PREFIX
from ramify.orchestrate.cluster_config import ClusterConfig
from ramify.orchestrate.run_config import RunConfig
from ramify.processes.child import RAMIFY_COMMAND
from ramify.processes.training_lock import RESERVED_MEMORY_VARIABLE, TRAINING_LOCK_VARIABLE
from ramify.processes.wire.address import is_local
from ramify.processes.wire.listener import RESERVED_PORTS_VARIABLE, PortReservation
from ramify.rollout.envserver.config import ElasticPoolConfig, EnvServerConfig, ServedSourceConfig
from ramify.run.fencing.lease import LeaseTerms
from ramify.train.config import TrainerProcessConfig
from ramify.train.memory import ModelSize

ENGINE_MODULES = ("ramify.cli.serve", "ramify.infer.engine", "ramify.infer.server")
TRAINER_MODULES = ("ramify.cli.trainer", "ramify.train.remote_batch_source", "ramify.train.training_loop")
ATTEMPT_SHUTDOWN_TIMEOUT = 2.0  # seconds that attempts in flight get when the run stops; they are retried anyway
ENGINE_LEASE_FACTOR = 2  # engines take minutes to start, so they are replaced later than other processes
SECRET_BYTES = 32
STDOUT = Path("/dev/stdout")
MEMORY_COLUMNS = ("weights", "moments", "gradients", "activations", "keys and values", "workspace", "headroom", "total")

SourceT = TypeVar("SourceT", bound=ServedSourceConfig)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The processes of a run, and where they are started."""

    config: RunConfig
    """With everything decided that depends on the nodes."""
    user_config: RunConfig
    """As the user wrote it, from which a resumed run is planned again, perhaps for other nodes."""
    process_specs: tuple[ProcessSpec, ...]
    placement: RunPlacement
    model: ModelSize | None  # None if the size of the model is unknown
    orchestrator_address: str  # address that the trainer connects to
    status_address: str  # address of the status server
    reservation: PortReservation  # holds the ports of the orchestrator until the run ends

    def write(self) -> None:
        """Write the configuration of the run, and the plan as text, to the run directory."""
        write_plan(self.user_config, self.config, self.placement)

    def list_warnings(self) -> list[str]:
        """Return what the disk or the memory may be too small for, now."""
        return _list_warnings(self.config, self.placement, estimate_disk(self.config, self.placement.nodes))


def write_plan(user_config: RunConfig, config: RunConfig, placement: RunPlacement) -> None:
    """Write the user's configuration of a run, and the plan of `config` as text, to the run directory."""
    write_toml(user_config, config.path / CONFIG_FILE)
    write_atomically(config.path / PLAN_FILE, "\n".join([*format_plan(config, placement), ""]))


def format_plan(config: RunConfig, placement: RunPlacement, origin: str = "", *, fresh: bool = False) -> list[str]:
    """Return the plan of a run as lines of text; `origin` says where its nodes come from, `fresh` if it starts over."""
    lines = [describe_run(config), describe_step_size(config), *([origin] if origin else []), *placement.format_lines()]
    external = [
        f"{name}: {address} (external, not managed by this run)" for name, address in _list_external_services(config)
    ]
    model = ModelSize.from_name(config.model.name)
    disk = estimate_disk(config, placement.nodes, fresh=fresh)
    notes = [
        *list_assumption_notes(config, placement.nodes, model),
        *([] if disk is None else [str(disk)]),
        *list_model_notes(config),
        *list_dataset_notes(config),
        *list_start_notes(config),
        *(f"warning: {warning}" for warning in _list_warnings(config, placement, disk)),
    ]
    if model and model.experts_note:
        notes.append(model.experts_note)
    weights = [line] if model and (line := describe_weights(config, placement, model)) else []
    return [*lines, "", *external, *weights, *_format_memory(config, placement, model), *notes]


def _list_warnings(config: RunConfig, placement: RunPlacement, disk: DiskEstimate | None) -> list[str]:
    """Return what the disk or the memory may be too small for; nothing if the trainer is not started by this plan."""
    if TRAINER not in placement.places:
        return []
    return [*filter(None, [disk.find_warning() if disk else None, find_long_path_warning(config, placement)])]


def _format_memory(config: RunConfig, placement: RunPlacement, model: ModelSize | None) -> list[str]:
    """Return a table of what the memory of each GPU holds, and a line on the memory of each node."""
    if model is None:
        return [f"memory: unknown, model {config.model.name} is not on this machine"]
    names_by_row: dict[tuple[str, ...], list[str]] = {}
    for name, use, memory in placement.list_gpu_use():
        sizes = (*(getattr(use, part.name) for part in fields(use)), memory - use.total, memory)
        names_by_row.setdefault(tuple(f"{size / GIB:.1f}" for size in sizes), []).append(name)
    lines = ["memory of each GPU in GiB, roughly:"] if names_by_row else []
    rows = [("", *MEMORY_COLUMNS), *((", ".join(names), *row) for row, names in names_by_row.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows if names_by_row else ():
        lines.append("  ".join([f"  {name:<{widths[0]}}", *map(str.rjust, cells, widths[1:])]))
    sizes = [
        f"{name} {needed / GIB:.1f} {'' if memory is None else f'of {memory / GIB:.1f} '}GiB"
        for name, needed, memory in placement.list_memory()
        if not name.startswith("GPU")
    ]
    return [*lines, f"memory, roughly: {'; '.join(sizes)}; {describe_size(model)}"]


def describe_size(model: ModelSize) -> str:
    """Return the number of parameters and layers of a model, and where they are from."""
    return f"{model.num_parameters:,} parameters in {format_count(model.num_layers, 'layer')}, {model.origin}"


def describe_run(config: RunConfig) -> str:
    """Return the first line of a plan."""
    return f"run {config.path}: {config.model.name}, {format_count(config.max_steps, 'step')}"


def build_plan(config: RunConfig, nodes: Sequence[ClusterNode], *, fresh: bool = False) -> LaunchPlan:
    """Build the plan of a run on these nodes; `fresh` if it starts over.

    Raises ConfigInvalid or ClusterTooSmall if the run is not possible, PortTaken for a port in use.
    """
    return _PlanBuilder(config, *plan_run(config, nodes, fresh=fresh)).build()


def plan_run(config: RunConfig, nodes: Sequence[ClusterNode], *, fresh: bool = False) -> tuple[RunConfig, RunPlacement]:
    """Return the configuration with everything decided that depends on the nodes, and the placement.

    Raises ClusterTooSmall, or ConfigInvalid if the run is not possible or its disk is too small. The disk of an assumed
    machine is not known, unless the run has a shared directory.
    """
    user_config, (config, reasons) = config, plan_sizes(config, nodes, fresh=fresh)
    placement = place_run(config, nodes, user_config=user_config)
    transport = choose_transport(config, placement)
    if transport != config.weights.transport:
        weights = config.weights.model_copy(update={"transport": transport})
        config = config.model_copy(update={"weights": weights})
        placement = place_run(config, nodes)
    placement = replace(placement, reasons=(*placement.reasons, *reasons))
    disk = estimate_disk(config, nodes, fresh=fresh)
    is_known = not (placement.head.is_assumed and config.shared_path is None)
    if disk is not None and not disk.is_guessed and is_known and (problem := disk.find_problem()):
        raise ConfigInvalid(problem, key="output")
    return config, placement


def build_orchestrator_plan(config: RunConfig, nodes: Sequence[ClusterNode]) -> LaunchPlan:
    """Build the plan of an orchestrator and the env servers it starts, without engine and trainer."""
    demands = build_service_demands(config, nodes)
    places = place_processes(demands, nodes)
    plan = _PlanBuilder(config, config, RunPlacement(tuple(nodes), tuple(demands), places)).build()
    return replace(plan, model=None)


class _PlanBuilder:
    """Builds the specs of the processes, and remembers the address of each process that has a place."""

    def __init__(self, user_config: RunConfig, config: RunConfig, placement: RunPlacement) -> None:
        self.user_config, self.config, self.placement, self.head = user_config, config, placement, placement.head
        address = config.orchestrator.address
        if is_local(address):  # the ranks of the trainer may connect to it from other nodes
            address = f"tcp://{self.head.host}:{urlsplit(address).port}"
        self.reservation = PortReservation(
            {"orchestrator.address": address, "orchestrator.status_address": config.orchestrator.status_address}
        )
        self.address, self.status_address = self.reservation.addresses.values()
        self.health_address = f"{self.status_address}/health"
        self.assignments = Assignments(placement.demands, placement.places)
        self.addresses: dict[str, str] = {}
        self.source_ports = {
            f"{ENV_PREFIX}{name}": urlsplit(address).port or 0
            for name, address in build_source_addresses(config).items()
        }
        self.engine_names = placement.list_names(ENGINE_PREFIX, MODEL_PREFIX)
        self.is_trainer_on_gpu = any(demand.gpus for demand in placement.demands if demand.name == TRAINER)
        self.uses_gpus = any(demand.gpus for demand in placement.demands)
        # Addresses that other machines can reach need a secret.
        is_reachable = not all(is_local(f"tcp://{node.host}:0") for node in placement.nodes)
        secret = config.secret or secrets.token_hex(SECRET_BYTES)
        self.secret_env = {config.secret_env: secret} if is_reachable else {}

    def build(self) -> LaunchPlan:
        """Build the plan."""
        return LaunchPlan(
            config=self.config,
            user_config=self.user_config,
            process_specs=tuple(self._build_spec(demand) for demand in self.placement.demands),
            placement=self.placement,
            model=ModelSize.from_name(self.config.model.name),
            orchestrator_address=self.address,
            status_address=self.status_address,
            reservation=self.reservation,
        )

    # -- specs ---------------------------------------------------------------------------------------------------------

    def _build_spec(self, demand: ProcessDemand) -> ProcessSpec:
        config, name = self.config, demand.name
        if name == ORCHESTRATOR:
            return self._build_orchestrator_spec(demand)
        lease_factor = ENGINE_LEASE_FACTOR if name in self.engine_names else 1
        spec = ProcessSpec(
            name,
            config.path / "logs" / f"{demand.file_stem}.log",
            partial(self._choose_start_builder(name), demand),
            env={**self._build_variables(demand), **self._build_sharing_variables(name), **self.secret_env},
            ready_timeout=config.launch.startup_timeout,
            num_ranks=demand.num_ranks,
            placement=PlacementRequest(
                partial(self.assignments.assign, name),
                demand.cores,
                demand.gpus,
                port=self.source_ports.get(_get_service(name), 0),
                lease=LeaseTerms(config.cluster.lease_duration * lease_factor),
            ),
        )
        if name == TRAINER:
            modules = () if self.uses_gpus else TRAINER_MODULES  # CUDA does not survive a fork
            return replace(spec, role=ProcessRole.FOLLOWER, preload_modules=modules)
        spec = replace(spec, service=_get_service(name))
        if name.startswith(ENV_PREFIX):
            return replace(spec, start_after=self.engine_names)
        is_forkable = not self.uses_gpus and isinstance(self._get_engine_config(name), EngineConfig)
        return replace(spec, preload_modules=ENGINE_MODULES if is_forkable else ())

    def _choose_start_builder(self, name: str) -> Callable[[ProcessDemand, ProcessSlot], ProcessStart]:
        if name == TRAINER:
            return self._build_trainer_start
        return self._build_env_server_start if name.startswith(ENV_PREFIX) else self._build_engine_start

    def _build_orchestrator_spec(self, demand: ProcessDemand) -> ProcessSpec:
        config, ports = self.config, self.reservation.format_ports()
        return ProcessSpec(
            ORCHESTRATOR,
            config.path / "logs" / "orchestrator.log",
            self._build_orchestrator_start,
            ProcessRole.LEADER,
            env={**self._build_variables(demand), RESERVED_PORTS_VARIABLE: ports, **self.secret_env},
            address=self.health_address,
            ready_timeout=2 * config.launch.startup_timeout,  # it waits for engines, then for env servers
            hang_timeout=config.launch.hang_timeout,
            last_state=lambda: describe_last_state(config.path),
            start_after=(*self.engine_names, *self.placement.list_names(ENV_PREFIX)),
        )

    def _build_run_config(self) -> RunConfig:
        """Return the configuration of the orchestrator, with the addresses that the processes have now."""
        config, services = self.config, self._list_services()
        inference = (
            {"inference": ExternalServersConfig(base_url=services[INFERENCE_KEY])} if INFERENCE_KEY in services else {}
        )
        models = {
            name: NamedModelConfig(name=model.name, base_url=services[f"{MODEL_PREFIX}{name}"])
            if model.is_managed
            else model
            for name, model in config.all_models.items()
        }

        def with_address(kind: str, source: SourceT) -> SourceT:
            addresses = services.get(f"{ENV_PREFIX}{kind}/{source.source_name}")
            return source.model_copy(update={"address": source.address or addresses})

        return config.model_copy(
            update={
                "name": config.path.name,
                "models": models,
                "train": [with_address("train", source) for source in config.train],
                "eval": [with_address("eval", source) for source in config.eval],
                "orchestrator": config.orchestrator.model_copy(
                    update={"address": self.address, "status_address": self.status_address}
                ),
                "cluster": ClusterConfig(shared_directory=config.cluster.shared_directory),
                **inference,
            }
        )

    # -- starts --------------------------------------------------------------------------------------------------------

    def _build_orchestrator_start(self, _slot: ProcessSlot) -> ProcessStart:
        file = self.config.path / "configs" / "orchestrator.toml"
        write_toml(_with_default_pools(self._build_run_config()), file)
        return ProcessStart((*RAMIFY_COMMAND, "orchestrator", "@", str(file)), address=self.health_address)

    def _build_engine_start(self, demand: ProcessDemand, slot: ProcessSlot) -> ProcessStart:
        """Return the start of an engine, which serves the newest weights, or of the engine of another model."""
        config, name, url = self.config, demand.name, f"http://{slot.host}:{slot.port}"
        if name.startswith(MODEL_PREFIX):
            model = config.all_models[name.removeprefix(MODEL_PREFIX)]
            table = build_model_serve_config(config, model, is_on_gpu=demand.gpus > 0)
        else:
            table = build_serve_config(config, is_trainer_on_gpu=self.is_trainer_on_gpu)
            if isinstance(config.inference, EngineConfig) and not is_beside_trainer(name, self.placement):
                table["inference"]["copy_from_trainer"] = False
            # Engines that fetch weights or apply adapters get the newest weights when they join the run.
            starts_from_base = config.weights.url is not None or publishes_adapters(config)
            weights = None if starts_from_base else link_newest_weights(config, demand.file_stem)
            table["model"] = {"name": config.model.name if weights is None else str(weights)}
        table["model"]["name"] = _make_absolute(table["model"]["name"])
        table["server"] |= {"host": slot.host, "port": slot.port, "shutdown_timeout": ATTEMPT_SHUTDOWN_TIMEOUT}
        is_vllm = isinstance(self._get_engine_config(name), VLLMConfig)
        if is_vllm:
            logs = self.config.path / "logs" if self._is_on_head(slot) else slot.directory
            table["inference"].setdefault("log_file", str(logs.absolute() / f"{demand.file_stem}-vllm.log"))
        self.addresses[name] = url
        start = self._build_start("serve", ServeConfig(**table), demand, slot, address=f"{url}/health")
        return replace(start, releases_port=is_vllm)

    def _build_env_server_start(self, demand: ProcessDemand, slot: ProcessSlot) -> ProcessStart:
        address = self.addresses[demand.name] = f"tcp://{slot.host}:{slot.port}"
        run_config, source_name = self._build_run_config(), _get_service(demand.name).removeprefix(ENV_PREFIX)
        kind, _, name = source_name.partition("/")
        source = next(source for source in getattr(self.config, kind) if source.source_name == name)
        update: dict[str, object] = {"address": address}
        if self.config.cluster.env_servers.cores is not None or not self.head.allows_sharing:
            update |= _limit_workers(source, demand.cores)
        served = {"train": [], "eval": [], kind: [source.model_copy(update=update)]}
        table = build_env_server_config(run_config.model_copy(update=served), source_name)
        table |= {"output": self._get_directory(slot), "log_file": STDOUT}
        table |= {"secret_env": self.config.secret_env} if self.secret_env else {}
        config = EnvServerConfig(
            **table,
            shutdown_timeout=ATTEMPT_SHUTDOWN_TIMEOUT,
            worker_startup_timeout=2 * self.config.launch.startup_timeout,
        )
        variables = {
            get_model_variable(model_name): f"{model.base_url[0]} {model.name}"
            for model_name, model in run_config.models.items()
        }
        return self._build_start("env-server", config, demand, slot, address=address, env=variables)

    def _build_trainer_start(self, demand: ProcessDemand, slot: ProcessSlot) -> ProcessStart:
        table, directory = build_trainer_config(self.config), self._get_directory(slot)
        table |= {"output": directory.parent if self._is_on_head(slot) else directory, "address": self.address}
        table["model"] |= {"name": _make_absolute(self.config.model.name)}
        record = ("--record", str(directory / "batches")) if self.config.record_batches else ()
        return self._build_start("trainer", TrainerProcessConfig(**table), demand, slot, arguments=record)

    def _build_start(
        self,
        command: str,
        config: Config,
        demand: ProcessDemand,
        slot: ProcessSlot,
        *,
        address: str = "",
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> ProcessStart:
        """Return the start of a command with its configuration in the slot's directory."""
        file = f"{demand.file_stem}.toml"
        return ProcessStart(
            (*RAMIFY_COMMAND, command, "@", str(slot.directory / file), *arguments),
            env or {},
            files={file: dump_toml(config)},
            address=address,
        )

    def _is_on_head(self, slot: ProcessSlot) -> bool:
        return slot.node in ("", self.head.name)

    def _get_directory(self, slot: ProcessSlot) -> Path:
        """Return the directory for what a process writes: the run directory, which only processes on the head reach."""
        return self.config.path.absolute() if self._is_on_head(slot) else slot.directory

    def _build_variables(self, demand: ProcessDemand) -> dict[str, str]:
        """Return the variables that limit a process to its cores, and those that the configuration sets."""
        return {**_build_thread_variables(demand.cores), **self.config.launch.env.get_variables(_get_role(demand.name))}

    def _build_sharing_variables(self, name: str) -> dict[str, str]:
        """Return variables for a trainer and engines on one GPU: engines wait during a step, and keep their memory."""
        others = self.engine_names if name == TRAINER else (TRAINER,)
        if name.startswith(ENV_PREFIX) or not any(self.placement.shares_gpu(name, other) for other in others):
            return {}
        variables = {TRAINING_LOCK_VARIABLE: str(self.config.path.resolve() / "training.lock")}
        if name == TRAINER:
            variables[RESERVED_MEMORY_VARIABLE] = str(self.placement.count_reserved_memory(name))
        return variables

    def _get_engine_config(self, name: str) -> EngineConfig | VLLMConfig | ExternalServersConfig:
        if name.startswith(MODEL_PREFIX):
            return self.config.all_models[name.removeprefix(MODEL_PREFIX)].inference
        return self.config.inference

    def _list_services(self) -> dict[str, list[str]]:
        """Return the addresses that are known, by service."""
        services: dict[str, list[str]] = {}
        for demand in self.placement.demands:
            if (address := self.addresses.get(demand.name)) is not None:
                services.setdefault(_get_service(demand.name), []).append(address)
        return services


def _build_thread_variables(threads: int) -> dict[str, str]:
    """Return the environment variables that limit a process to its cores; waits are passive."""
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "RAYON_NUM_THREADS": str(threads)}


def _limit_workers(source: ServedSourceConfig, cores: int) -> dict[str, object]:
    """Return the pool of a source with at most one worker per core, unless its size is configured."""
    if not isinstance(source.pool, ElasticPoolConfig) or source.pool.max_workers is not None:
        return {}
    return {"pool": source.pool.model_copy(update={"max_workers": max(cores, source.pool.min_workers)})}


def _with_default_pools(config: RunConfig) -> RunConfig:
    """Return the configuration with the default `pool`, because no other is allowed beside an `address`."""
    default = {"pool": ElasticPoolConfig()}
    train = [source.model_copy(update=default) for source in config.train]
    evals = [source.model_copy(update=default) for source in config.eval]
    return config.model_copy(update={"train": train, "eval": evals})


def _get_service(name: str) -> str:
    """Return the key of a process in the address book: `env/train/words` for `env/train/words/3`."""
    return name if name.startswith(MODEL_PREFIX) else name.rpartition("/")[0]


def _get_role(name: str) -> str:
    """Return the key of `launch.env` for the process with this name."""
    roles = {ENGINE_PREFIX: "engines", MODEL_PREFIX: "models", ENV_PREFIX: "env_servers"}
    return next((role for prefix, role in roles.items() if name.startswith(prefix)), name)


def _make_absolute(model_name: str) -> str:
    """Return the absolute path of a model in a directory, which must be on all nodes; any other name unchanged."""
    return str(Path(model_name).absolute()) if Path(model_name).is_dir() else model_name


def _list_external_services(config: RunConfig) -> list[tuple[str, str]]:
    """Return name and address of every service that the run uses but does not start."""
    services: list[tuple[str, str]] = []
    if isinstance(config.inference, ExternalServersConfig):
        services.append(("inference", ", ".join(config.inference.base_url)))
    services += [
        (f"{MODEL_PREFIX}{name}", ", ".join(model.base_url)) for name, model in config.models.items() if model.base_url
    ]
    for kind, sources in (("train", config.train), ("eval", config.eval)):
        services += [
            (f"env/{kind}/{source.source_name}", ", ".join(source.addresses)) for source in sources if source.addresses
        ]
    return services
