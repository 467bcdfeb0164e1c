"""A model whose logits are not what our way of calling it gives is refused by name when it is loaded."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from ramify.errors import ModelUnsupported
from ramify.infer.request import SamplingParams
from ramify.train.build import build_trainer
from ramify.train.config import TrainerConfig
from ramify.train.distributed import Ranks
from ramify.train.losses import load_loss
from ramify.train.policy import load_policy
from tests.infer.llama import build_core, reference, run, scores
from tests.model.test_load import write
from tests.train.models import SIZES

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


class LlamaWithHeadLayer(LlamaForCausalLM):
    """Looks like a Llama from outside, and has a layer more in its head."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.transform = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, input_ids, **more):
        hidden = self.model(input_ids=input_ids, **more).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(self.transform(hidden)))


def test_a_head_that_looks_like_a_matrix_and_is_more_is_found_by_its_logprobs(tmp_path):
    config = LlamaConfig(**SIZES)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    load_policy(tmp_path, load_loss("dppo"), device=torch.device("cpu"))
    AutoModelForCausalLM.register(LlamaConfig, LlamaWithHeadLayer, exist_ok=True)
    try:
        LlamaWithHeadLayer(config).save_pretrained(tmp_path)
        with pytest.raises(ModelUnsupported, match=r"LlamaWithHeadLayer: .* logprobs of a trial differ by"):
            load_policy(tmp_path, load_loss("dppo"), device=torch.device("cpu"))
    finally:
        AutoModelForCausalLM.register(LlamaConfig, LlamaForCausalLM, exist_ok=True)


def test_a_model_that_counts_positions_in_its_own_way_is_not_served(models):
    with pytest.raises(ModelUnsupported, match="the engine does not compute what the model itself does"):
        build_core(models["roberta"])


@pytest.mark.parametrize("kind", ["bert", "electra", "modernbert-decoder"])
def test_the_engine_serves_a_head_with_layers_as_it_is(models, kind):
    core = build_core(models[kind])
    (request,) = run(core, core.create_request([5, 6, 7], SamplingParams(max_tokens=4, seed=0)))
    plain = scores(reference(models[kind]), request.token_ids, 1.0)
    expected = [plain[2 + number, token].item() for number, token in enumerate(request.output_token_ids)]
    assert request.logprobs == pytest.approx(expected, abs=1e-4)
