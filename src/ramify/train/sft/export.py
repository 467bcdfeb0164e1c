"""Export of the best rollouts of a run as conversations that `ramify sft` trains on.

A row is one path of a trace, with its messages in OpenAI's format, the tools and the images. Beside each message are
the tokens that the engine saw and sampled, so SFT with the same tokenizer trains exactly these, and nothing is
tokenized again. A model with another tokenizer trains on the messages. A trace with branches becomes several rows, and
a message that is on several of them has the weight 0 on all but one.
"""

import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ramify.core.config import CONFIG_FILE
from ramify.core.errors import ConfigInvalid
from ramify.core.files import replace_file
from ramify.infer.dialects.chat_format import format_message
from ramify.infer.gateway.recorder import find_offered_tools
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.resolve import resolve_model_path
from ramify.run.store import RolloutRecord, RunStore
from ramify.run.store.export import ReportProgress
from ramify.trace import Media, Trace
from ramify.trace.trace import Branch
from ramify.train.sft.conversations import TOKENIZER_KEY, TOKENS_KEY, WEIGHT_KEY, MessageTokens

EVAL_PREFIX = "eval/"  # of the sources of a training run whose tasks are not trained on


def export_conversations(
    store: RunStore,
    path: Path,
    *,
    best: int = 1,
    min_reward: float | None = None,
    report_progress: ReportProgress | None = None,
) -> int:
    """Write the conversations of the best rollouts of each group to `path` as JSONL, and return their number.

    Raises ConfigInvalid if no rollout has such a reward, and ModelNotFound if the model of the run is not here.
    """
    tokenizer, count = Tokenizer(resolve_model_path(_read_model_name(store.path / CONFIG_FILE))).digest, 0
    rollouts = select_best(store, best, min_reward, report_progress)
    with replace_file(path) as partial_path, partial_path.open("wb") as file:
        for rollout in rollouts:
            for row in build_rows(store, rollout, tokenizer, min_reward):
                file.write(msgspec.json.encode(row) + b"\n")
                count += 1
        if not count:
            minimum = "" if min_reward is None else f" of at least {min_reward:g} (--min-reward)"
            raise ConfigInvalid(f"{store.path} has no rollout with a reward{minimum} and tokens that were sampled")
    return count


def _read_model_name(path: Path) -> str:
    """Return the name of the model in the configuration of a run."""
    try:
        return tomllib.loads(path.read_text("utf-8"))["model"]["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigInvalid(f"{path} does not name the model that sampled the rollouts: {error}") from error


def select_best(
    store: RunStore, best: int, min_reward: float | None, report_progress: ReportProgress | None = None
) -> list[RolloutRecord]:
    """Return the `best` rollouts of each group with at least `min_reward`; of equal rewards, the earlier rollouts.

    Rollouts of a training run's evals, without a reward, or with a system failure are left out.
    """
    ((total,),) = store.select("SELECT count(*) FROM rollouts")
    groups: defaultdict[tuple[str, str], list[RolloutRecord]] = defaultdict(list)
    for num_done, rollout in enumerate(store.iter_rollouts(), start=1):
        if report_progress is not None:
            report_progress(num_done, total)
        if rollout.reward is None or rollout.failure is not None or rollout.source.startswith(EVAL_PREFIX):
            continue
        if min_reward is None or rollout.reward >= min_reward:
            group = store.read_traces(rollout.id)[0].group or rollout.task
            groups[rollout.source, group].append(rollout)
    return [
        rollout
        for rollouts in groups.values()
        for rollout in sorted(rollouts, key=lambda rollout: (-(rollout.reward or 0.0), rollout.repetition))[:best]
    ]


def build_rows(
    store: RunStore, rollout: RolloutRecord, tokenizer: str, min_reward: float | None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a rollout. Of several agents, those with a lower reward of their own are left out."""
    for trace in store.read_traces(rollout.id):
        if min_reward is not None and trace.reward is not None and trace.reward < min_reward:
            continue
        media = {item.hash: store.images.read(item) for item in trace.graph.media}
        written: set[int] = set()  # nodes on earlier paths
        for leaf, trained in find_trained_paths(trace):
            messages = list(_build_messages(trace, leaf, trained, written, media))
            written.update(trace.graph.path_nodes(leaf))
            yield {
                "messages": messages,
                "tools": find_offered_tools(trace, leaf),
                TOKENIZER_KEY: tokenizer,
                "rollout": rollout.id,
                "agent": trace.agent,
                "source": rollout.source,
                "task": rollout.task,
                "reward": rollout.reward,
            }


def find_trained_paths(trace: Trace) -> list[tuple[int, set[int]]]:
    """Return the paths that end in a trainable reply without trainable replies after it, by their last node.

    With each path are the replies that it trains: those on it that no earlier path has.
    """
    trainable = trace.graph.nodes.view["trainable"]
    replies = [node for node in trace.sampled_nodes if trainable[node]]
    inner = {node for reply in replies for node in trace.graph.path_nodes(reply)[:-1]}
    paths: list[tuple[int, set[int]]] = []
    remaining = set(replies)
    for leaf in (reply for reply in replies if reply not in inner):
        trained = remaining.intersection(trace.graph.path_nodes(leaf))
        remaining -= trained
        paths.append((leaf, trained))
    return paths


def _build_messages(
    trace: Trace, leaf: int, trained: set[int], written: set[int], media: Mapping[str, Media]
) -> Iterator[dict[str, Any]]:
    """Yield the messages of a path in OpenAI's format, with their tokens.

    Only the replies in `trained` may be trained, and no message in `written`: another tokenizer may train other roles.
    """
    for node in Branch(trace, leaf).nodes:
        fields = format_message(node.message, media)
        if node.message.role == "assistant":
            fields[WEIGHT_KEY] = int(node.index in trained)
        elif node.index in written:
            fields[WEIGHT_KEY] = 0
        images = [(ref.part, ref.start, ref.stop) for ref in node.media]
        sampled = node.sampled_span if node.index in trained else None
        tokens = MessageTokens(node.token_ids.tolist(), sampled, images)
        yield {**fields, TOKENS_KEY: msgspec.to_builtins(tokens)}
