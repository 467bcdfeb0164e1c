"""Loss and gradient of TRL's GRPO formula on random inputs; run by an interpreter that has PyPI `trl`:

    python tests/train/golden/make_trl.py > tests/train/golden/trl.json

What runs is `GRPOTrainer._compute_loss` itself, on a stand-in for the trainer that hands it logprobs, not a model.
Nothing of Ramify is imported. `sampler` are the old logprobs; for `tis` and `icepop` they are vLLM's, and the policy is
on its first step, as TRL's importance sampling correction has it.
"""

import json
from collections import defaultdict
from types import SimpleNamespace

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer

ROWS, LENGTH = 6, 9
LOW, HIGH, CAP, BAND, BETA = 0.2, 0.28, 2.0, (0.5, 2.0), 0.04


def trainer(**settings) -> SimpleNamespace:
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    accelerator.gather_for_metrics = accelerator.gather
    known = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "bnpo",
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "max_completion_length": LENGTH,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "args": SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        "model": SimpleNamespace(training=True),
        "accelerator": accelerator,
    }
    return SimpleNamespace(**{**known, **settings})


def main() -> None:
    torch.manual_seed(0)
    lengths = [9, 7, 4, 1, 8, 5]
    mask = (torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]).long()
    sampler = -3 * torch.rand(ROWS, LENGTH)
    logprob = (sampler + 0.5 * torch.randn(ROWS, LENGTH)).clamp(max=-0.01)
    advantages = torch.randn(ROWS)
    ratio = (logprob - sampler).exp()
    reference = sampler.roll(1, 0)
    cases = {
        "ppo": {"loss_type": "bnpo"},
        "ppo, mean of sequences": {"loss_type": "grpo"},
        "ppo, fixed length": {"loss_type": "dr_grpo"},
        "ppo, all tokens": {"loss_type": "dapo"},
        "ppo, beta": {"loss_type": "bnpo", "beta": BETA},
        "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
        "gspo": {"loss_type": "bnpo", "importance_sampling_level": "sequence"},
        "tis": {"use_vllm": True, "ratio": ratio.clamp(max=CAP)},
        "icepop": {"use_vllm": True, "ratio": ratio.where((ratio >= BAND[0]) & (ratio <= BAND[1]), 0.0)},
    }
    found = {}
    for name, settings in cases.items():
        correction = settings.pop("ratio", None)
        leaf = logprob.clone().requires_grad_()
        self = trainer(**settings)
        self._get_per_token_logps_and_entropies = lambda *args, leaf=leaf, **kwargs: (
            leaf,
            torch.zeros_like(leaf),
            None,
        )
        inputs = {
            "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
            "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
            "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
            "completion_mask": mask,
            "advantages": advantages,
            "num_items_in_batch": mask.sum(),
        }
        if settings.get("beta"):
            inputs["ref_per_token_logps"] = reference
        if correction is None:
            inputs["old_per_token_logps"] = sampler
        else:
            inputs["importance_sampling_ratio"] = correction
        loss = GRPOTrainer._compute_loss(self, None, inputs)
        loss.backward()
        found[name] = {"loss": loss.item(), "gradient": leaf.grad[mask.bool()].tolist()}
    inside = mask.bool()
    golden = {
        "trl": trl.__version__,
        "lengths": lengths,
        "longest": LENGTH,
        "logprob": logprob[inside].tolist(),
        "sampler": sampler[inside].tolist(),
        "reference": reference[inside].tolist(),
        "beta": BETA,
        "advantages": advantages.tolist(),
        "cases": found,
    }
    print(json.dumps(golden))


if __name__ == "__main__":
    main()
