"""External servers: set in the config, rejected by `ramify serve`."""

import pytest

from ramify.core.config import Config, dump_toml, parse
from ramify.core.errors import ConfigInvalid
from ramify.infer.config import EngineConfig, ExternalServersConfig, InferenceConfig, ServeConfig

URL = "http://10.0.0.1:8000"


class RunConfig(Config):
    """The config of any command that samples."""

    inference: InferenceConfig = EngineConfig()


def test_external_servers_are_set_in_a_file_or_by_flags(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'[inference]\nengine = "external"\nbase_url = ["{URL}/", "http://b:1"]\n')
    run = parse(RunConfig, ["@", str(file)])
    assert run.inference == ExternalServersConfig(base_url=[URL, "http://b:1"])
    assert parse(RunConfig, ["--inference.engine", "external", "--inference.base_url", URL, "http://b:1"]) == run
    file.write_text(dump_toml(run))
    assert parse(RunConfig, ["@", str(file)]) == run


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--inference.base_url", URL], "inference.base_url: unknown key; it needs inference.engine = 'external'"),
        (["--inference.engine", "external"], "inference.base_url: required, but not given"),
        (["--inference.engine", "external", "--inference.base_url=[]"], "inference.base_url: .* at least 1 item"),
        (["--inference.engine", "external", "--inference.base_url", "b:1"], "expected the root of a server"),
        (["--inference.engine", "external", "--inference.base_url", f"{URL}/v1"], "expected the root of a server"),
        (["--inference.engine", "external", "--inference.base_url", URL, f"{URL}/"], "listed twice"),
        (["--inference.engine", "external", "--inference.queue", "3"], "inference.queue: unknown flag"),
    ],
)
def test_invalid_address_is_rejected(args, message):
    with pytest.raises(ConfigInvalid, match=message):
        parse(RunConfig, args)


@pytest.mark.parametrize("engine", [["--inference.engine", "external"], []])
def test_serve_rejects_external_servers(engine):
    with pytest.raises(ConfigInvalid, match="names servers that run already: there is nothing to serve"):
        parse(ServeConfig, [*engine, "--inference.base_url", URL])
