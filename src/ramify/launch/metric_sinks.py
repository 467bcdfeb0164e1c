"""Sinks for the metrics of a run, besides the run's own tables, and the samples they show.

The library of a sink is imported when it is opened.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ramify.env.task import compute_content_digest
from ramify.rollout.evals.stats import format_score
from ramify.run.store.image_store import ImageStore, elide_data_urls, format_content, label_images
from ramify.trace import Message, Trace

COLUMNS = ("source", "task", "task_data", "rollout", "branch", "reward", "advantage", "messages")
CONSOLE_METRICS = ("reward/all/mean", "train/loss", "train/grad_norm", "entropy", "mismatch_kl", "staleness/mean")
MAX_SAMPLE_CHARS = 2000  # of a sample on the console


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One branch of a rollout, as people read it."""

    source: str
    task: str  # the identity of the task
    task_data: str  # the task itself, as JSON; images are labels
    rollout: str  # the id of the rollout
    branch: int
    reward: float | None
    advantage: float | None
    messages: tuple[tuple[str, str], ...]  # (role, text) in order

    @property
    def row(self) -> tuple[str, str, str, str, int, float | None, float | None, str]:
        """The values of COLUMNS."""
        scores = (self.reward, self.advantage)
        return (self.source, self.task, self.task_data, self.rollout, self.branch, *scores, self.text)

    @property
    def text(self) -> str:
        """The conversation as one text."""
        return "\n".join(f"[{role}] {text}" for role, text in self.messages)


def build_samples(
    trace: Trace, *, source: str, advantage: float | None = None, images: ImageStore | None = None
) -> list[RolloutSample]:
    """Return one sample for each branch of a rollout; `images` is the image store of its run."""
    image_labels = label_images(trace, images)
    task = str(trace.task.get("key") or compute_content_digest(trace.task)) if trace.task else ""
    task_data = json.dumps(elide_data_urls(trace.task), ensure_ascii=False, default=str)
    return [
        RolloutSample(
            source=source,
            task=task,
            task_data=task_data,
            rollout=trace.id,
            branch=index,
            reward=trace.reward,
            advantage=advantage,
            messages=tuple((message.role, _format_message(message, image_labels)) for message in branch.messages),
        )
        for index, branch in enumerate(trace.branches)
    ]


def _format_message(message: Message, image_labels: Mapping[str, str]) -> str:
    parts = [f"[reasoning] {message.reasoning}"] if message.reasoning else []
    parts.append(format_content(message, image_labels))
    parts += [f"[tool call] {call.name}({call.arguments})" for call in message.tool_calls]
    return " ".join(part for part in parts if part)


class Sink(Protocol):
    """A destination of metrics and samples. It is used from one thread only, its own, and may raise anything."""

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step; a step may come several times, with different metrics."""
        ...

    def log_samples(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """Log a few rollouts of a step."""
        ...

    def close(self) -> None:
        """Write everything that is still buffered."""
        ...


class ConsoleSink:
    """Prints one line with the main metrics of a step, and samples as text."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Print the metrics of CONSOLE_METRICS and the mean rewards of evals on one line."""
        names = [
            name for name in values if name in CONSOLE_METRICS or (name.startswith("eval/") and name.endswith("/avg"))
        ]
        if names:
            self._print_line(f"step={step} " + " ".join(f"{name}={values[name]:.4g}" for name in names))

    def log_samples(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """Print one line per rollout, with its reward and advantage."""
        for sample in samples:
            values = f"reward={_format_value(sample.reward)} advantage={_format_value(sample.advantage)}"
            self._print_line(f"sample step={step} source={sample.source} rollout={sample.rollout} {values}")
            text = sample.text if len(sample.text) <= MAX_SAMPLE_CHARS else f"{sample.text[:MAX_SAMPLE_CHARS]}..."
            for line in text.splitlines():
                self._print_line(f"  {line}")

    def close(self) -> None:
        """Do nothing: each line is written at once."""


class _LibrarySink:
    """What Weights & Biases and Trackio share: a run that takes rows of metrics and tables. A resumed run continues."""

    def __init__(self, library: str, config: Mapping[str, Any], **options: Any) -> None:
        self._library = import_module(library)
        self._run = self._library.init(resume="allow", config=dict(config), **options)

    def log_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """Log the rollouts of a step as a table."""
        table = self._library.Table(columns=list(COLUMNS), data=[list(sample.row) for sample in samples])
        self.log_metrics(step, {"samples": table})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class WandbSink(_LibrarySink):
    """Weights & Biases. A resumed run continues the same wandb run.

    wandb drops a row whose step is lower than the last one's, and a run logs the training of step 7 after the rewards
    of step 8. Therefore every call is a row of its own, numbered by wandb, and the step of the run is a metric in that
    row, which wandb uses as the x axis of all others.
    """

    STEP_METRIC = "train/step"

    def __init__(
        self, name: str, directory: Path, config: Mapping[str, Any], *, project: str, entity: str | None
    ) -> None:
        super().__init__("wandb", config, project=project, entity=entity, name=name, id=name, dir=str(directory))
        self._run.define_metric(self.STEP_METRIC, hidden=True)
        self._run.define_metric("*", step_metric=self.STEP_METRIC)

    def log_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the metrics of a step."""
        self._run.log({self.STEP_METRIC: step, **values})


class TrackioSink(_LibrarySink):
    """Trackio. A resumed run continues the same Trackio run."""

    def __init__(self, name: str, config: Mapping[str, Any], *, project: str) -> None:
        super().__init__("trackio", config, project=project, name=name)


class TensorBoardSink:
    """Event files in a directory, written by tensorboard's own writer, which needs neither torch nor tensorflow."""

    def __init__(self, directory: Path) -> None:
        proto = "tensorboard.compat.proto"
        self._event = import_module(f"{proto}.event_pb2").Event
        self._summary = import_module(f"{proto}.summary_pb2").Summary
        self._metadata = import_module(f"{proto}.summary_pb2").SummaryMetadata
        self._tensor = import_module(f"{proto}.tensor_pb2").TensorProto
        self._shape = import_module(f"{proto}.tensor_shape_pb2").TensorShapeProto
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(directory))

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step as scalars."""
        self._add_event(step, [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.flush()  # otherwise a killed process loses the points of its last two minutes

    def log_samples(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """Write the rollouts of a step as a text table."""
        metadata = self._metadata(plugin_data=self._metadata.PluginData(plugin_name="text"))
        shape = self._shape(dim=[self._shape.Dim(size=1)])
        values: list[Any] = []
        for index, sample in enumerate(samples):
            rewards = f"reward {_format_value(sample.reward)}, advantage {_format_value(sample.advantage)}"
            text = f"{rewards}\n\n{sample.text}"
            tensor = self._tensor(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
            values.append(self._summary.Value(tag=f"samples/{sample.source}/{index}", metadata=metadata, tensor=tensor))
        self._add_event(step, values)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _add_event(self, step: int, values: list[Any]) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))


def _format_value(value: float | None) -> str:
    return "missing" if value is None else format_score(value)
