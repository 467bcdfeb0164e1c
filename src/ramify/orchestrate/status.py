"""The orchestrator's part of the state of a run, and the server that answers with it.

The state is progress, pending waits and metrics; building it only reads. `POST /stop` at the server stops the run.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ramify.core.names import format_count
from ramify.core.watchdog import WATCHDOG
from ramify.orchestrate.components import RunComponents
from ramify.processes.wire.browser_guard import BrowserGuard
from ramify.processes.wire.http_server import HttpServer
from ramify.processes.wire.server_pool import ServerState
from ramify.run.state import OrchestratorState, RunPhase, Wait
from ramify.run.store.group_state import GroupState
from ramify.run.store.ledger import Ledger

MIN_STORAGE_WAIT = 5.0  # seconds after which a call on storage is listed as a wait
REWARD_CURVE_POINTS = 40  # latest steps whose mean reward the state includes
MAX_SHOWN_FAILURES = 5
MAX_DESCRIBED_DROPS = 1000  # dropped groups that the state describes: reading all of a long run takes a second


def list_waits(run: RunComponents) -> list[Wait]:
    """Return what each component of the run waits for, since when, and with which timeout."""
    now, waits = time.monotonic(), list[Wait]()
    idle, stall_timeout = now - run.progress.last_progress_time, run.config.orchestrator.stall_timeout

    def add_wait(
        who: str, what: str, detail: str, *, since: float = idle, timeout: float | None = stall_timeout
    ) -> None:
        waits.append(Wait(who, what, round(since, 1), timeout, detail))

    for call in WATCHDOG.list_calls(min_seconds=MIN_STORAGE_WAIT):
        advice, limit = "check the disk and the mounts", WATCHDOG.get_limit(call)
        add_wait("orchestrator", f"the storage of {call.path}", advice, since=call.seconds, timeout=limit)
    admission, num_in_flight = run.core.admission, run.dispatcher.num_in_flight
    trainer_service, weight_updater = run.trainer_service, run.weight_updater
    acknowledged = run.core.ledger_progress.acknowledged
    if not run.dispatcher.weights_ready.is_set():
        add_wait("sampling", "the trainer's first weights", "the engines do not serve the current policy version")
    elif num_in_flight:
        add_wait("sampling", format_count(num_in_flight, "attempt"), run.dispatcher.describe_oldest_attempt())
    elif not admission.num_free_slots and not admission.is_finished:
        add_wait("sampling", "a free slot", f"{admission.num_active} of {admission.limits.slots} groups active")
    scoring_waits = list(run.dispatcher.reference_scorer.waits.values())
    for name in dict.fromkeys(name for name, _ in scoring_waits):
        starts = [since for other, since in scoring_waits if other == name]
        detail = f"for the scores of {format_count(len(starts), 'sampled group')}"
        add_wait("scoring", f"the model {name!r}", detail, since=now - min(starts))
    if not trainer_service.has_trainer:
        add_wait("orchestrator", "a trainer", "no trainer has connected")
    elif trainer_service.pending_request is not None:
        step, since = trainer_service.pending_request
        blocking = admission.get_blocking_groups()[:5]
        num_queued = format_count(run.core.attempt_queue.num_waiting, "queued attempt")
        detail = f"{num_queued}, groups {blocking} are not scored"
        add_wait("trainer", f"the batch of step {step}", detail, since=now - since)
    elif acknowledged < admission.next_step:
        add_wait("orchestrator", f"the trainer to finish step {acknowledged}", "")
    elif admission.is_finished and not trainer_service.is_finished:
        add_wait("orchestrator", f"the checkpoint of step {admission.next_step}", "the trainer has finished every step")
    if weight_updater.waiting_since is not None:
        detail = "an eval holds the weights" if weight_updater.is_held else "the engines are being updated"
        since = now - weight_updater.waiting_since
        add_wait("weights", "the engines to load a version", detail, since=since, timeout=None)
    for name, started_at in run.evaluator.started_at.items():
        add_wait(f"eval {name}", "its rollouts", "", since=now - started_at, timeout=None)
    num_calls = sum(load.num_running for load in run.client.loads.values())
    if num_in_flight and num_calls:
        urls = ", ".join(run.client.versions)
        add_wait("env servers", format_count(num_calls, "model call"), f"running on the engines at {urls}")
    for url, reason in run.client.down_replicas.items():
        add_wait("client", f"the engine at {url}", reason, timeout=None)
    for name, source in run.sources.items():
        for server in source.servers.servers:
            if server.state is ServerState.DOWN:
                add_wait(f"source {name}", f"its env server at {server.address}", server.reason, timeout=None)
    return waits


def build_state(run: RunComponents) -> OrchestratorState:
    """Return the state of this moment."""
    ledger_progress, progress, last = run.core.ledger_progress, run.progress, run.progress.latest_metrics
    rollouts, tokens = progress.get_throughput()
    done, steps, groups = ledger_progress.acknowledged, run.config.max_steps, run.ledger.count_by_state()
    steps_this_process = done - run.first_step
    seconds_per_step = (time.time() - run.started_at) / steps_this_process if steps_this_process > 0 else None
    version = run.weight_updater.served_version
    return OrchestratorState(
        run=str(run.config.path),
        step=done,
        max_steps=steps,
        state=get_phase(run),
        committed=ledger_progress.committed,
        incarnation=ledger_progress.incarnation,
        version=None if version is None else str(version),
        eta_s=None if seconds_per_step is None else seconds_per_step * (steps - done),
        reward=progress.mean_reward,
        is_teacher_reward=all(source.sampler_model is not None for source in run.config.train),
        reward_history=[*progress.reward_history[-REWARD_CURVE_POINTS:]],
        rollouts_per_s=rollouts,
        tokens_per_s=tokens,
        staleness={name: last.get(f"staleness/{name}") for name in ("mean", "max")},
        trainable=progress.trainable_counts,
        groups=groups,
        errors=list(progress.recent_failures)[-MAX_SHOWN_FAILURES:],
        failures=dict(progress.failure_counts),
        evals=dict(progress.evals),
        env_servers={
            name: [server.describe() for server in source.servers.servers] for name, source in run.sources.items()
        },
        waits=list_waits(run),
        dropped=describe_recent_drops(run.ledger, groups.get(GroupState.DROPPED.value, 0)),
    )


def describe_recent_drops(ledger: Ledger, total: int, limit: int = MAX_DESCRIBED_DROPS) -> str:
    """Describe why groups were dropped; of more than `limit` groups, only the last are read."""
    reasons = ledger.describe_drops(limit=limit)
    return f"{reasons} (the last {limit} of {total})" if total > limit else reasons


def get_phase(run: RunComponents) -> RunPhase:
    """Return what the orchestrator does. After the last step it is EVALUATING until the evals of that step end."""
    if run.stop_requested.is_set():
        return RunPhase.LEAVING
    if not run.trainer_service.is_finished:
        return RunPhase.RUNNING
    due_sources = run.evaluator.get_due_sources(run.core.ledger_progress.committed, is_last=True)
    return RunPhase.EVALUATING if run.evaluator.started_at or due_sources else RunPhase.FINISHED


def query_metrics(run: RunComponents, pattern: str) -> list[dict[str, Any]]:
    """Return the metrics whose names match; values that JSON cannot represent are returned as strings."""
    return [
        {**metric._asdict(), "value": metric.value if math.isfinite(metric.value) else str(metric.value)}
        for metric in run.run_log.metrics(pattern)
    ]


StatusHandler = Callable[[Request], Any]


def build_status_server(
    address: str, handlers: dict[str, StatusHandler], on_stop: Callable[[], None], *, allowed_hosts: Sequence[str] = ()
) -> HttpServer:
    """Build a server, not yet started, that answers GET requests with `handlers`, by path, as JSON.

    `POST /stop` calls `on_stop`; requests from web pages are rejected.
    """

    def make_route(path: str, handle: StatusHandler) -> Route:
        async def handler(request: Request) -> Response:
            return _respond(handle(request))

        return Route(path, handler, methods=["GET"])

    async def handle_stop(_: Request) -> Response:
        on_stop()
        return _respond({"stopping": True})

    routes = [make_route(path, handle) for path, handle in handlers.items()]
    app = Starlette(routes=[*routes, Route("/stop", handle_stop, methods=["POST"])])
    url = urlsplit(address)
    assert url.hostname is not None and url.port is not None  # the configuration was validated
    hosts = [url.hostname, *allowed_hosts]
    guarded = BrowserGuard(app, paths=["/stop"], hosts=hosts, config_key="orchestrator.allowed_hosts")
    return HttpServer(guarded, url.hostname, url.port, name="orchestrator.status_address")


def _respond(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
