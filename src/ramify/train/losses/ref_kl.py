"""The reverse KL to a reference model, estimated on what the policy sampled."""

from ramify.train.losses.entries import Entries, LossTerm


def ref_kl(entries: Entries, *, tau: float = 1e-3) -> LossTerm:
    """−sg(logπ_ref − logπ)·ρ + τ·lr²."""
    lr = entries.log_ratio
    return LossTerm(-(entries.reference_logprob - entries.logprob).detach() * lr.exp() + tau * lr**2)
