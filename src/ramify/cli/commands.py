"""The commands of `ramify` as data: what each is for, its arguments, and the function that runs it.

A `ConfigCommand` reads configuration files and flags `--key value`; any other command has its options only. Functions
and configuration classes are import paths, `module:name`, so that help loads none of them.
"""

import contextlib
import gc
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

SHORT_FLAGS = {"-m": "--model.name", "-o": "--output", "-b": "--inference"}
SOURCE_SHORT_FLAGS = {"-n": "--num_tasks", "-c": "--concurrency"}
DEFAULT_METRICS = ("reward/all/mean", "eval/*/avg")  # that `ramify plot` plots
DEFAULT_FOLDER = "outputs"  # that `ramify view` shows


@dataclass(frozen=True, slots=True)
class Option:
    """One argument: its names, and what argparse's `add_argument` takes."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Options that exclude each other."""

    options: tuple[Option, ...]
    required: bool = False


@dataclass(frozen=True, slots=True)
class CliCommand:
    """A command: one line of help, the import path of its function, and its options."""

    help: str
    run: str
    options: tuple[Option | OneOf, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigCommand(CliCommand):
    """A command that reads a configuration."""

    config: str
    """Import path of its configuration class."""
    usage: tuple[str, ...]
    """The ways to call it, without `ramify` and its name."""
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])
    """Arguments that its help page explains before its flags."""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Flags that are not keys of the configuration, with a metavariable if they take a value."""
    notes: str = ""
    """What the help page says before the keys."""
    short_flags: Mapping[str, str] = field(default_factory=lambda: SHORT_FLAGS)
    expand: str = ""
    """Import path of a function that replaces shorthands, such as the id of a taskset, by flags."""
    extract: str = ""
    """Import path of a function that returns this command's part of a whole run's configuration."""
    reports_crashes: bool = False
    """Whether it runs in a child process, so that a crash of environment code is reported."""


@contextlib.contextmanager
def pause_garbage_collection() -> Generator[None]:
    """Import modules without collections; the collector continues afterwards if it ran before.

    Imports such as torch create a million objects that stay. Collections that traverse them find nothing, and take a
    tenth of the time of the imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load(path: str) -> Any:
    """Return the function or class at an import path, `module:name`."""
    module, _, name = path.partition(":")
    with pause_garbage_collection():
        return getattr(import_module(module), name)


def option(*names: str, **settings: Any) -> Option:
    """Return one argument."""
    return Option(names, settings)


def switch(name: str, help: str) -> Option:
    """Return a flag without a value."""
    return Option((name,), {"action": "store_true", "help": help})


RUN = option("run", metavar="RUN", help="run directory, or name of a run in ./outputs")
RUN_CONFIG = "ramify.orchestrate.run_config:RunConfig"
FILE = {"FILE": "the configuration, in TOML; flags override its keys"}
FRESH = {"--fresh": "start over; the old run directory is renamed"}
ACCEPT_CHANGES = {
    "--accept-changes": "resume even though an environment's code or tasks have changed; the change is recorded"
}
TASKSET_ID = {"ID": "the taskset: a built-in name, an entry point, an import path, or a .py file"}
PART_OF_RUN = "the configuration, in TOML, of this command or of a whole run, as for `ramify rl`; of a run it uses"

