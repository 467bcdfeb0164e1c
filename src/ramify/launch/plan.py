"""The plan of a run: which processes, with what configuration, on which cores, GPUs and ports, and whether it fits.

Everything that can be known before a process starts is decided here, once, and can be read: `--dry-run` prints it. A
restart follows the same plan, so an address that was given out stays true.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ramify.cli.machine import usable_cores, usable_memory
from ramify.config import Config, refuse, write
from ramify.envserver.config import ElasticConfig, EnvServerConfig, Picked, ServedSourceConfig
from ramify.errors import ModelNotFound
from ramify.infer.config import EngineConfig, ExternalConfig, ModelConfig, ServeConfig, ServerConfig, VLLMConfig
from ramify.launch.devices import Gpu, Shares, share, visible_gpus
from ramify.launch.estimate import Model, Need, need_of
from ramify.launch.newest import newest_kept
from ramify.launch.ports import HOST, settled, source_ports
from ramify.launch.process import Entry, Role
from ramify.model.resolve import resolve
from ramify.orchestrate.config import EvalSourceConfig, RunConfig, RunSourceConfig, TrainSourceConfig
from ramify.train.service_config import ServiceConfig

GIB = 1 << 30
OWN_KEY = EnvServerConfig.model_fields["api_key_env"].default
ENDING = 2.0  # seconds that attempts in flight get when the run stops: they are run again anyway
ASSUMED = 80 * GIB  # the memory of a GPU that is not here
ROOM = 0.95  # share of a memory that may be planned for


@dataclass(frozen=True, slots=True)
class Plan:
    """What `ramify rl` is about to do."""

    config: RunConfig
    entries: tuple[Entry, ...]
    files: Mapping[Path, Config]
    """The configuration of each process, by its file."""
    shares: Shares
    model: Model | None
    need: Need | None
    status: str
    """Where the orchestrator says how the run is."""

    def write(self) -> None:
        """Write the configurations, the run's own and each process's."""
        write(self.config, self.config.path / "config.toml")
        for file, config in self.files.items():
            write(config, file)

    def lines(self) -> list[str]:
        """The plan for people."""
        lines = [f"run {self.config.path}: {self.config.model.name}, {self.config.max_steps} steps"]
        for entry in self.entries:
            lines += ["", f"{entry.name}: {self._share(entry)}", f"  {shlex.join(entry.command)}"]
            lines += [f"  at {entry.address}, log in {entry.log}" if entry.address else f"  log in {entry.log}"]
        outside = [f"{name}: {where}, which is neither started nor stopped" for name, where in _external(self.config)]
        return [*lines, *(["", *outside] if outside else []), "", *self._memory()]

    def _share(self, entry: Entry) -> str:
        named = {"inference": self.shares.inference, "trainer": self.shares.trainer}
        return str(named.get(entry.name, self.shares.rest))

    def _memory(self) -> list[str]:
        if self.model is None or self.need is None:
            return [f"memory: not known, {self.config.model.name} is not on this machine"]
        parts = {"inference": self.need.inference, "trainer": self.need.trainer, "everything else": self.need.rest}
        told = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in parts.items() if size)
        absent = any(gpu.memory is None for gpu in (*self.shares.inference.gpus, *self.shares.trainer.gpus))
        taken = f"; GPUs that are not here are taken as {ASSUMED / GIB:.0f} GiB" if absent else ""
        return [f"memory, roughly: {told}; {self.model.parameters:,} parameters, {self.model.known}{taken}"]


def plan_of(config: RunConfig, *, dry: bool = False, gpus: list[Gpu] | None = None) -> Plan:
    """The plan. Raises ConfigInvalid for what cannot be or does not fit, PortTaken for a port that is not free.

    A `dry` plan may be of a run for another machine: of GPUs and a model that are not here.
    """
    _check_model(config, dry=dry)
    shares = _shares(config, dry=dry, gpus=gpus)
    model = Model.of(config.model.name)
    need = _need(config, model, shares) if model else None
    if need is not None:
        _check_memory(need, shares)
    return _Planner(config, shares).plan(model, need)


class _Planner:
    """Puts the processes together."""

    def __init__(self, config: RunConfig, shares: Shares) -> None:
        self.config, self.path, self.shares = config, config.path, shares
        train, evals = source_ports(config.launch.base_port, len(config.train), len(config.eval))
        serve, orchestrator, status, *sources = settled([0, 0, 0, *train, *evals])
        self.served = f"http://{HOST}:{serve}"
        self.serve_port = serve
        self.orchestrator, self.status = f"tcp://{HOST}:{orchestrator}", f"http://{HOST}:{status}"
        kinds = [("train", source) for source in config.train] + [("eval", source) for source in config.eval]
        self.sources: list[tuple[str, RunSourceConfig, str]] = [
            (kind, source, source.address or f"tcp://{HOST}:{port}") for (kind, source), port in zip(kinds, sources)
        ]
        self.files: dict[Path, Config] = {}

    def plan(self, model: Model | None, need: Need | None) -> Plan:
        inference = self._inference()
        envs = [self._env(*one) for one in self.sources if one[1].address is None]
        names = tuple(entry.name for entry in (*inference, *envs))
        entries = (*inference, *envs, self._orchestrator(names), self._trainer())
        return Plan(self.config, entries, self.files, self.shares, model, need, self.status)

    @property
    def urls(self) -> list[str]:
        inference = self.config.inference
        return inference.base_url if isinstance(inference, ExternalConfig) else [self.served]

    def _inference(self) -> list[Entry]:
        config, inference = self.config, self.config.inference
        if isinstance(inference, ExternalConfig):
            return []
        if isinstance(inference, VLLMConfig) and inference.log == VLLMConfig().log:
            inference = inference.model_copy(update={"log": str(self.path / "logs" / "vllm.log")})
        if inference.max_model_len is None:
            inference = inference.model_copy(update={"max_model_len": config.seq_len})
        if inference.dtype == "auto":  # what is trained is what was sampled: both compute in the same type
            found = "bfloat16" if self.shares.trainer.gpus else "float32"
            dtype = found if config.trainer.dtype == "auto" else config.trainer.dtype
            inference = inference.model_copy(update={"dtype": dtype})
        renderer = {} if isinstance(inference, VLLMConfig) else {"renderer": config.renderer}
        server = ServerConfig(host=HOST, port=self.serve_port, model_name=config.model.name, shutdown=ENDING)
        served = ServeConfig(model=config.model, inference=inference, server=server, **renderer)
        file = self._file("inference", served)

        def prepare() -> None:
            """A restart serves the newest weights there are."""
            found = newest_kept(self.path)
            name = str(found.resolve()) if found is not None else config.model.name
            write(served.model_copy(update={"model": ModelConfig(name=name)}), file)

        return [
            Entry(
                "inference",
                _ramify("serve", "@", str(file)),
                self.path / "logs" / "inference.log",
                env=self.shares.inference.env,
                address=f"{self.served}/health",
                deadline=config.launch.start_deadline,
                prepare=prepare,
            )
        ]

    def _env(self, kind: str, source: RunSourceConfig, address: str) -> Entry:
        config, name = self.config, f"{kind}/{source.title}"
        told = {key: getattr(config.limited(source), key) for key in ServedSourceConfig.model_fields}
        served = ServedSourceConfig(**{**told, "name": source.title, "address": address})
        endpoint = source.endpoint
        model = config.model if endpoint is None or not endpoint.model else ModelConfig(name=endpoint.model)
        server = EnvServerConfig(
            train=[served] if kind == "train" else [],
            eval=[served] if kind == "eval" else [],
            source=name,
            model=model,
            renderer=config.renderer,
            inference=ExternalConfig(base_url=self.urls if endpoint is None else [endpoint.base_url]),
            output=self.path,
            grace=ENDING,
            api_key_env=OWN_KEY if endpoint is None else endpoint.api_key_env or "",
        )
        file = self._file(f"env-{kind}-{source.title.replace('/', '-')}", server)
        return Entry(
            f"env/{name}",
            _ramify("env-server", "@", str(file), "--source", name),
            Picked(name, served).log(self.path),
            env=self.shares.rest.env,
            address=address,
            after=() if isinstance(config.inference, ExternalConfig) else ("inference",),
            deadline=config.launch.start_deadline,
        )

    def _orchestrator(self, needs: tuple[str, ...]) -> Entry:
        file = self._file("orchestrator", self._addressed())
        return Entry(
            "orchestrator",
            _ramify("orchestrator", "@", str(file)),
            self.path / "logs" / "orchestrator.log",
            Role.LEADER,
            env=self.shares.rest.env,
            after=needs,
        )

    def _trainer(self) -> Entry:
        """It starts at once: loading a model takes as long for the trainer as for the engine."""
        config, gpus = self.config, len(self.shares.trainer.gpus)
        told = {name: getattr(config, name) for name in ("model", "seed", "trainer", "checkpoint", "weights")}
        place = {"name": self.path.name, "output": self.path.parent, "address": self.orchestrator}
        file = self._file("trainer", ServiceConfig(**told, **place))
        kept = ("--record", str(self.path / "batches")) if config.record else ()
        words = ("trainer", "@", str(file), *kept)
        spread = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m", "ramify")
        command = (sys.executable, "-m", *spread, *words) if gpus > 1 else _ramify(*words)
        log, env = self.path / "logs" / "trainer.log", self.shares.trainer.env
        return Entry("trainer", command, log, Role.FOLLOWER, env=env)

    def _addressed(self) -> RunConfig:
        """The run's configuration with the addresses of everything that listens."""
        train: list[TrainSourceConfig] = []
        evals: list[EvalSourceConfig] = []
        for _, source, address in self.sources:
            found = source.model_copy(update={"address": address, "pool": ElasticConfig()})
            if isinstance(found, TrainSourceConfig):
                train.append(found)
            elif isinstance(found, EvalSourceConfig):
                evals.append(found)
        told = {"address": self.orchestrator, "status": self.status}
        return self.config.model_copy(
            update={
                "name": self.path.name,
                "train": train,
                "eval": evals,
                "inference": ExternalConfig(base_url=self.urls),
                "orchestrator": self.config.orchestrator.model_copy(update=told),
            }
        )

    def _file(self, name: str, config: Config) -> Path:
        file = self.path / "configs" / f"{name}.toml"
        self.files[file] = config
        return file


