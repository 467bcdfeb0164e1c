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

from ramify.cli.machine import usable_cores
from ramify.config import Config, raise_config_invalid, write_toml
from ramify.envserver.config import ElasticPoolConfig, EnvServerConfig
from ramify.errors import ModelNotFound
from ramify.infer.config import EngineConfig, ExternalConfig, ModelConfig, ServeConfig, VLLMConfig
from ramify.launch.devices import Gpu, Share, Shares, share
from ramify.launch.estimate import Model, Need
from ramify.launch.fit import ASSUMED, GIB, check_memory, need_on, shares_of
from ramify.launch.last_state import describe_last_state
from ramify.launch.newest import newest_kept
from ramify.launch.parts import env_part, serve_part, trainer_part
from ramify.launch.ports import HOST, Reservation, source_addresses
from ramify.launch.process import Entry, Role
from ramify.model.resolve import fetch_model, resolve_model_path
from ramify.orchestrate.config import RunConfig, RunSourceConfig
from ramify.train.process_config import TrainerProcessConfig
from ramify.wire.listener import RESERVED_PORTS_VARIABLE

ENGINE = ("ramify.cli.serve", "ramify.infer.engine", "ramify.infer.server")  # what the commands load
TRAINER = ("ramify.cli.trainer", "ramify.train.remote_batch_source", "ramify.train.process")
ENDING = 2.0  # seconds that attempts in flight get when the run stops: they are run again anyway

Source = TypeVar("Source", bound=RunSourceConfig)


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
    orchestrator: str
    """Where the trainer finds the orchestrator."""
    status: str
    """Where the orchestrator says how the run is."""
    reservation: Reservation
    """Holds the ports of all processes until the run ends."""

    def write(self) -> None:
        """Write the configurations, the run's own and each process's, and the plan for people."""
        write_toml(self.config, self.config.path / "config.toml")
        (self.config.path / "plan.txt").write_text("\n".join([*self.lines(), ""]), encoding="utf-8")
        for file, config in self.files.items():
            write_toml(config, file)

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
    if config.monitor.sinks:
        from ramify.monitor import check_sinks  # brings numpy, and a run without sinks starts sooner

        check_sinks(config)
    shares = shares_of(config, dry=dry, gpus=gpus)
    model = Model.of(config.model.name)
    need = need_on(shares, config, model) if model else None
    if need is not None:
        check_memory(need, shares)
    return _Planner(config, shares).whole(model, need)


def orchestrator_plan(config: RunConfig) -> Plan:
    """The plan of an orchestrator that starts its env servers itself. Engines and the trainer are others' business."""
    shares = share(usable_cores(), [], inference="none", trainer="cpu", mode="auto")
    return _Planner(config, shares).orchestrator()


