"""The tokens of a rollout with the measures of each: logprobs, entropies, policy versions, advantages."""

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ramify.core.errors import RamifyError
from ramify.model.render.tokenizer import Tokenizer
from ramify.model.resolve import resolve_model_path
from ramify.trace import Annotation, Node, Trace
from ramify.train.token_stats import TokenStats
from ramify.view.training_record import GroupTraining

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
WORD_BOUNDARY = "▁"  # how tokenizers of the SentencePiece kind write a space


class TokenTexts:
    """Returns the texts of single token ids. Without a tokenizer, a text is the id in angle brackets.

    Each token becomes the bytes that it stands for, and the bytes are decoded in order: spaces at the beginning are
    kept, and a split character appears at the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes_by_id: dict[int, bytes] = {}
        self._is_byte_level = tokenizer is not None and "ByteLevel" in str(tokenizer.backend.decoder)

    @classmethod
    def load(cls, model: str) -> "TokenTexts":
        """Load the tokenizer of a model, if it is on this machine."""
        try:
            return cls(Tokenizer(Path(resolve_model_path(model))))
        except (RamifyError, OSError, RuntimeError, ValueError):  # the configuration of a run may hold any name
            return cls(None)

    def decode(self, token_ids: Iterable[int]) -> list[str]:
        """Return one text per token; together they are the text of all tokens.

        The last text shows the bytes of a character that no token completes as a replacement character.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self._get_bytes(id)) for id in token_ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def _get_bytes(self, id: int) -> bytes:
        data = self._bytes_by_id.get(id)
        if data is None:
            data = self._bytes_by_id[id] = self._to_bytes(id)
        return data

    def _to_bytes(self, id: int) -> bytes:
        token = None if self._tokenizer is None or id < 0 else self._tokenizer.id_to_token(id)
        if self._tokenizer is None or token is None:
            return f"⟨{id}⟩".encode()
        if token in self._tokenizer.added_tokens:
            return token.encode()
        if self._is_byte_level:
            return b"".join(BYTE_BY_CHARACTER.get(character, character.encode()) for character in token)
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(WORD_BOUNDARY, " ").encode()


