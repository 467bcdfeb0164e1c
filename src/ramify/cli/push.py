"""`ramify push RUN`: export a model, write its card beside it, and upload both to a Hugging Face repository."""

import os
import shlex
from argparse import Namespace
from pathlib import Path

from ramify.cli.metrics import plot_metrics
from ramify.cli.run_lookup import open_run_readonly
from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.core.hub import get_endpoint
from ramify.run.store import RunStore, wrap_storage_errors
from ramify.run.store.run_log import RunLog
from ramify.train.exported_models import export_model
from ramify.train.model_card import CURVE_NAME, CURVES_FILE, write_model_card

TOKEN_VARIABLE = "HF_TOKEN"


def run(options: Namespace) -> int:
    """Print the directory of the model, and where it was uploaded to."""
    if options.private and options.repo is None:
        raise ConfigInvalid("--private is for an upload: add --repo ORG/NAME")
    with open_run_readonly(options.run) as store, wrap_storage_errors(store.path):
        exported = export_model(store, step=options.step)
        has_curves = _plot_curves(store, exported.directory / CURVES_FILE)
        card = write_model_card(store, exported, has_curves=has_curves)
    print(f"model of step {exported.step} in {exported.directory}, with its card {card.name}")
    if options.repo is None:
        run = shlex.quote(str(options.run))
        print(f"read the card; then upload both with: ramify push {run} --step {exported.step} --repo ORG/NAME")
        return 0
    if not os.environ.get(TOKEN_VARIABLE):
        raise ConfigInvalid(f"{exported.directory} was not uploaded: set {TOKEN_VARIABLE} to a token with write access")
    print(f"uploaded to {_upload(exported.directory, options.repo, is_private=options.private)}")
    return 0


def _plot_curves(store: RunStore, path: Path) -> bool:
    """Plot the curves of the run; return whether there are any and matplotlib is installed."""
    points = [point for point in RunLog(store).metrics() if CURVE_NAME.fullmatch(point.name)]
    if not points:
        return False
    try:
        plot_metrics({store.path.resolve().name: points}, path)
    except ConfigInvalid as error:
        print(f"the card has no curves: {error.message}")
        return False
    return True


def _upload(directory: Path, repo: str, *, is_private: bool) -> str:
    """Upload a directory to a model repository, which is created if it does not exist, and return its address."""
    from huggingface_hub import HfApi  # takes a second, and only an upload needs it

    endpoint = get_endpoint()
    api = HfApi(endpoint=endpoint, token=os.environ[TOKEN_VARIABLE])
    try:
        api.create_repo(repo, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=directory, commit_message=f"Upload {directory.name}")
    except Exception as error:  # the library passes on whatever its HTTP client raised
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ProviderError(f"{directory} was not uploaded to {repo} at {endpoint}: {problem}") from error
    return f"{endpoint}/{repo}"
