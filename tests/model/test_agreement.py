"""A model whose logits are not what our way of calling it gives is refused by name when it is loaded."""

from pathlib import Path

import pytest
import torch

from ramify.errors import ModelUnsupported
from ramify.infer.request import Sampling
from ramify.train.build import build_trainer
from ramify.train.config import TrainerConfig
from ramify.train.parallel import Ranks
from tests.infer.llama import build_core, reference, run, scores
from tests.model.test_load import write

ALONE = Ranks(torch.device("cpu"))
DECODERS = {
    "bert": {"is_decoder": True},  # layers in its head
    "roberta": {"is_decoder": True},  # and positions that begin at 2
    "electra": {"is_decoder": True},  # a head of another width
    "modernbert-decoder": {},  # its head is called decoder
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("decoders")
    return {kind: write(kind, folder / kind, **settings) for kind, settings in DECODERS.items()}


@pytest.mark.parametrize("kind", DECODERS)
def test_a_model_with_layers_in_its_head_is_not_trained(models, kind):
    with pytest.raises(ModelUnsupported, match="the trainer does not compute what the model itself does"):
        build_trainer(models[kind], TrainerConfig(threads=1), ALONE)


def test_a_model_that_counts_positions_in_its_own_way_is_not_served(models):
    with pytest.raises(ModelUnsupported, match="the engine does not compute what the model itself does"):
        build_core(models["roberta"])


@pytest.mark.parametrize("kind", ["bert", "electra", "modernbert-decoder"])
def test_the_engine_serves_a_head_with_layers_as_it_is(models, kind):
    core = build_core(models[kind])
    (request,) = run(core, core.request([5, 6, 7], Sampling(max_tokens=4, seed=0)))
    plain = scores(reference(models[kind]), request.tokens, 1.0)
    expected = [plain[2 + number, token].item() for number, token in enumerate(request.sampled)]
    assert request.logprobs == pytest.approx(expected, abs=1e-4)