class _Planner:
    """Puts the processes together, every one with its part of the run's configuration.

    All start at once and wait for each other where they have to: loading takes as long for each of them.
    """

    def __init__(self, config: RunConfig, shares: Shares) -> None:
        self.config, self.path, self.shares = config, config.path, shares
        own = {"orchestrator.address": config.orchestrator.address, "orchestrator.status": config.orchestrator.status}
        engine = {} if isinstance(config.inference, ExternalConfig) else {"inference": f"http://{HOST}:0"}
        self.reservation = Reservation({**own, **engine, **source_addresses(config)})
        self.places = self.reservation.places
        if isinstance(config.inference, VLLMConfig):
            self.reservation.release("inference")  # vLLM binds its port without SO_REUSEPORT
        self.run = _addressed(config, self.places)
        self.files: dict[Path, Config] = {}

    def whole(self, model: Model | None, need: Need | None) -> Plan:
        """All that has no address yet."""
        return self._plan((*self._inference(), *self._envs(), self._orchestrator(), self._trainer()), model, need)

    def orchestrator(self) -> Plan:
        """The orchestrator, and the env servers that it needs."""
        return self._plan((*self._envs(), self._orchestrator()))

    def _plan(self, entries: tuple[Entry, ...], model: Model | None = None, need: Need | None = None) -> Plan:
        told = self.run.orchestrator
        return Plan(
            config=self.config,
            entries=entries,
            files=self.files,
            shares=self.shares,
            model=model,
            need=need,
            orchestrator=told.address,
            status=told.status,
            reservation=self.reservation,
        )

    def _inference(self) -> list[Entry]:
        if isinstance(self.config.inference, ExternalConfig):
            return []
        place = urlsplit(self.places["inference"])
        table = serve_part(self.config, self.shares.trainer.gpus)
        table["server"] |= {"host": place.hostname, "port": place.port, "shutdown": ENDING}
        if isinstance(self.config.inference, VLLMConfig):
            table["inference"].setdefault("log", str(self.path / "logs" / "vllm.log"))
        served = ServeConfig(**table)
        file = self._file("inference", served)
        weights = self.config.weights.directory_for(self.path)

        def prepare() -> None:
            """A restart serves the newest weights there are."""
            found = newest_kept(weights)
            name = str(found.resolve()) if found is not None else self.config.model.name
            write_toml(served.model_copy(update={"model": ModelConfig(name=name)}), file)

        return [
            Entry(
                "inference",
                _ramify("serve", "@", str(file)),
                self.path / "logs" / "inference.log",
                env=self._environment(self.shares.inference, "inference"),
                address=f"{self.places['inference']}/health",
                deadline=self.config.launch.start_deadline,
                prepare=prepare,
                loads=ENGINE if self._on_cpu and isinstance(self.config.inference, EngineConfig) else (),
            )
        ]

    def _envs(self) -> list[Entry]:
        return [self._env(name) for name in source_addresses(self.config)]

    def _env(self, name: str) -> Entry:
        deadline = self.config.launch.start_deadline
        server = EnvServerConfig(**env_part(self.run, name), grace=ENDING, boot_timeout=2 * deadline)
        picked = server.select_source()
        file = self._file(f"env-{picked.kind}-{picked.source_name.replace('/', '-')}", server)
        return Entry(
            f"env/{name}",
            _ramify("env-server", "@", str(file)),
            picked.log_path(self.path),
            env=self._environment(self.shares.rest, name),
            address=self.places[name],
            deadline=deadline,
        )

    def _orchestrator(self) -> Entry:
        file = self._file("orchestrator", _without_pools(self.run))
        return Entry(
            "orchestrator",
            _ramify("orchestrator", "@", str(file)),
            self.path / "logs" / "orchestrator.log",
            Role.LEADER,
            env=self._environment(self.shares.rest, "orchestrator.address", "orchestrator.status"),
            address=f"{self.places['orchestrator.status']}/health",
            deadline=2 * self.config.launch.start_deadline,  # it waits for engines, then for env servers
            hang_timeout=self.config.launch.hang_timeout,
            last_state=lambda: describe_last_state(self.path),
        )

    def _trainer(self) -> Entry:
        file = self._file("trainer", TrainerProcessConfig(**trainer_part(self.run)))
        kept = ("--record", str(self.path / "batches")) if self.config.record else ()
        words = ("trainer", "@", str(file), *kept)
        gpus = len(self.shares.trainer.gpus)
        spread = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m", "ramify")
        command = (sys.executable, "-m", *spread, *words) if gpus > 1 else _ramify(*words)
        log, env = self.path / "logs" / "trainer.log", self.shares.trainer.env
        loads = TRAINER if self._on_cpu else ()
        return Entry("trainer", command, log, Role.FOLLOWER, env=env, loads=loads)

    def _environment(self, share: Share, *listeners: str) -> dict[str, str]:
        """Return the environment variables of a process, with the ports that are reserved for it."""
        return {**share.env, RESERVED_PORTS_VARIABLE: self.reservation.ports(*listeners)}

    @property
    def _on_cpu(self) -> bool:
        """Whether nobody has a GPU, which belongs to whoever has touched it: what is forked could not."""
        return not self.shares.inference.gpus and not self.shares.trainer.gpus

    def _file(self, name: str, config: Config) -> Path:
        file = self.path / "configs" / f"{name}.toml"
        self.files[file] = config
        return file


def _addressed(config: RunConfig, places: Mapping[str, str]) -> RunConfig:
    """The run's configuration with the address of everything that listens."""

    def at(kind: str, source: Source) -> Source:
        return source.model_copy(update={"address": source.address or places[f"{kind}/{source.source_name}"]})

    own = {"address": places["orchestrator.address"], "status": places["orchestrator.status"]}
    engine = {"inference": ExternalConfig(base_url=[places["inference"]])} if "inference" in places else {}
    return config.model_copy(
        update={
            "name": config.path.name,
            "train": [at("train", source) for source in config.train],
            "eval": [at("eval", source) for source in config.eval],
            "orchestrator": config.orchestrator.model_copy(update=own),
            **engine,
        }
    )


def _without_pools(config: RunConfig) -> RunConfig:
    """As those see it who only ask: a server at an address has a pool of its own."""
    bare = {"pool": ElasticPoolConfig()}
    train = [source.model_copy(update=bare) for source in config.train]
    evals = [source.model_copy(update=bare) for source in config.eval]
    return config.model_copy(update={"train": train, "eval": evals})


def _ramify(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "ramify", *words)


def _external(config: RunConfig) -> list[tuple[str, str]]:
    inference = config.inference
    found = [("inference", ", ".join(inference.base_url))] if isinstance(inference, ExternalConfig) else []
    sources = [*(("train", source) for source in config.train), *(("eval", source) for source in config.eval)]
    return found + [(f"env/{kind}/{source.title}", source.address) for kind, source in sources if source.address]


def _check_model(config: RunConfig, *, dry: bool) -> None:
    try:
        find_model = resolve_model_path if dry else fetch_model
        find_model(config.model.name)
    except ModelNotFound as error:
        if not dry:
            raise_config_invalid([("model.name", error.message)], cause=error)
