"""A model that engine or trainer would compute wrongly is rejected when it is loaded."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from ramify.core.errors import ModelUnsupported
from ramify.infer.request import SamplingParams
from ramify.model.pack_layout import PackLayout
from ramify.train.build import build_trainer
from ramify.train.config import TrainerConfig
from ramify.train.distributed import Ranks
from ramify.train.lm_head import LogitTransform
from ramify.train.losses import load_loss
from ramify.train.policy_model import _check_agreement, load_policy
from tests.support.models import build_core, reference, run, sampled_ids, scores, write_random_model
from tests.support.training import HYBRIDS, MAMBA2_HYBRIDS, SIZES, build_policy

SINGLE_RANK = Ranks(torch.device("cpu"))
DECODERS = {
    "bert": {"is_decoder": True},  # layers in its head
    "roberta": {"is_decoder": True},  # and positions that begin at 2
    "electra": {"is_decoder": True},  # a head of another width
    "modernbert-decoder": {},  # its head is called decoder
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("decoders")
    return {
        model_type: write_random_model(model_type, directory / model_type, **settings)
        for model_type, settings in DECODERS.items()
    }


@pytest.mark.parametrize("model_type", DECODERS)
def test_trainer_rejects_layers_in_the_head(models, model_type):
    with pytest.raises(ModelUnsupported, match="the trainer does not compute what the model itself does"):
        build_trainer(models[model_type], TrainerConfig(threads=1), SINGLE_RANK)


class HeadLayerConfig(LlamaConfig):
    """The config of a model type of its own: a class that is registered for Llama's config is not always used."""

    model_type = "llama_with_head_layer"


class LlamaWithHeadLayer(LlamaForCausalLM):
    """A Llama with one more layer in its head."""

    config_class = HeadLayerConfig

    def __init__(self, config) -> None:
        super().__init__(config)
        self.transform = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, input_ids, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(self.transform(hidden)))


def test_trainer_rejects_differing_logprobs(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")
    load_policy(tmp_path / "llama", load_loss("dppo"), device=torch.device("cpu"))
    AutoConfig.register(HeadLayerConfig.model_type, HeadLayerConfig, exist_ok=True)
    AutoModelForCausalLM.register(HeadLayerConfig, LlamaWithHeadLayer, exist_ok=True)
    LlamaWithHeadLayer(HeadLayerConfig(**SIZES)).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelUnsupported, match=r"LlamaWithHeadLayer: .* logprobs of check tokens differ by"):
        load_policy(tmp_path / "other", load_loss("dppo"), device=torch.device("cpu"))


def drop_paths(module, args, kwargs):
    """Do as a version of transformers would that does not pass `seq_idx` on to recurrent layers."""
    return args, {name: value for name, value in kwargs.items() if name != "seq_idx"}


@pytest.mark.parametrize("shape", ["qwen3_5", "qwen3_next", "olmo_hybrid", "granitemoehybrid"])
def test_trainer_rejects_states_that_pass_from_tree_to_tree(shape):
    policy = build_policy(HYBRIDS[shape])
    _check_agreement(policy)
    policy.model.get_decoder().register_forward_pre_hook(drop_paths, with_kwargs=True)
    with pytest.raises(ModelUnsupported, match="logprobs of check tokens differ by"):
        _check_agreement(policy)


@pytest.mark.parametrize("shape", MAMBA2_HYBRIDS)
def test_trainer_computes_forests_of_models_with_mamba2(shape):
    policy = build_policy(MAMBA2_HYBRIDS[shape])
    assert policy.layout is PackLayout.FOREST
    _check_agreement(policy)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("granite", {"logits_scaling": 3.0}),
        ("granite_swa", {"logits_scaling": 3.0}),
        ("hyperclovax", {"logits_scaling": 3.0}),
        ("recurrent_gemma", {"logits_soft_cap": 1.0, "block_types": ["recurrent", "attention"]}),
    ],
)
def test_trainer_scales_and_caps_logits_as_the_model_does(model_type, settings, tmp_path):
    write_random_model(model_type, tmp_path, initializer_range=0.3, **settings)
    policy = load_policy(tmp_path, load_loss("dppo"), device=torch.device("cpu"))
    assert policy.logit_transform != LogitTransform()


def test_engine_rejects_other_position_numbering(models):
    with pytest.raises(ModelUnsupported, match="the engine does not compute what the model itself does"):
        build_core(models["roberta"])


@pytest.mark.parametrize("model_type", ["bert", "electra", "modernbert-decoder"])
def test_engine_serves_layers_in_the_head(models, model_type):
    core = build_core(models[model_type])
    (request,) = run(core, core.create_request([5, 6, 7], SamplingParams(max_tokens=4, seed=0)))
    logprobs = scores(reference(models[model_type]), request.token_ids, 1.0)
    expected = [logprobs[2 + index, token].item() for index, token in enumerate(sampled_ids(request))]
    assert request.logprobs == pytest.approx(expected, abs=1e-4)
