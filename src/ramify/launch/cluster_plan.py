"""The launch plan of a run on a cluster: which node runs which process, and how each one is started there.

Supervisor, orchestrator and ledger are on the head. All other processes are started by the launcher, on the node of the
placement or, after that node was lost, on another one. So the address of a process is known only when it has a place,
and may change at each restart: the plan builds command and configuration of a process for its place. Env servers start
after engines have a place, and the orchestrator after both, so that they know the first addresses; they learn later
ones from the address book.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from ramify.core.config import Config, dump_toml, write_toml
from ramify.env.chat_client import get_model_variable
from ramify.infer.config import ExternalConfig, ModelConfig, NamedModelConfig, ServeConfig, VLLMConfig
from ramify.launch.cluster_demands import ENGINE_PREFIX, ORCHESTRATOR, TRAINER
from ramify.launch.cluster_placement import ClusterPlacement, place_run
from ramify.launch.devices import DeviceAllocation, Gpu
from ramify.launch.last_state import describe_last_state
from ramify.launch.launcher import ClusterNode, Placement, ProcessSlot, ProcessStart
from ramify.launch.memory import ModelSize
from ramify.launch.node_assignments import NodeAssignments
from ramify.launch.placement import ProcessDemand
from ramify.launch.plan import ATTEMPT_SHUTDOWN_TIMEOUT, SourceT, describe_run, with_default_pools
from ramify.launch.plan_notes import describe_step_size
from ramify.launch.ports import PortReservation
from ramify.launch.process import ProcessRole, ProcessSpec
from ramify.launch.process_configs import (
    build_env_server_config,
    build_model_serve_config,
    build_serve_config,
    build_trainer_config,
)
from ramify.launch.published_weights import link_newest_weights
from ramify.orchestrate.address_book import INFERENCE_KEY, MODEL_PREFIX
from ramify.orchestrate.cluster_config import ClusterConfig
from ramify.orchestrate.config import RunConfig
from ramify.processes.child import RAMIFY_COMMAND
from ramify.processes.wire.address import is_local
from ramify.processes.wire.listener import RESERVED_PORTS_VARIABLE
from ramify.rollout.envserver.config import ElasticPoolConfig, EnvServerConfig
from ramify.run.fencing.lease import LeaseTerms
from ramify.train.process_config import TrainerProcessConfig

ENV_PREFIX = "env/"
ENGINE_LEASE_FACTOR = 2  # engines take minutes to start, so they are given up later than other processes
ANY_GPU = Gpu("", "", None)  # the launcher chooses which GPUs a process sees
SECRET_BYTES = 32
STDOUT = Path("/dev/stdout")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The processes of a run on a cluster, and where they are started."""

    config: RunConfig
    process_specs: tuple[ProcessSpec, ...]
    placement: ClusterPlacement
    model: ModelSize | None
    """None if the size of the model is unknown."""
    status_address: str
    """Address of the status server."""
    reservation: PortReservation
    """Holds the ports of the orchestrator until the run ends."""

    def write(self) -> None:
        """Write the configuration of the run, and who runs where, to the run directory."""
        write_toml(self.config, self.config.path / "config.toml")
        lines = [describe_run(self.config), describe_step_size(self.config), *self.placement.format_lines(), ""]
        (self.config.path / "plan.txt").write_text("\n".join(lines), encoding="utf-8")


def build_cluster_plan(config: RunConfig, nodes: Sequence[ClusterNode]) -> ClusterPlan:
    """Build the plan of a run on these nodes. Raises ClusterTooSmall with all that does not fit, or ConfigInvalid."""
    placement = place_run(config, nodes)
    builder = _ClusterPlanBuilder(config, placement)
    return ClusterPlan(
        config=config,
        process_specs=tuple(builder.build_spec(demand) for demand in placement.demands),
        placement=placement,
        model=ModelSize.from_name(config.model.name),
        status_address=builder.status_address,
        reservation=builder.reservation,
    )


