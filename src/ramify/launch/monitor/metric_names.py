"""The metrics of a run by name, with a description of each. `docs/metrics.md` repeats the table.

`<source>` is the name of a source, `<name>` that of a reward or metric of a taskset, `<id>` that of a filter, `<age>`
the staleness of the weights that sampled: how many steps they are older than the trained ones.
"""

METRIC_DESCRIPTIONS: dict[str, dict[str, str]] = {
    "Rewards and rollouts": {
        "reward/all/mean": "mean reward of all rollouts scored since the previous step, including untrained ones",
        "reward/<source>/mean": "the same for one source",
        "reward/<source>/<name>": "mean score of one reward, before its weight",
        "metric/<source>/<name>": "mean of one metric of the taskset",
        "turns/mean": "model calls per rollout",
        "tokens/sampled": "sampled tokens per rollout",
        "truncated": "fraction of rollouts with a truncated reply",
        "render/breaks": "re-renderings of the history per rollout, each of which breaks the token prefix",
        "rollouts": "rollouts scored since the previous step",
        "trainable": "fraction of groups that can be trained on",
        "filter/<id>": "fraction of rollouts that match a filter, in either mode",
        "failures/<name>": "failures of the system and of agents with this name, since the orchestrator started",
    },
    "Evals": {
        "eval/<source>/avg": "mean reward, clustered by task",
        "eval/<source>/error": "its standard error",
        "eval/<source>/pass@k": "probability that at least one of k rollouts passes",
        "eval/<source>/pass^k": "probability that all of k rollouts pass",
        "eval/<source>/metric/<name>": "mean of one metric of the taskset",
        "eval/<source>/truncated": "fraction of rollouts with a truncated reply",
        "eval/<source>/missing": "tasks with rollouts lost to system failures, excluded from the means",
        "eval/<source>/seconds": "duration of the eval",
    },
    "Training": {
        "train/loss": "loss of the step",
        "train/grad_norm": "norm of the gradient before clipping",
        "train/lr": "learning rate",
        "train/skipped": "1 if the update was skipped because the gradient was not finite",
        "train/seconds": "duration of the step, without the wait for its batch",
        "train/tokens_per_second": "forest tokens per second, forward and backward",
        "train/mfu": "model FLOPs utilization; known GPUs only",
        "loss/<component>": "the part of the loss from `rl`, `ce`, `ref_kl` or `kl`",
        "entries": "number of trained entries; like the next eight, also per source and staleness",
        "entropy": "mean entropy of the policy at trained tokens",
        "mismatch_kl": "KL between trainer and sampler, as mean of ratio - log ratio - 1",
        "max_log_ratio": "largest |log ratio| between trainer and sampler",
        "p999_log_ratio": "99.9th percentile of |log ratio|, overestimated by at most 20 %",
        "masked": "fraction of entries that the loss masks",
        "reference_kl": "KL to the teacher or reference, as mean of log policy - log reference on the policy's samples",
        "reference_agreement": "overlap of both distributions, as mean of min(1, reference / policy); 1 if equal",
        "reference_cross_entropy": "mean negative logprob of the policy's samples under the teacher or reference",
        "reference_entropy": "entropy of the teacher or reference, estimated on the policy's samples with importance "
        "weights of at most 10",
        "entries/<source>/age_<age>": "entries of one source by staleness; likewise for the nine metrics above",
        "committed": "the committed step, when a checkpoint is made",
    },
    "Forest": {
        "forest/tokens": "tokens computed",
        "forest/token_ratio": "flat tokens divided by forest tokens: what sharing prefixes saves",
        "forest/chain_cost": "tokens divided by unique tokens: what chains cost; only models with recurrent layers",
        "forest/padding": "padding tokens, which are not in `forest/tokens`",
        "forest/images": "images that the vision tower encoded, each once per step; only of steps with images",
    },
    "Staleness and throughput": {
        "staleness/mean": "mean staleness of the groups of the batch, in steps",
        "staleness/max": "maximum staleness of the groups of the batch",
        "rollouts_per_s": "rollouts per second, over the last 20 s or two steps",
        "tokens_per_s": "sampled tokens per second, over the last 20 s or two steps",
        "time/unix": "Unix time at which the batch was formed",
        "time/step": "seconds since the trainer finished the step before",
        "utilization": "least time for the sampling and training of a step at the hardware's peaks, over `time/step`",
        "time/train": "seconds from serving a batch to its acknowledgement",
        "time/swap": "seconds to update the engines' weights",
        "env_servers/<source>/<host>/<count>": "attempts on the env servers of one host: `in_flight`, `done` and "
        "`lost` with a server so far; only of sources with several",
    },
}