def _map_bytes() -> dict[str, bytes]:
    """Return the byte of each character in the vocabulary of a byte-level tokenizer.

    Printable bytes stand for themselves; the others are numbered from character 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


BYTE_BY_CHARACTER = _map_bytes()


FloatArray = npt.NDArray[np.float64]
DIGITS = 4  # of values sent to the page
NUM_EXTREMES = 6  # tokens of a measure that are named

MEASURES: Mapping[str, str] = {
    "reward_change": (
        "mean reward of the attempts with the same tokens up to and including this one, minus the mean reward of those "
        "with the same tokens before it"
    ),
    "advantage": "how much better the rollout was than its group; the policy gradient is weighted with it",
    "logprob": "log probability that the sampler gave the token",
    "entropy": "entropy of the distribution of the trainer at the token, in nats",
    "mismatch": "log probability of the token by the trainer minus by the sampler",
    "reference_kl": "log probability of the token by the policy minus by the teacher or reference model",
    "version": "step of the weights that sampled the token",
    "weight": "weight of the token in the loss; a token of weight 0 is masked",
}


class TokenMeasures:
    """The measures of the tokens of one trace.

    `training` is what the ledger knows of its group. `reward_changes` come from `compute_reward_changes`, by node.
    `token_stats` are the trainer's values of the trace, if the run recorded them.
    """

    def __init__(
        self,
        trace: Trace,
        training: GroupTraining | None,
        reward_changes: Mapping[int, FloatArray],
        token_stats: TokenStats | None,
    ) -> None:
        self.trace, self._training = trace, training
        self._reward_changes, self._token_stats = reward_changes, token_stats

    def list_measures(self, texts: TokenTexts) -> list[dict[str, Any]]:
        """Return the measures that the trace has, with their range and the tokens that stand out most."""
        columns: dict[str, list[tuple[int, FloatArray]]] = {}
        for index in self.trace.sampled_nodes:
            for name, values in self.compute_values(self.trace.nodes[index]).items():
                columns.setdefault(name, []).append((index, values))
        return [
            {"name": name, "description": MEASURES[name], **self._summarize(name, columns[name], texts)}
            for name in MEASURES
            if name in columns and any(np.isfinite(values).any() for _, values in columns[name])
        ]

    def describe_tokens(self, nodes: Sequence[int], texts: TokenTexts) -> list[dict[str, Any]]:
        """Return the tokens of some nodes: texts, the sampled span, and a list of values for each measure."""
        return [self._describe_node(self.trace.nodes[index], texts) for index in nodes]

    def compute_values(self, node: Node) -> dict[str, FloatArray]:
        """Return the values of a node by measure, one per token; NaN where a token has none."""
        start, stop = node.sampled_span
        count = len(node.token_ids)
        measures: dict[str, FloatArray] = {}
        if stop > start:
            measures["logprob"] = _fill_span(count, start, stop, node.logprobs)
            steps = [run.step for run in node.versions for _ in range(run.count)]
            if len(steps) == stop - start:
                measures["version"] = _fill_span(count, start, stop, steps)
            if (changes := self._reward_changes.get(node.index)) is not None:
                measures["reward_change"] = _fill_span(count, start, stop, changes[start:stop])
            if self._token_stats is not None:
                logprobs, entropies = self._token_stats.select_node(self.trace, node.index)
                measures["entropy"] = entropies.astype(np.float64)
                measures["mismatch"] = logprobs - measures["logprob"]
        if self._training is None:
            return measures
        annotations = self._training.annotations.get((self.trace.id, node.index), [])
        for annotation in annotations:
            _add_annotation(measures, annotation, node)
        advantage = self._training.get_advantage(self.trace.attempt)
        if not annotations and stop > start and advantage is not None:
            measures["advantage"] = _fill_span(count, start, stop, advantage)
        return measures

    def explain_untrained(self, node: Node, excluded: Mapping[int, str]) -> str:
        """Return why the sampled tokens of a node are not trained; "" if they are, or if the rollout is of an eval.

        `excluded` are the reasons of calls that the harness or the algorithm excluded, by node.
        """
        training = self._training
        if node.sampled_span[1] <= node.sampled_span[0]:
            return ""
        if node.index in excluded:
            return excluded[node.index]
        if not node.is_trainable:
            return f"sampled by {node.call.served_model or 'another model'}" if node.call else "not trainable"
        if training is None:
            return ""
        attempt = training.attempts.get(self.trace.attempt)
        if attempt is not None and attempt.reason is not None:
            return f"dropped: {attempt.reason.value}" + (f" ({attempt.detail})" if attempt.detail else "")
        if training.batch_group is None:
            return ""
        if (self.trace.id, node.index) not in training.annotations:
            filters = attempt.notes.get("verdicts") if attempt is not None else None
            return f"filtered: {', '.join(filters)}" if filters else "not annotated by the algorithm"
        if training.seq_len is not None and self.trace.graph.path_length(node.index) > training.seq_len:
            return f"longer than seq_len = {training.seq_len}"
        return ""

    def _summarize(self, name: str, columns: Sequence[tuple[int, FloatArray]], texts: TokenTexts) -> dict[str, Any]:
        values = np.concatenate([values for _, values in columns])
        finite = values[np.isfinite(values)]
        extremes: list[dict[str, Any]] = []
        if finite.min() < finite.max():
            nodes = np.concatenate([np.full(len(column), node) for node, column in columns])
            positions = np.concatenate([np.arange(len(column)) for _, column in columns])
            extremes = list(self._iter_extremes(name, values, nodes, positions, texts))
        return {"min": round_value(finite.min()), "max": round_value(finite.max()), "extremes": extremes}

    def _iter_extremes(
        self, name: str, values: FloatArray, nodes: npt.NDArray[Any], positions: npt.NDArray[Any], texts: TokenTexts
    ) -> Iterator[dict[str, Any]]:
        """Yield the tokens with the lowest values if low values are bad, else those with values farthest from zero."""
        sort_keys = values if name in ("logprob", "reward_change", "advantage") else -np.abs(values)
        for at in np.argsort(np.where(np.isfinite(sort_keys), sort_keys, np.inf), kind="stable")[:NUM_EXTREMES]:
            if not np.isfinite(values[at]) or (name == "reward_change" and values[at] >= 0):
                return
            token_ids = self.trace.nodes[int(nodes[at])].token_ids.tolist()
            text = texts.decode(token_ids)[int(positions[at])]
            yield {"node": int(nodes[at]), "token": int(positions[at]), "value": round_value(values[at]), "text": text}

    def _describe_node(self, node: Node, texts: TokenTexts) -> dict[str, Any]:
        token_ids: list[int] = node.token_ids.tolist()
        return {
            "node": node.index,
            "ids": token_ids,
            "texts": texts.decode(token_ids),
            "sampled": list(node.sampled_span),
            "values": {name: list(map(round_value, values)) for name, values in self.compute_values(node).items()},
        }


def _add_annotation(measures: dict[str, FloatArray], annotation: Annotation, node: Node) -> None:
    start, stop = annotation.span or node.sampled_span
    weight = np.abs(annotation.rl) + np.abs(annotation.ce) + np.abs(annotation.ref_kl) + np.abs(annotation.kl)
    columns: dict[str, Any] = {"advantage": annotation.advantage, "weight": weight}
    if annotation.ref_logprobs is not None and "logprob" in measures:
        reference = np.where(np.isfinite(annotation.ref_logprobs), annotation.ref_logprobs, np.nan)
        columns["reference_kl"] = measures["logprob"][start:stop] - reference
    for name, values in columns.items():
        measures.setdefault(name, np.full(len(node.token_ids), np.nan))[start:stop] = values


def _fill_span(count: int, start: int, stop: int, values: npt.ArrayLike) -> FloatArray:
    """Return `count` values: the given ones in [start, stop), NaN elsewhere."""
    column = np.full(count, np.nan)
    column[start:stop] = values
    return column


def round_value(value: Any) -> float | None:
    """Return the value with a few digits; None if it is not finite, which JSON cannot represent."""
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
