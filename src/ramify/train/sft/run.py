"""An SFT run from its configuration to its weights: open the run, go on where it was left, learn, save, publish.

Everything a step depends on is in the checkpoint before it and in the seed: weights, optimizer, and the position in the
stream of examples. A run that is killed therefore repeats its last steps exactly, and its curve is the one it would
have had.
"""

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ramify.config import parse_section, write_toml
from ramify.errors import RamifyError, StorageFull
from ramify.interactive import AwaitableResult, is_watched, keys_of, name_model
from ramify.model.resolve import fetch_model
from ramify.store import RunStore, open_run, wrap_storage_errors
from ramify.store.ledger import Ledger
from ramify.store.run_log import RunLog, read_metrics_by_step
from ramify.trace import Forest
from ramify.train.batches import Batch, Laying, lay_out, shares
from ramify.train.build import build_trainer, choose_trainer_dtype, laying_of
from ramify.train.checkpoint import Checkpoints
from ramify.train.parallel import Ranks, joined
from ramify.train.publish import Publisher
from ramify.train.sft.chats import Chat
from ramify.train.sft.config import SftConfig
from ramify.train.sft.display import Display, Pace, Quiet, choose
from ramify.train.sft.examples import forest_of
from ramify.train.sft.plan import Plan, plan_of
from ramify.train.sft.stream import chunks
from ramify.train.step import Running, Trainer

WRITING = 60.0  # seconds until what was queued for the run's tables has to be there
AHEAD = {"cpu": 0, "cuda": 1}  # steps begun before the metrics of one are asked for: a GPU should find the next waiting


@dataclass(frozen=True, slots=True)
class Result(AwaitableResult):
    """Where a run stands when it returns."""

    path: Path
    steps: int
    ran: int
    """How many of the steps ran now."""
    weights: Path | None
    """The finished model; None if the run was stopped before its end."""

    def table(self) -> list[dict[str, Any]]:
        """Return the metrics of each step as a plain dict, as `pandas.DataFrame` takes them."""
        return read_metrics_by_step(self.path)


def sft(
    config: SftConfig | Mapping[str, Any] | None = None,
    *,
    fresh: bool = False,
    display: Display | None = None,
    **settings: Any,
) -> Result:
    """Teach a model conversations, or go on. `config` is a table of settings, `settings` are further keys of it.

    `data` may be the path of a file. It may be called where an event loop runs (in a notebook), plainly or with
    `await`, and blocks in both cases.
    """
    if isinstance(config, SftConfig) and not settings:
        checked = config
    else:
        given = keys_of(config) if isinstance(config, SftConfig) else config or {}
        table = name_model({**given, **settings})
        if isinstance(table.get("data"), str | Path):
            table["data"] = {"path": str(table["data"])}
        checked = parse_section(SftConfig, table, key="sft")
    return train(checked, fresh=fresh, display=display or (choose() if is_watched() else Quiet()))


def train(config: SftConfig, *, fresh: bool = False, display: Display | None = None) -> Result:
    """Run, or go on. Every rank calls it; the first one writes and shows."""
    fetch_model(config.model.name)
    plan = plan_of(config)
    with joined(config.trainer) as ranks, contextlib.ExitStack() as stack:
        shown = stack.enter_context(display if display is not None and ranks.first else Quiet())
        store: RunStore | None = None
        with ranks.together():
            if ranks.first:
                store = stack.enter_context(open_run(plan.path, plan.identity, fresh=fresh))
                with wrap_storage_errors(plan.path):
                    write_toml(config, plan.path / "config.toml")
                Ledger.open(store)
        stop = stack.enter_context(_stopping())
        return _Run(config, plan, ranks, store, shown, stop).go()


