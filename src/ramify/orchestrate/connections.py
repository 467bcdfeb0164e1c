"""What an orchestrator is connected to: engines, other models and env servers, at addresses that may change."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from ramify.core.errors import Failure
from ramify.infer.client import ClientConfig, InferenceClient
from ramify.model.resolve import resolve_model_path
from ramify.orchestrate.address_book import INFERENCE_KEY, AddressBook, get_env_key, get_model_key
from ramify.orchestrate.config import EvalSourceConfig, RunConfig, TrainSourceConfig
from ramify.orchestrate.connected_source import ConnectedSource, build_connected_source
from ramify.orchestrate.env_server_pool import EnvServerPool
from ramify.orchestrate.named_models import connect_model
from ramify.orchestrate.reference_scores import ScoreModel
from ramify.orchestrate.startup_report import StartupReport
from ramify.rollout.envserver.messages import AddressUpdate
from ramify.trace.version import PolicyVersion


class RunConnections:
    """The connections of one run. Call `open` once; they are closed with the stack.

    `on_lost` gets the origin and the failure of each env server that is lost.

    Attributes:
        client: the client of the engines.
        model_clients: clients of the other models that the orchestrator calls, by the name of the model.
        score_models: the models that score rollouts, by source.
        train, evals: the sources by name.
    """

    def __init__(
        self,
        config: RunConfig,
        engine_urls: Sequence[str],
        version: PolicyVersion,
        report: StartupReport,
        on_lost: Callable[[str, Failure], None],
    ) -> None:
        self._config, self._report, self._on_lost = config, report, on_lost
        client_config = ClientConfig(server_wait_timeout=config.launch.startup_timeout)
        self.address_book = AddressBook(config.path)
        self.client = InferenceClient(engine_urls, client_config, version=version)
        self.model_clients: dict[str, InferenceClient] = {}
        self.score_models: dict[str, ScoreModel] = {}
        self.train: dict[str, ConnectedSource] = {}
        self.evals: dict[str, ConnectedSource] = {}

    async def open(self, stack: AsyncExitStack) -> None:
        """Connect to everything, and report what is waited for."""
        await stack.enter_async_context(self.address_book)
        self.address_book.subscribe(INFERENCE_KEY, self.client.set_urls)
        what = f"the engines at {', '.join(self.client.urls)}"
        async with self._report.waiting_for(what, self._config.launch.startup_timeout):
            await stack.enter_async_context(self.client)
        self.score_models = await self._connect_score_models(stack)
        for source in self._config.train:
            self.train[source.source_name] = await self._connect_source("train", source, stack)
        for source in self._config.eval:
            self.evals[source.source_name] = await self._connect_source("eval", source, stack)

    @property
    def sources(self) -> dict[str, ConnectedSource]:
        """The train sources by name, and the eval sources by `eval/NAME`."""
        return {**self.train, **{f"eval/{name}": source for name, source in self.evals.items()}}

    def get_watched_services(self) -> dict[str, AddressBook | InferenceClient | EnvServerPool]:
        """Return everything that watches servers or files in tasks of its own, by name."""
        return {
            "addresses": self.address_book,
            "engines": self.client,
            **{f"model {name}": client for name, client in self.model_clients.items()},
            **{f"env servers of {name}": source.servers for name, source in self.sources.items()},
        }

    async def _connect_score_models(self, stack: AsyncExitStack) -> dict[str, ScoreModel]:
        """Check the models that score or sample rollouts, and return those that score, by source.

        Raises what `connect_model` raises.
        """
        timeout = self._config.launch.startup_timeout
        sources, models = self._config.train, self._config.all_models
        score_names = {source.source_name: source.score_model for source in sources if source.score_model in models}
        sampler_names = [source.sampler_model for source in sources if source.sampler_model]
        scorers: dict[str, ScoreModel] = {}
        for name in dict.fromkeys([*score_names.values(), *sampler_names]):
            model_dir, is_scorer = resolve_model_path(self._config.model.name), name in score_names.values()
            top_k = max([source.top_k for source in sources if source.score_model == name], default=0)
            what = f"models.{name} at {', '.join(models[name].base_url)}"
            async with self._report.waiting_for(what, timeout):
                self.model_clients[name] = client = await connect_model(
                    name,
                    models[name],
                    model_dir,
                    stack,
                    address_book=self.address_book,
                    timeout=timeout,
                    must_score=is_scorer,
                    top_k=top_k,
                )
            scorers[name] = ScoreModel(name, client, timeout)
        return {source: scorers[name] for source, name in score_names.items()}

    async def _connect_source(
        self, kind: str, source: TrainSourceConfig | EvalSourceConfig, stack: AsyncExitStack
    ) -> ConnectedSource:
        """Connect to the env servers of a source, at the addresses of the address book if it has them."""
        name, timeout = source.source_name, self._config.launch.startup_timeout
        origin = name if kind == "train" else f"{kind}/{name}"
        servers = EnvServerPool(
            name,
            source.addresses,
            self._config.secret,
            start_timeout=timeout,
            get_update=lambda: self._build_address_update(source),
            on_lost=lambda failure: self._on_lost(origin, failure),
        )
        self.address_book.subscribe(get_env_key(kind, name), servers.set_addresses)
        async with self._report.waiting_for(f"the env servers of {origin}", timeout):
            await stack.enter_async_context(servers)
        async with self._report.waiting_for(f"the tasks of {origin}"):
            return await build_connected_source(source, servers)

    def _build_address_update(self, source: TrainSourceConfig | EvalSourceConfig) -> AddressUpdate | None:
        """Return what the env servers of a source must know of the address book; None if the run has none.

        An engine is listed once it serves the weights of the others.
        """
        addresses = self.address_book.addresses
        if addresses is None:
            return None
        models = {name: addresses[key] for name in self._config.models if (key := get_model_key(name)) in addresses}
        sampler_model = source.sampler_model if isinstance(source, TrainSourceConfig) else None
        if source.endpoint is not None:
            return AddressUpdate(None, models)
        return AddressUpdate(self.client.joined_urls if sampler_model is None else models.get(sampler_model), models)