class _ClusterPlanBuilder:
    """Builds the specs of the processes, and remembers the address of each process that has a place."""

    def __init__(self, config: RunConfig, placement: ClusterPlacement) -> None:
        self.config, self.placement, self.demands = config, placement, placement.demands
        address = config.orchestrator.address
        if is_local(address):  # the ranks of the trainer connect to it from other nodes
            address = f"tcp://{placement.head.host}:{urlsplit(address).port}"
        self.reservation = PortReservation(
            {"orchestrator.address": address, "orchestrator.status_address": config.orchestrator.status_address}
        )
        self.address, self.status_address = self.reservation.addresses.values()
        self.assignments = NodeAssignments(placement.demands, placement.node_names)
        self.addresses: dict[str, str] = {}
        self.trainer_gpus = [ANY_GPU] * next(demand.gpus for demand in self.demands if demand.name == TRAINER)
        self.engine_names = self._list_names(ENGINE_PREFIX, MODEL_PREFIX)
        # Addresses that other machines can reach need a secret.
        self.secret_env = {config.secret_env: config.secret or secrets.token_hex(SECRET_BYTES)}

    def build_spec(self, demand: ProcessDemand) -> ProcessSpec:
        """Build the spec of a process."""
        config, name = self.config, demand.name
        if name == ORCHESTRATOR:
            return self._build_orchestrator_spec()
        lease_factor = ENGINE_LEASE_FACTOR if name in self.engine_names else 1
        terms = LeaseTerms(config.cluster.lease_duration * lease_factor)
        spec = ProcessSpec(
            name,
            (),
            config.path / "logs" / f"{name.replace('/', '-')}.log",
            ready_timeout=config.launch.startup_timeout,
            num_ranks=demand.num_ranks,
            placement=Placement(demand.cores, demand.gpus, partial(self.assignments.assign, name), terms),
        )
        if name == TRAINER:
            return replace(spec, role=ProcessRole.FOLLOWER, build_start=partial(self._build_trainer_start, demand))
        if name.startswith(ENV_PREFIX):
            return replace(
                spec,
                service=_get_service(name),
                start_after=self.engine_names,
                build_start=partial(self._build_env_server_start, demand),
            )
        return replace(spec, service=_get_service(name), build_start=partial(self._build_engine_start, demand))

    def _build_orchestrator_spec(self) -> ProcessSpec:
        config, file = self.config, self.config.path / "configs" / "orchestrator.toml"
        ports = self.reservation.format_ports("orchestrator.address", "orchestrator.status_address")
        return ProcessSpec(
            ORCHESTRATOR,
            (*RAMIFY_COMMAND, "orchestrator", "@", str(file)),
            config.path / "logs" / "orchestrator.log",
            ProcessRole.LEADER,
            env={RESERVED_PORTS_VARIABLE: ports, **self.secret_env},
            address=f"{self.status_address}/health",
            ready_timeout=2 * config.launch.startup_timeout,  # it waits for engines, then for env servers
            hang_timeout=config.launch.hang_timeout,
            last_state=lambda: describe_last_state(config.path),
            prepare=lambda: write_toml(with_default_pools(self._build_run_config()), file),
            start_after=(*self.engine_names, *self._list_names(ENV_PREFIX)),
        )

    def _build_run_config(self) -> RunConfig:
        """Return the configuration of the orchestrator, with the addresses that the processes have now."""
        config, services = self.config, self._list_services()
        inference = {"inference": ExternalConfig(base_url=services[INFERENCE_KEY])} if INFERENCE_KEY in services else {}
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
                "output": config.output.absolute(),
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

    def _build_engine_start(self, demand: ProcessDemand, slot: ProcessSlot) -> ProcessStart:
        """Return the start of an engine, which serves the newest weights, or of the engine of another model."""
        config, name, url = self.config, demand.name, f"http://{slot.host}:{slot.port}"
        if name.startswith(MODEL_PREFIX):
            model = config.all_models[name.removeprefix(MODEL_PREFIX)]
            inference, table = model.inference, build_model_serve_config(config, model, [ANY_GPU] * demand.gpus)
        else:
            inference, table = config.inference, build_serve_config(config, self.trainer_gpus)
            weights = link_newest_weights(config, name.replace("/", "-"))
            table["model"] = {"name": config.model.name if weights is None else str(weights)}
        table["model"]["name"] = _make_absolute(table["model"]["name"])
        table["server"] |= {"host": slot.host, "port": slot.port, "shutdown_timeout": ATTEMPT_SHUTDOWN_TIMEOUT}
        is_vllm = isinstance(inference, VLLMConfig)
        if is_vllm:
            table["inference"].setdefault("log_file", str(slot.directory / "vllm.log"))
        self.addresses[name] = url
        start = self._build_start("serve", ServeConfig(**table), demand, slot, address=f"{url}/health")
        return replace(start, releases_port=is_vllm)

    def _build_env_server_start(self, demand: ProcessDemand, slot: ProcessSlot) -> ProcessStart:
        address = self.addresses[demand.name] = f"tcp://{slot.host}:{slot.port}"
        run_config, source_name = self._build_run_config(), _get_service(demand.name).removeprefix(ENV_PREFIX)
        kind, _, name = source_name.partition("/")
        source = next(source for source in getattr(self.config, kind) if source.source_name == name)
        update: dict[str, object] = {"address": address}
        if isinstance(source.pool, ElasticPoolConfig) and source.pool.max_workers is None:
            update["pool"] = source.pool.model_copy(update={"max_workers": max(demand.cores, source.pool.min_workers)})
        served = {"train": [], "eval": [], kind: [source.model_copy(update=update)]}
        table = build_env_server_config(run_config.model_copy(update=served), source_name)
        table |= {"output": slot.directory, "secret_env": self.config.secret_env, "log_file": STDOUT}
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
        table = build_trainer_config(self.config)
        table |= {"output": slot.directory, "address": self.address}
        table["model"] = ModelConfig(name=_make_absolute(self.config.model.name)).model_dump()
        return self._build_start("trainer", TrainerProcessConfig(**table), demand, slot)

    def _build_start(
        self,
        command: str,
        config: Config,
        demand: ProcessDemand,
        slot: ProcessSlot,
        *,
        address: str = "",
        env: Mapping[str, str] | None = None,
    ) -> ProcessStart:
        """Return the start of a command with its configuration in the slot's directory."""
        file, variables = f"{command}.toml", DeviceAllocation(demand.cores).env
        del variables["CUDA_VISIBLE_DEVICES"]  # the launcher sets it
        python_path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        return ProcessStart(
            (*RAMIFY_COMMAND, command, "@", str(slot.directory / file)),
            {**variables, "PYTHONPATH": python_path, **self.secret_env, **(env or {})},
            files={file: dump_toml(config)},
            address=address,
        )

    def _list_names(self, *prefixes: str) -> tuple[str, ...]:
        return tuple(demand.name for demand in self.demands if demand.name.startswith(prefixes))

    def _list_services(self) -> dict[str, list[str]]:
        """Return the addresses that are known, by service."""
        services: dict[str, list[str]] = {}
        for name, address in list(self.addresses.items()):  # several threads build starts
            services.setdefault(_get_service(name), []).append(address)
        return services


def _get_service(name: str) -> str:
    """Return the key of a process in the address book: `env/train/words` for `env/train/words/3`."""
    return name if name.startswith(MODEL_PREFIX) else name.rpartition("/")[0]


def _make_absolute(model_name: str) -> str:
    """Return the absolute path of a model in a directory, which must be on all nodes; any other name unchanged."""
    return str(Path(model_name).absolute()) if Path(model_name).is_dir() else model_name
