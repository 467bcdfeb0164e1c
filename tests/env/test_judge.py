"""Judges call a model over HTTP, record their usage, and raise JudgeError for unparsable verdicts."""

import asyncio
import socket

import pytest

from ramify.core.errors import ConfigInvalid, JudgeError
from ramify.env import ChatClientConfig, Judge, Task, chat_client
from tests.support.engine import ScriptedEngine, run_engine
from tests.support.rollout_context import make_context

TASK = Task(prompt="What is the capital of Italy?", answer="Rome")
CRITERIA = [{"name": "right", "text": "names Rome", "weight": 3}, {"name": "short", "text": "is one word"}]


@pytest.fixture(scope="module")
def server():
    with run_engine(ScriptedEngine()) as server:
        yield server


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(chat_client, "INITIAL_BACKOFF", 0.01)


def judge(server, **table) -> Judge:
    return Judge.load({"id": "reference", "base_url": f"{server.url}/v1", "model": "judge", **table})


async def test_reference_judge_compares_the_reply_with_the_answer(server):
    server.reset(lambda _: "They say the same.\n**Verdict: CORRECT**")
    context = make_context(TASK, "It is Rome.")
    assert await judge(server).score(TASK, context.trace) == 1.0
    prompt = server.requests[0]["messages"][0]["content"]
    assert all(part in prompt for part in ("capital of Italy", "Rome", "It is Rome."))
    assert (server.requests[0]["model"], server.requests[0]["temperature"]) == ("judge", 0.0)
    server.reset(lambda _: "Not CORRECT as it stands.\nVerdict: INCORRECT")
    assert await judge(server).score(TASK, context.trace) == 0.0


async def test_a_judge_can_be_a_model_of_the_run(server, monkeypatch):
    server.reset(lambda _: "Verdict: CORRECT")
    monkeypatch.setenv("RAMIFY_MODEL_BIG_ONE", f"{server.url} models/big")
    table = {"id": "reference", "base_url": "models.big-one"}
    assert await Judge.load(table).score(TASK, make_context(TASK, "Rome").trace) == 1.0
    assert server.requests[0]["model"] == "models/big"
    with pytest.raises(ConfigInvalid, match=r"the run has no \[models\.other\]"):
        await Judge.load({**table, "base_url": "models.other"}).score(TASK, make_context(TASK, "Rome").trace)
    with pytest.raises(ConfigInvalid, match="model: required"):
        Judge.load({"id": "reference", "base_url": f"{server.url}/v1"})


async def test_a_judge_follows_a_model_of_the_run_to_its_new_address(server, monkeypatch):
    server.reset(lambda _: "Verdict: CORRECT")

    async def move(reader, writer) -> None:
        """Close the connection, like a server that dies and is started elsewhere."""
        chat_client.set_model_address("big", [server.url])
        writer.close()

    async def score() -> float:
        async with await asyncio.start_server(move, "127.0.0.1", 0) as old:
            port = old.sockets[0].getsockname()[1]
            monkeypatch.setenv("RAMIFY_MODEL_BIG", f"http://127.0.0.1:{port} big")
            judge = Judge.load({"id": "reference", "base_url": "models.big"})
            return await judge.score(TASK, make_context(TASK, "Rome").trace)

    assert await score() == 1.0
    assert server.requests[0]["model"] == "big"


async def test_rubric_score_is_the_weighted_mean(server):
    server.reset(lambda _: 'I think {so}.\n```json\n{"right": 1, "short": 0.5}\n```')
    score = await judge(server, id="rubric", criteria=CRITERIA).score(TASK, make_context(TASK, "Rome").trace)
    assert score == pytest.approx((3 * 1 + 1 * 0.5) / 4)
    assert "- right: names Rome" in server.requests[0]["messages"][0]["content"]


