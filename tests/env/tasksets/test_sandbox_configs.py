"""The example configs of tasks that need a sandbox: each passes its dry run, with small files in place of datasets."""

import json
import re
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from ramify.cli import main
from ramify.env.plugin import resolve_plugin
from ramify.launch import plugin_check
from tests.env.tasksets.test_swe import R2E_GYM, SCALE_SWE, SWE_BENCH
from tests.rollout.runtime.conftest import skip_unless_available

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = [file for name in ("repair", "swe", "harbor") for file in sorted((EXAMPLES / name).glob("*.toml"))]
ROWS = {
    "R2E-Gym/R2E-Gym-Subset": [R2E_GYM],
    "princeton-nlp/SWE-bench_Verified": [SWE_BENCH],
    "AweAI-Team/Scale-SWE": [SCALE_SWE | {"instance_id": f"me_calc_pr{number}"} for number in range(200)],
}
CONTAINER = re.compile(r'runtime = \{ id = "container".*\}')


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """What stands in for the datasets and programs that the configs name."""
    (tmp_path / "agents" / "node_modules" / ".bin").mkdir(parents=True)
    replacements = {"/opt/agents": str(tmp_path / "agents"), "examples/harbor": str(EXAMPLES / "harbor")}
    for name, rows in ROWS.items():
        folder = tmp_path / name.replace("/", "-")
        folder.mkdir()
        for part in ("train", "test"):
            (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if name.startswith("AweAI"):
            (folder / "test.jsonl").unlink()
        replacements[name] = str(folder)
    return replacements


@pytest.fixture
def plugin_check_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check plugin tables in this process: a subprocess for every config takes a second."""

    def run(command: list[str], *, input: str, **_: object) -> subprocess.CompletedProcess[str]:
        reply = json.dumps(plugin_check.check_request(json.loads(input)))
        return subprocess.CompletedProcess(command, 0, stdout=reply, stderr="")

    monkeypatch.setattr(plugin_check, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))


@pytest.mark.process
@pytest.mark.usefixtures("plugin_check_in_process")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_config_passes_its_dry_run(file, files, tmp_path, capsys):
    text = file.read_text()
    if 'id = "sandbox"' in text:
        skip_unless_available("sandbox")
    for name, replacement in files.items():
        text = text.replace(name, replacement)
    text = CONTAINER.sub('runtime = { id = "tests.env.tasksets.test_swe:LocalImages" }', text)  # no engine is needed
    (tmp_path / file.name).write_text(text)
    code = main(["rl", "@", str(tmp_path / file.name), "-o", str(tmp_path / "out"), "--dry-run"])
    assert (code, capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize(
    "file", [file for file in FILES if CONTAINER.search(file.read_text())], ids=lambda file: file.name
)
def test_keys_of_the_container_exist(file):
    for table in CONTAINER.findall(file.read_text()):
        resolve_plugin("runtime", tomllib.loads(table)["runtime"])


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name == "repair"], ids=lambda file: file.name)
def test_shipped_repair_configs_use_the_sandbox(file):
    text = file.read_text()
    assert text.count('runtime = { id = "sandbox"') == text.count('requires = ["isolation"]') == 2