COMMANDS: dict[str, CliCommand] = {
    "rl": ConfigCommand(
        "train a model with RL: start and supervise all processes; rerun to resume",
        "ramify.cli.rl:run",
        config=RUN_CONFIG,
        usage=(
            "@ FILE [-m MODEL] [-b URL] [-o OUTPUTS] [--key value]",
            "ID [-m MODEL] [--taskset.KEY VALUE] [--key value]",
        ),
        arguments={
            **FILE,
            "ID": "a taskset to train on instead, with default settings; it is evaluated on its eval split",
            "--cluster ray": "run on the nodes of a Ray cluster: on all of it, unless `[cluster]` says otherwise",
        },
        flags={
            **FRESH,
            **ACCEPT_CHANGES,
            "--dry-run": "check the configuration, print the plan, and exit",
            "--assume-gpus 8x80": "with --dry-run: plan for eight GPUs with 80 GiB each instead of this machine's",
            "--view": "also serve `ramify view` of the run, and print the address",
        },
        notes="""Rerun the same command to resume the run. Ctrl-C, SIGTERM and SIGUSR1 save a checkpoint and stop; a
second Ctrl-C stops at once. Exit codes: 0 finished, 1 failure, 2 invalid configuration, 75 stopped, 130 interrupted.

Keys, the most used first:""",
        expand="ramify.cli.arguments:expand_run",
    ),
    "eval": ConfigCommand(
        "evaluate a model on a taskset; rerun to resume",
        "ramify.cli.eval:run",
        config="ramify.rollout.evals.config:EvalConfig",
        usage=(
            "ID [-m MODEL] [-b URL] [-n TASKS] [-r REPETITIONS] [-c CONCURRENCY] [-o OUTPUTS] [@ FILE] [--key value]",
        ),
        arguments={
            **TASKSET_ID,
            **FILE,
            "--taskset.KEY VALUE": "an option of the taskset; likewise --harness.KEY and --runtime.KEY",
            "--workers N": "run the rollouts in N worker processes instead of this process",
        },
        flags={
            **FRESH,
            **ACCEPT_CHANGES,
            "--show-traces": "print the trace of every rollout at the end",
            "--keep-workdirs": "keep the work directories of the rollouts, and print where they are",
            "--dry-run": "check the configuration and exit",
        },
        notes="Rerun the same command to resume the run. Keys:",
        short_flags={**SHORT_FLAGS, **SOURCE_SHORT_FLAGS, "-r": "--repetitions"},
        expand="ramify.cli.arguments:expand_eval",
        reports_crashes=True,
    ),
    "view": CliCommand(
        "browse runs, rollouts and token trees in a web page, served locally",
        "ramify.cli.view:run",
        (
            option(
                "outputs",
                metavar="OUTPUTS",
                nargs="?",
                default=DEFAULT_FOLDER,
                help=f"directory of runs, or one run directory (default: {DEFAULT_FOLDER})",
            ),
            option("--port", type=int, default=7420, help="port to listen on (default: 7420); 0 picks a free one"),
            option(
                "--host",
                default="127.0.0.1",
                help="address to listen on (default: 127.0.0.1); any other requires the printed token",
            ),
            option(
                "--allow-host",
                action="append",
                default=[],
                metavar="NAME",
                help="host name under which a proxy serves the page; requires the printed token; repeatable",
            ),
            option("--export", metavar="FILE", help="write the run as one HTML file, and exit"),
            option(
                "--rollout",
                action="append",
                default=[],
                metavar="ID",
                help="with --export: a rollout to include; repeatable (default: the worst and the best)",
            ),
            switch("--open", "open the page in a browser"),
        ),
    ),
    "why": CliCommand(
        "explain what a run is waiting for, or how it ended; --audit checks its files",
        "ramify.cli.why:run",
        (
            RUN,
            switch(
                "--audit",
                "check the database and the checksums of stored traces and checkpoints, and that every group was "
                "trained exactly once or dropped with a reason; exit 1 otherwise",
            ),
        ),
    ),
    "metrics": CliCommand(
        "print the metrics of a running or finished run",
        "ramify.cli.metrics:print_metrics",
        (
            RUN,
            option("--name", metavar="GLOB", help="print the points of metrics matching GLOB, such as 'eval/*/avg'"),
            switch("--all", "print every point instead of a summary"),
            switch("--json", "print the points as a list of {step, name, value}"),
        ),
    ),
    "plot": CliCommand(
        "plot metrics of one or more runs to an image",
        "ramify.cli.metrics:plot",
        (
            option("run", metavar="RUN", nargs="+", help=RUN.settings["help"]),
            option("-o", metavar="FILE", required=True, help="image file to write: .png, .svg or .pdf"),
            option(
                "--name",
                action="append",
                metavar="GLOB",
                help=f"metrics to plot; repeatable (default: {' and '.join(DEFAULT_METRICS)})",
            ),
        ),
    ),
    "show": CliCommand(
        "list the rollouts of a run, or print one as a tree",
        "ramify.cli.show:run",
        (
            RUN,
            option(
                "rollout",
                metavar="ROLLOUT",
                nargs="?",
                help="rollout id or a unique prefix; without it, rollouts are listed",
            ),
            option("--limit", type=int, default=20, metavar="N", help="rollouts per page (default: 20); 0 lists all"),
            option("--page", type=int, default=1, metavar="N", help="page to list (default: 1)"),
            option("--source", metavar="NAME", help="only rollouts of this source, such as eval/held-out"),
            switch("--failed", "only rollouts that failed, because of the system or the policy"),
            OneOf((switch("--worst", "lowest rewards first"), switch("--best", "highest rewards first"))),
            switch("--full", "do not truncate long messages of a rollout"),
            switch(
                "--tokens",
                "print the tokens of ROLLOUT; without ROLLOUT, check that every trained token was sampled",
            ),
            option(
                "--pass-threshold",
                type=float,
                default=1.0,
                metavar="REWARD",
                help="minimum reward of a rollout that passes, for pass@k (default: 1.0)",
            ),
        ),
    ),
    "replay": CliCommand(
        "rescore an eval's saved rollouts with the current reward code",
        "ramify.cli.replay:run",
        (RUN, switch("--all", "also list rollouts whose reward did not change")),
    ),
    "export": CliCommand(
        "export a run's traces, the best of them as data for SFT, or its model or adapter",
        "ramify.cli.export:run",
        (
            RUN,
            OneOf(
                (
                    option(
                        "--to",
                        choices=("jsonl", "parquet", "sft"),
                        help="export the traces in this format; sft: the best rollouts of each group, for `ramify sft`",
                    ),
                    option(
                        "--model",
                        metavar="DIR",
                        nargs="?",
                        const="",
                        help="write a model directory for transformers and vLLM (default: models/RUN-STEP in RUN)",
                    ),
                    switch("--adapter", "write the adapter of a LoRA run, for peft"),
                ),
                required=True,
            ),
            option(
                "--step",
                metavar="N|best:METRIC",
                default="",
                help="with --model or --adapter: the step to export, or the step with the highest METRIC (lowest for a "
                "loss) among the steps whose weights still exist (default: the last)",
            ),
            switch("--dry-run", "with --model: print the directory, and write nothing"),
            option("--best", metavar="N", type=int, help="with --to sft: rollouts of each group (default: 1)"),
            option("--min-reward", metavar="R", type=float, help="with --to sft: the least reward of a rollout"),
            option(
                "-o",
                dest="file",
                metavar="PATH",
                help="output path (default: export.FORMAT, sft.jsonl or adapter-STEP in RUN)",
            ),
        ),
    ),
    "push": CliCommand(
        "export a run's model with a model card, and upload it to Hugging Face",
        "ramify.cli.export:push",
        (
            RUN,
            option("--repo", metavar="ORG/NAME", help="upload to this repository, with the token in HF_TOKEN"),
            switch("--private", "create the repository as a private one"),
            option("--step", metavar="N|best:METRIC", default="", help="the step (default: the last), as in export"),
        ),
    ),
    "rollback": CliCommand(
        "roll a run back to an older checkpoint, if its newest is damaged",
        "ramify.cli.rollback:run",
        (
            option("run", metavar="RUN", help=f"{RUN.settings['help']}; it must not be running"),
            option("step", metavar="STEP", type=int, help="step of the checkpoint to roll back to"),
        ),
    ),
    "validate": ConfigCommand(
        "check every task of a taskset, without a model",
        "ramify.cli.validate:run",
        config="ramify.rollout.evals.config:ValidateConfig",
        usage=("ID [-n TASKS] [-c CONCURRENCY] [@ FILE] [--key value]",),
        arguments={
            **TASKSET_ID,
            **FILE,
            "--taskset.KEY VALUE": "an option of the taskset; likewise --runtime.KEY",
        },
        notes="""A task is valid if its gold replies earn a reward above 0. Without gold replies, the rewards run on an
empty reply, which only shows that they run. Prints the tasks that failed, and counts. Exit codes: 0 no task failed, 1 a
task failed or the taskset has no reward, 2 the taskset cannot be loaded. Keys:""",
        short_flags=SOURCE_SHORT_FLAGS,
        expand="ramify.cli.arguments:expand_taskset_id",
    ),
    "init": CliCommand(
        "create a taskset package from a working template",
        "ramify.cli.init:run",
        (
            option("name", metavar="NAME", help="name of the new taskset, such as letter-count"),
            option("-o", dest="directory", metavar="DIR", help="directory to write (default: ./NAME)"),
        ),
    ),
    "sft": ConfigCommand(
        "fine-tune a model on conversations (SFT); rerun to resume",
        "ramify.cli.sft:run",
        config="ramify.train.sft.config:SftConfig",
        usage=("[@ FILE] [-m MODEL] [-d DATA] [-o OUTPUTS] [--key value]",),
        arguments={
            **FILE,
            "-d DATA": "conversations: a jsonl, parquet, arrow, csv or json file, a directory of them, or "
            "the id of a Hugging Face dataset",
        },
        flags={**FRESH, "--dry-run": "check the configuration and the data, and exit"},
        notes="""Rerun the same command to resume the run. On several GPUs: torchrun --nproc-per-node N -m ramify sft
... Keys:""",
        short_flags={"-m": "--model.name", "-o": "--output", "-d": "--data.path"},
    ),
    "orchestrator": ConfigCommand(
        "run only the orchestrator, with an env server for each source that has no address",
        "ramify.cli.orchestrator:run",
        config=RUN_CONFIG,
        usage=("@ FILE [-b URL] [-m MODEL] [-o OUTPUTS] [--key value]",),
        arguments={
            "FILE": "the configuration of a whole run, as for `ramify rl`",
            "-b URL": "address of running inference servers, instead of the run's `[inference]`",
        },
        flags={"--dry-run": "check the configuration, print what would be started, and exit", **ACCEPT_CHANGES},
        notes="""An env server is started for every source without an `address`, and ends with this command. The trainer
connects to `orchestrator.address`. Rerun the same command to resume the run. Keys, the most used first:""",
    ),
    "trainer": ConfigCommand(
        "run only the trainer, on batches from an orchestrator or a recording",
        "ramify.cli.trainer:run",
        config="ramify.train.config:TrainerProcessConfig",
        usage=("[@ FILE] [-m MODEL] [--address tcp://HOST:PORT] [-o OUTPUTS] [--key value]",),
        arguments={"FILE": f"{PART_OF_RUN} the trainer's part"},
        flags={
            "--record DIR": "write every received batch to DIR",
            "--replay DIR": "train on the batches recorded in DIR, without writing checkpoints or weights",
            "--flat": "with --replay: train each branch as a sequence of its own, without prefix sharing",
            "--dry-run": "check the configuration and exit",
        },
        notes="""On several GPUs: torchrun --nproc-per-node N -m ramify trainer ... Keys, also if FILE describes a
whole run:""",
        extract="ramify.launch.process_configs:extract_trainer",
    ),
    "serve": ConfigCommand(
        "serve a model over HTTP, with the native engine or vLLM",
        "ramify.cli.serve:run",
        config="ramify.infer.config:ServeConfig",
        usage=("[@ FILE] [-m MODEL] [--server.host HOST] [--server.port PORT] [--key value]",),
        arguments={
            "FILE": f"{PART_OF_RUN} model and engine, at `inference.base_url` if that is one server",
        },
        flags={"--dry-run": "print what would be served and where, then exit"},
        notes="Keys, also if FILE describes a whole run:",
        extract="ramify.launch.process_configs:extract_server",
    ),
    "env-server": ConfigCommand(
        "run the rollouts of one source in worker processes, for an orchestrator",
        "ramify.cli.env_server:run",
        config="ramify.rollout.envserver.config:EnvServerConfig",
        usage=("@ FILE [--source train/NAME] [-m MODEL] [-b URL] [-o RUN] [--key value]",),
        arguments={
            "FILE": f"{PART_OF_RUN} one source, at its `address` or at `launch.base_port`",
            "--source": "the source to serve, if the file has several",
            "-b URL": "address of running inference servers, if the file names none",
        },
        flags={"--dry-run": "print what would be served and where, then exit"},
        notes="Keys, also if FILE describes a whole run:",
        extract="ramify.launch.process_configs:extract_env_server",
    ),
    "slurm": ConfigCommand(
        "write a Slurm batch script that runs rl on several nodes; --submit submits it",
        "ramify.cli.cluster_jobs:write_slurm_script",
        config=RUN_CONFIG,
        usage=("@ FILE [--submit] [--key value]",),
        flags={"--submit": "also submit the script, with sbatch"},
        notes="""The script is `job.sh` in RUN.slurm, beside the run directory. It allocates `cluster.num_nodes` nodes,
each with the cores, GPUs and memory of `[cluster.node]`, starts Ray on them, and runs `ramify rl` with the arguments of
this command. FILE, the working directory and this installation must be on all nodes. The job is requeued until the run
is finished.

Keys, the same as for `ramify rl`:""",
        expand="ramify.cli.arguments:expand_cluster_run",
    ),
    "k8s": ConfigCommand(
        "print a Kubernetes manifest (a RayJob) that runs rl on several nodes",
        "ramify.cli.cluster_jobs:print_manifest",
        config=RUN_CONFIG,
        usage=("@ FILE [--key value] > job.yaml; kubectl apply -f job.yaml",),
        notes="""Prints a ConfigMap with the resolved configuration, and a RayJob, for a Kubernetes cluster with the
operator KubeRay. Each of the `cluster.num_nodes` nodes is a pod with the resources of `[cluster.node]`;
`[cluster.kubernetes]` names the image and the volume. The image needs `ray[default]`, because
KubeRay submits the job through Ray's dashboard.

Keys, the same as for `ramify rl`:""",
        expand="ramify.cli.arguments:expand_cluster_run",
    ),
    "venv": CliCommand(
        "make a virtual environment with the packages of a source, or list them",
        "ramify.cli.venv:run",
        (
            option("action", choices=("install", "list"), help="make a virtual environment, or list the existing ones"),
            option("name", metavar="NAME", nargs="?", help="its name, for the key `python` of a source"),
            option("packages", metavar="PACKAGE", nargs="*", help="packages that pip installs there, besides Ramify"),
            option("--python", help="interpreter to make it with, 3.11 or newer (default: this one)"),
        ),
    ),
    "model": CliCommand(
        "list, inspect or fetch models",
        "ramify.cli.model:run",
        (
            option(
                "action",
                choices=("list", "show", "fetch"),
                help="list the packaged models; show a model's dimensions, and its benchmark results if measured; "
                "fetch a model from the Hugging Face hub into its local cache",
            ),
            option(
                "name",
                metavar="NAME",
                nargs="?",
                help="a packaged model, a directory, or a cached Hugging Face id; for fetch, ORG/NAME",
            ),
            switch("--json", "print JSON"),
        ),
    ),
    "data": CliCommand(
        "show the columns, lengths and a sample of a dataset, and which rewards fit; download it from the hub",
        "ramify.cli.data:run",
        (
            option(
                "path",
                metavar="PATH",
                help="a jsonl, parquet, arrow, csv or json file, a directory of them, or ORG/NAME on Hugging Face",
            ),
            option("--revision", help="branch, tag or commit of a dataset on Hugging Face (default: main)"),
            option("--subset", help="subset of a dataset that has several"),
            option("--part", help="part of a dataset or directory, such as train (default: all)"),
            option(
                "-m", dest="model", metavar="MODEL", default="tiny", help="model that counts tokens (default: tiny)"
            ),
            option("--rows", type=int, default=1000, metavar="N", help="rows to describe (default: 1000)"),
        ),
    ),
    "runtime": CliCommand(
        "list what each runtime can enforce on this machine, or clean up after killed runs",
        "ramify.cli.runtime:run",
        (
            option(
                "action",
                choices=("list", "clean"),
                help="list: show what each runtime can enforce on this machine; clean: kill and remove what ended "
                "processes left behind",
            ),
            option("id", nargs="*", metavar="ID", help="ids of runtimes (default: all built-in ones)"),
        ),
    ),
    "doctor": CliCommand(
        "check what this machine can run, and how to install what is missing",
        "ramify.cli.doctor:run",
        (
            switch("--json", "print the results as JSON"),
            option("--model", metavar="NAME", help="print instead how engine and trainer run a model, by its config"),
        ),
    ),
}