async def test_verdicts_and_usage_are_recorded_in_the_trace(server):
    server.reset(lambda _: "Verdict: CORRECT")
    context = make_context(TASK, "Rome")

    await judge(server).score(TASK, context.trace)
    await judge(server).score(TASK, context.trace, reply="another")
    info = context.trace.info["judge"]
    assert (info["calls"], info["prompt"], info["completion"]) == (2, 20, 6)
    assert info["verdicts"][0] == {"judge": "reference", "score": 1.0, "said": "Verdict: CORRECT"}
    assert "another" in server.requests[1]["messages"][0]["content"]


@pytest.mark.parametrize("verdict", ["I cannot say.", "", "Verdict: maybe"])
async def test_unparsable_verdict_raises_and_its_usage_is_counted(server, verdict):
    server.reset(lambda _: verdict)
    context = make_context(TASK, "Rome")
    with pytest.raises(JudgeError, match="expected a last line 'Verdict: CORRECT'"):
        await judge(server).score(TASK, context.trace)
    assert context.trace.info["judge"]["calls"] == 1


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        ("no scores", "expected a JSON object"),
        ('{"right": 1}', "'short'"),
        ('{"right": 7, "short": 1}', "found 7"),
        ('{"right": true, "short": 1}', "found True"),
    ],
)
async def test_unparsable_rubric_scores_raise(server, verdict, message):
    server.reset(lambda _: verdict)
    with pytest.raises(JudgeError, match=message):
        await judge(server, id="rubric", criteria=CRITERIA).score(TASK, make_context(TASK, "Rome").trace)


async def test_busy_judge_is_retried(server):
    server.reset([(503, {}), (429, {}), "Verdict: CORRECT"])
    assert await judge(server).score(TASK, make_context(TASK, "Rome").trace) == 1.0
    assert len(server.requests) == 3


@pytest.mark.parametrize("answer", [(400, {"error": "no"}), (200, {"choices": []})])
async def test_invalid_response_is_not_retried(server, answer):
    server.reset([answer])
    with pytest.raises(JudgeError, match="cannot be reached"):
        await judge(server).score(TASK, make_context(TASK, "Rome").trace)
    assert len(server.requests) == 1


async def test_unreachable_judge_raises():
    with socket.socket() as reserved_socket:
        reserved_socket.bind(("127.0.0.1", 0))
        config = {
            "id": "reference",
            "base_url": f"http://127.0.0.1:{reserved_socket.getsockname()[1]}/v1",
            "model": "m",
        }
        with pytest.raises(JudgeError, match="cannot be reached"):
            await Judge.load(config).score(TASK, make_context(TASK, "Rome").trace)


async def test_judge_that_never_answers_times_out():
    with socket.socket() as silent_socket:
        silent_socket.bind(("127.0.0.1", 0))
        silent_socket.listen()
        base_url = f"http://127.0.0.1:{silent_socket.getsockname()[1]}/v1"
        judge_client = Judge.load({"id": "reference", "base_url": base_url, "model": "m", "timeout": 0.2})
        with pytest.raises(JudgeError, match=r"did not answer within 0\.2 s"):
            await judge_client.score(TASK, make_context(TASK, "Rome").trace)


async def test_api_key_comes_from_an_environment_variable(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    server.reset(lambda _: "Verdict: CORRECT")
    await judge(server, api_key_env="JUDGE_KEY").score(TASK, make_context(TASK, "Rome").trace)
    assert server.api_keys == ["Bearer sk-1"]
    with pytest.raises(ConfigInvalid, match="NO_SUCH_KEY is not set"):
        judge(server, api_key_env="NO_SUCH_KEY")


def test_judge_config_is_validated(server):
    with pytest.raises(ConfigInvalid, match=r"judge\.criteria: required"):
        judge(server, id="rubric")
    with pytest.raises(ConfigInvalid, match="two criteria have the name 'right'"):
        judge(server, id="rubric", criteria=[CRITERIA[0], CRITERIA[0]])
    with pytest.raises(ConfigInvalid, match=r"did you mean judge\.model\?"):
        judge(server, modl="m")
    assert ChatClientConfig(base_url="u", model="m").retries == 2