def _ramify(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "ramify", *words)


def _external(config: RunConfig) -> list[tuple[str, str]]:
    inference = config.inference
    found = [("inference", ", ".join(inference.base_url))] if isinstance(inference, ExternalConfig) else []
    sources = [*(("train", source) for source in config.train), *(("eval", source) for source in config.eval)]
    return found + [(f"env/{kind}/{source.title}", source.address) for kind, source in sources if source.address]


def _check_model(config: RunConfig, *, dry: bool) -> None:
    try:
        resolve(config.model.name)
    except ModelNotFound as error:
        if not dry:
            refuse([("model.name", error.message)], cause=error)


def _shares(config: RunConfig, *, dry: bool, gpus: list[Gpu] | None) -> Shares:
    inference = config.inference
    device = inference.device if isinstance(inference, EngineConfig) else "auto"
    return share(
        usable_cores(),
        visible_gpus() if gpus is None else gpus,
        inference="none" if isinstance(inference, ExternalConfig) else device,
        trainer=config.trainer.device,
        mode=config.launch.gpus,
        trainer_gpus=config.launch.trainer_gpus,
        assume=dry,
    )


def _need(config: RunConfig, model: Model, shares: Shares) -> Need:
    gpus = shares.inference.gpus
    memory = (gpus[0].memory or ASSUMED) if gpus else usable_memory()
    return need_of(config, model, engine_gpu=bool(gpus), trainer_gpu=bool(shares.trainer.gpus), memory=memory)


def _check_memory(need: Need, shares: Shares) -> None:
    """Refuse a plan that some memory is too small for."""
    engine, trainer = shares.inference.gpus, shares.trainer.gpus
    asked: list[tuple[str, int, int | None]] = []
    if shares.shared:
        asked.append((f"GPU {engine[0].index}", need.inference + need.trainer, engine[0].memory))
    else:
        asked += [(f"GPU {gpu.index}", need.inference, gpu.memory) for gpu in engine]
        asked += [(f"GPU {gpu.index}", need.trainer, gpu.memory) for gpu in trainer]
    host = need.rest + (0 if engine else need.inference) + (0 if trainer else need.trainer)
    asked.append(("this machine", host, usable_memory()))
    problems = [
        ("launch", f"does not fit: {where} has {memory / GIB:.1f} GiB, the run needs about {size / GIB:.1f} GiB of it")
        for where, size, memory in asked
        if memory is not None and size > ROOM * memory
    ]
    if problems:
        refuse(problems)
