"""Logprob and entropy of every trained token can be read for each rollout after the step."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from ramify.core.errors import DataCorrupt, EngineIncompatible
from ramify.run.fencing.token import FencingToken
from ramify.trace import build_forest
from ramify.train import Batch, Trainer, TrainerConfig, pack_forests
from ramify.train.token_stats import TokenStatsWriter, read_token_stats
from tests.support.training import CONFIGS, VOCAB, build_attempt, build_group, build_model, build_policy

ATTEMPTS = [*build_group(Random(0), 3, [-1, 0, 1, 1]), build_attempt(Random(1), "forked", [-1, 0, 0, 1, 1])]


def train(path, world_size: int, *, incarnation: int = 0) -> None:
    """Train one step whose packs are shared by several ranks, each with a writer of its own."""
    packs = pack_forests([build_forest([a.sample() for a in group]) for group in (ATTEMPTS[:3], ATTEMPTS[3:])], 64)
    assert len(packs) >= 2
    for rank in range(world_size):
        writer = TokenStatsWriter(path, rank)
        trainer = Trainer(build_policy(CONFIGS["llama"]), TrainerConfig(), token_stats=writer)
        trainer.step(Batch.from_packs(7, packs[rank::world_size]))
        writer.write(7, FencingToken.from_number(incarnation))


def list_files(path) -> list[str]:
    return sorted(file.name for file in (path / "token_stats").iterdir())


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_trained_token_of_a_rollout_has_the_values_of_the_policy(tmp_path, world_size):
    train(tmp_path, world_size)
    stats = read_token_stats(tmp_path, 7, 0)
    model = build_model(CONFIGS["llama"], "eager")
    num_tokens = 0
    for attempt in ATTEMPTS:
        trace = attempt.sample().trace
        for note in attempt.notes:
            ids = torch.tensor(trace.graph.path_tokens(note.node).astype(np.int64))
            with torch.no_grad():
                logprobs = (model(ids[None], use_cache=False).logits[0] / attempt.temperature).log_softmax(-1)
            start, stop = attempt.nodes[note.node].sampled
            positions = torch.arange(start, stop) + attempt.depth(note.node)
            expected = logprobs[positions - 1, ids[positions]]
            entropy = -(logprobs.exp() * logprobs).sum(-1)[positions - 1]
            logprob, entropies = stats.select_node(trace, note.node)
            assert logprob[start:stop] == pytest.approx(expected.numpy(), abs=1e-4)
            assert entropies[start:stop] == pytest.approx(entropy.numpy(), rel=2e-3)
            assert np.isnan(logprob[:start]).all() and len(logprob) == len(attempt.nodes[note.node].tokens)
            num_tokens += stop - start
    assert len(stats.logprob) == num_tokens


def test_a_replaced_trainer_leaves_the_values_of_its_successor_as_they_are(tmp_path):
    train(tmp_path, 1, incarnation=1)
    values = (tmp_path / "token_stats" / "step_000007-1.rank_0.npz").read_bytes()
    train(tmp_path, 2)  # it was suspended in the step
    assert (tmp_path / "token_stats" / "step_000007-1.rank_0.npz").read_bytes() == values
    assert len(read_token_stats(tmp_path, 7, 1).logprob) == len(read_token_stats(tmp_path, 7, 0).logprob)


def test_a_trainer_that_repeats_a_step_removes_the_files_of_its_predecessors(tmp_path):
    train(tmp_path, 2)
    train(tmp_path, 1, incarnation=2)
    assert list_files(tmp_path) == ["step_000007-2.rank_0.npz"]
    train(tmp_path, 1, incarnation=FencingToken(term=1).number)
    assert list_files(tmp_path) == ["step_000007-1.0.rank_0.npz"]


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(DataCorrupt, match="no token stats of step 3 by trainer 1; expected"):
        read_token_stats(tmp_path, 3, 1)
    (tmp_path / "token_stats").mkdir()
    (tmp_path / "token_stats" / "step_000003-1.rank_0.npz").write_bytes(b"PK\x03\x04nothing")
    with pytest.raises(DataCorrupt, match="token stats of step 3"):
        read_token_stats(tmp_path, 3, 1)


def test_a_token_beyond_the_vocabulary_is_a_tokenizer_mismatch():
    forest = build_forest([attempt.sample() for attempt in ATTEMPTS[:1]])
    token_ids = np.full_like(forest.token_ids, VOCAB)
    trainer = Trainer(build_policy(CONFIGS["llama"]), TrainerConfig())
    with pytest.raises(
        EngineIncompatible, match=rf"token id {VOCAB}, but the vocabulary of the model is 0 to {VOCAB - 1}"
    ):
        trainer.step(Batch.from_packs(7, [replace(forest, token_ids=token_ids)]))
