"""What an orchestrator is connected to: engines, other models and env servers, at addresses that may change."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ramify.core.async_calls import cancel_all, fail_after
from ramify.core.errors import EngineIncompatible, Failure, ProviderError, RamifyError, RequestInvalid
from ramify.infer.client import ClientConfig, InferenceClient
from ramify.infer.client.generate_messages import decode_json
from ramify.infer.client.http_client import HttpClient, RequestFailed, send_request
from ramify.infer.config import NamedModelConfig
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.resolve import resolve_model_path
from ramify.orchestrate.address_book import INFERENCE_KEY, AddressBook, get_env_key, get_model_key
from ramify.orchestrate.connected_source import ConnectedSource, build_connected_source
from ramify.orchestrate.env_server_pool import EnvServerPool
from ramify.orchestrate.reference_scores import ScoreModel
from ramify.orchestrate.run_config import RunConfig, TrainSourceConfig
from ramify.rollout.envserver.messages import AddressUpdate
from ramify.rollout.evals.config import EvalSourceConfig
from ramify.run.state import OrchestratorState, RunPhase, Wait
from ramify.run.store.run_log import RunLog
from ramify.trace.version import PolicyVersion

REPORT_INTERVAL = 5.0  # seconds


class StartupReport:
    """The waits of an orchestrator that starts: in its log, in the run's events and in its state.

    The status server starts after all connections, so until then `ramify why` and the launcher read the file.
    `committed` is the step at which it starts. A wait is reported after `interval` seconds, and again after each
    further interval.
    """

    def __init__(
        self, config: RunConfig, run_log: RunLog, committed: int, *, interval: float = REPORT_INTERVAL
    ) -> None:
        self._config, self._run_log, self._committed, self._interval = config, run_log, committed, interval

    @contextlib.asynccontextmanager
    async def waiting_for(self, what: str, timeout: float | None = None) -> AsyncGenerator[None]:
        """Report `what` as long as the block runs, and after it if it raises; a short wait is not logged.

        `timeout` is the seconds that the wait may take; None if only its parts have timeouts.
        """
        self._write_state(Wait("orchestrator", what, 0.0, timeout))
        task = asyncio.create_task(self._report(what, timeout), name=f"report of the wait for {what}")
        try:
            yield
        finally:
            await cancel_all([task])
        self._write_state()  # if the block has raised, `ramify why` still finds what it waited for

    async def _report(self, what: str, timeout: float | None) -> None:
        started_at, is_logged = time.monotonic(), False
        while True:
            await asyncio.sleep(self._interval)
            seconds = time.monotonic() - started_at
            self._write_state(Wait("orchestrator", what, round(seconds, 1), timeout))
            if not is_logged:
                is_logged = True
                limit = "" if timeout is None else f" of {timeout:g} s"
                print(f"waiting for {what}: {seconds:.0f} s{limit}", flush=True)
                self._run_log.log_event("waiting", what=what, timeout=timeout)

    def _write_state(self, *waits: Wait) -> None:
        config = self._config
        with contextlib.suppress(OSError):  # a full disk is reported by the store, not here
            OrchestratorState(
                run=str(config.path),
                step=self._committed,
                max_steps=config.max_steps,
                state=RunPhase.STARTING,
                waits=list(waits),
            ).write(config.path)


PROBE_TIMEOUT = 60.0  # seconds for a server to tokenize a text
PROBE_TEXT = "The 13 quick foxes jump.\n\tdef f(x): return {x: 'naïve', 2**10}  # <b>北京</b> 🙂 élan ©"


async def connect_model(
    name: str,
    config: NamedModelConfig,
    model_dir: Path,
    stack: AsyncExitStack,
    *,
    timeout: float,
    must_score: bool,
    top_k: int = 0,
    address_book: AddressBook | None = None,
) -> InferenceClient:
    """Connect to the servers of a model, and check that it has the same tokens as the model in `model_dir`.

    With `must_score`, they must return logprobs of prompts too, and the `top_k` likeliest tokens of each position. The
    client follows the addresses in `address_book`. Raises ProviderError if no server answers within `timeout` seconds,
    or EngineIncompatible.
    """
    client = InferenceClient(config.base_url, ClientConfig(server_wait_timeout=timeout))
    if address_book is not None:
        address_book.subscribe(get_model_key(name), client.set_urls)
    try:
        await stack.enter_async_context(client)
        tokenizer = Tokenizer(model_dir)
        for url in client.joined_urls:
            await check_tokenizer(url, tokenizer)
        token_ids = tokenizer.encode(PROBE_TEXT).ids.tolist()
        if must_score and top_k:
            await client.score_top(token_ids, top_k, timeout=PROBE_TIMEOUT, start=1)
        elif must_score:
            await client.score(token_ids, timeout=PROBE_TIMEOUT, start=1)
    except RamifyError as error:
        raise type(error)(f"models.{name}: {error.message}") from error
    return client


async def check_tokenizer(url: str, tokenizer: Tokenizer) -> None:
    """Raise EngineIncompatible unless a server tokenizes as `tokenizer` does: a text, and every added token."""
    for text in (PROBE_TEXT, "".join(tokenizer.added_tokens)):
        expected, actual = tokenizer.encode(text).ids.tolist(), await _tokenize(url, text)
        if actual != expected:
            difference = next((i for i, pair in enumerate(zip(actual, expected)) if pair[0] != pair[1]), len(actual))
            raise EngineIncompatible(
                f"{url} has another tokenizer than {tokenizer.name}: they tokenize {text[:24]!r}... differently from "
                f"token {difference} on; use a model with the policy's tokenizer"
            )


async def _tokenize(url: str, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    try:
        async with (
            fail_after(PROBE_TIMEOUT, f"{url}/tokenize"),
            HttpClient(url, connect_timeout=PROBE_TIMEOUT, max_connections=1) as http,
        ):
            reply = decode_json(await send_request(http, "POST", "/tokenize", body), dict[str, Any], url)
            return [int(token_id) for token_id in reply["tokens"]]
    except RequestFailed as error:
        raise ProviderError(str(error)) from error
    except (ProviderError, RequestInvalid, KeyError, TypeError, ValueError) as error:
        raise EngineIncompatible(
            f"{url} does not tokenize a text, so tokenizers cannot be compared: {error}"
        ) from error


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