class _Run:
    """One process's part of a run."""

    def __init__(
        self, config: SftConfig, plan: Plan, ranks: Ranks, store: RunStore | None, display: Display, stop: "_Stop"
    ) -> None:
        self.config, self.plan, self.ranks, self.display, self.stop = config, plan, ranks, display, stop
        self.journal = RunLog(store) if store is not None else None
        self.recorded: Future[None] | None = None
        self.checkpoints = Checkpoints(plan.path / "checkpoints", ranks, warn=display.say)
        self.done = ranks.told(self.checkpoints.newest())
        self.seen = int(self.checkpoints.note(self.done)["seen"]) if self.done else 0
        self.total = plan.steps(config, self.done, self.seen)
        self.cut = 0

    def go(self) -> Result:
        """All steps that are missing, then the weights."""
        config, plan, begun = self.config, self.plan, self.done
        publisher = Publisher(
            plan.path / "weights",
            self.ranks,
            policy=plan.path.name,
            base=plan.model,
            dtype=choose_trainer_dtype(config.trainer, self.ranks).dtype,
        )
        if self.done >= self.total and (path := publisher.path(0, self.done)).exists():
            return Result(plan.path, self.done, 0, path)
        trainer = build_trainer(
            plan.model, config.trainer, self.ranks, steps=self.total, seed=config.seed, tell=self.display.say
        )
        if begun:
            self.checkpoints.load(trainer, begun)
            self.display.say(f"going on after step {begun} from {self.checkpoints.path(begun)}")
        self._learn(trainer)
        if self.cut:
            self.display.say(f"{self.cut} tokens to learn lay beyond seq_len = {config.seq_len} and were cut off")
        if self.done < self.total:
            return Result(plan.path, self.done, self.done - begun, None)
        published = publisher.publish(trainer, 0, self.done)
        self.display.say(f"wrote {published.path} in {published.seconds:.1f} s")
        return Result(plan.path, self.done, self.done - begun, published.path)

    def _learn(self, trainer: Trainer) -> None:
        config, pace = self.config, Pace(self.done, self.total)
        laying = laying_of(trainer)
        if not self.done:
            self._measure(trainer, laying)
        begun: deque[tuple[_Lesson, Running]] = deque()
        while self.done < self.total:
            with self._telling(begun, pace, alike=RamifyError), self.ranks.together():
                lesson = self._lesson(laying)
            with self._telling(begun, pace):
                begun.append((lesson, trainer.begin(lesson.share)))
            self.done, self.seen, self.cut = self.done + 1, lesson.seen, self.cut + lesson.cut
            stopped = any(self.ranks.all(self.stop.asked))
            last = self.done == self.total
            measured = last or self.done % config.validation.interval == 0
            saved = last or stopped or self.done % config.checkpoint.interval == 0
            while len(begun) > (0 if measured or saved else AHEAD[trainer.device.type]):
                self._tell(*begun.popleft(), pace)
            if measured:
                self._measure(trainer, laying)
            if saved:
                self._save(trainer, must=last or stopped)
            if stopped:
                return

    def _lesson(self, laying: Laying) -> "_Lesson":
        """What the next step learns."""
        chosen = self.plan.stream.take(self.seen, self.config.batch_size)
        forest = self._forest([(f"{self.seen + at}", self.plan.chats[each]) for at, each in enumerate(chosen)])
        share = shares(self._batch(forest, laying), laying, self.ranks.size)[self.ranks.rank]
        return _Lesson(
            share, self.seen + len(chosen), forest.dropped.num_truncated_tokens
        )  # of a forest that may have no packs

    def _tell(self, lesson: "_Lesson", running: Running, pace: Pace) -> None:
        """Record and show a step that was begun, when it is done."""
        metrics = running.metrics()
        pace.add(metrics.seconds)
        self._record(metrics.step, {**metrics.named(), "data/examples": lesson.seen, "data/cut_tokens": lesson.cut})
        self.display.step(metrics, pace)

    @contextlib.contextmanager
    def _telling(
        self, begun: "deque[tuple[_Lesson, Running]]", pace: Pace, alike: type[Exception] | None = None
    ) -> Iterator[None]:
        """Record the steps that were begun before one that cannot be. Several ranks do so together, thus only if that
        one fails on all of them as `alike`: a rank that fails in a step leaves the others waiting in the step."""
        try:
            yield
        except Exception as failure:
            together = self.ranks.size == 1 or (alike is not None and isinstance(failure, alike))
            for lesson, running in begun if together else ():
                try:
                    self._tell(lesson, running, pace)
                except Exception as error:  # noqa: BLE001 - the GPU may be what has failed; the first failure leaves
                    said = f"{type(error).__name__}: {error}"
                    failure.add_note(f"and step {lesson.share.step}, begun before it, cannot be told: {said}")
            raise

    def _forest(self, named: Sequence[tuple[str, Chat]]) -> Forest:
        return forest_of(named, self.plan.renderer, self.config.data.roles, self.config.seq_len)

    def _batch(self, forest: Forest, laying: Laying) -> Batch:
        return Batch.of(self.done, lay_out([forest], laying.pack_tokens, laying.layout))

    def _measure(self, trainer: Trainer, laying: Laying) -> None:
        """The mean loss of the conversations that are not learned, under the weights as they are."""
        loss = entries = 0.0
        for places in chunks(range(len(self.plan.validation)), self.config.batch_size):
            batch = self._batch(self._forest([(str(at), self.plan.validation[at]) for at in places]), laying)
            share = shares(batch, laying, self.ranks.size)[self.ranks.rank]
            with torch.no_grad():
                seen = [trainer.policy(trainer.row(pack), dict.fromkeys(batch.counts, 1)) for pack in share.packs]
            loss += sum(float(each.terms.get("ce", 0.0)) for each in seen)
            entries += batch.counts["ce"]
        if entries:
            loss = sum(self.ranks.all(loss)) / entries
            self._record(self.done, {"validation/loss": loss})
            self.display.say(f"validation loss {loss:.4f} after {self.done} steps")

    def _record(self, step: int, values: Mapping[str, float]) -> None:
        if self.journal is not None:
            self.recorded = self.journal.log_metrics(step, values)

    def _save(self, trainer: Trainer, *, must: bool) -> None:
        """A checkpoint. Where there is no room for one the run goes on, unless it ends here."""
        try:
            with self.ranks.together():
                if self.recorded is not None:
                    self.recorded.result(WRITING)  # the curve up to here is part of what is saved
            self.checkpoints.save(trainer, self.done, {"seen": self.seen})
        except StorageFull as error:
            if must:
                raise
            self.display.say(f"{error.name}: {error.message}; training goes on without this checkpoint")
            return
        self.checkpoints.keep_last(self.config.checkpoint.keep_last)


class _Lesson(NamedTuple):
    """What a step learns."""

    share: Batch  # this rank's part
    seen: int  # conversations that have been taken when it is done
    cut: int  # tokens to learn that were beyond the length of a sequence


@dataclass(slots=True)
class _Stop:
    """Whether somebody wants the run to end early."""

    asked: bool = False


@contextlib.contextmanager
def _stopping() -> Iterator[_Stop]:
    """SIGINT and SIGTERM end the run after the step that runs, with a checkpoint."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(*_: object) -> None:
        stop.asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
