"""Judges call a model over HTTP, pay for each reply once, and raise JudgeError for verdicts that cannot be read."""

import asyncio
import json
import socket

import pytest

from ramify.core.errors import ConfigInvalid, JudgeError
from ramify.env import ChatClientConfig, Judge, Task, chat_client
from ramify.env.judges.cache import cache_directory
from tests.support.engine import ScriptedEngine, run_engine
from tests.support.rollout_context import make_context

TASK = Task(prompt="What is the capital of Italy?", answer="Rome")
CRITERIA = [{"name": "right", "text": "names Rome", "weight": 3}, {"name": "short", "text": "is one word"}]


CORRECT, INCORRECT = (json.dumps({"reason": "compared", "correct": correct}) for correct in (True, False))


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
    server.reset(lambda _: f"They say the same.\n```json\n{CORRECT}\n```")
    context = make_context(TASK, "It is Rome.")
    assert await judge(server).score(TASK, context.trace) == 1.0
    prompt = server.requests[0]["messages"][0]["content"]
    assert all(part in prompt for part in ("capital of Italy", "Rome", "It is Rome."))
    assert (server.requests[0]["model"], server.requests[0]["temperature"]) == ("judge", 0.0)
    server.reset(lambda _: INCORRECT)
    assert await judge(server).score(TASK, context.trace) == 0.0


async def test_a_judge_can_be_a_model_of_the_run(server, monkeypatch):
    server.reset(lambda _: CORRECT)
    monkeypatch.setenv("RAMIFY_MODEL_BIG_ONE", f"{server.url} models/big")
    table = {"id": "reference", "base_url": "models.big-one"}
    assert await Judge.load(table).score(TASK, make_context(TASK, "Rome").trace) == 1.0
    assert server.requests[0]["model"] == "models/big"
    with pytest.raises(ConfigInvalid, match=r"the run has no \[models\.other\]"):
        await Judge.load({**table, "base_url": "models.other"}).score(TASK, make_context(TASK, "Rome").trace)
    with pytest.raises(ConfigInvalid, match="model: required"):
        Judge.load({"id": "reference", "base_url": f"{server.url}/v1"})


async def test_a_judge_follows_a_model_of_the_run_to_its_new_address(server, monkeypatch):
    server.reset(lambda _: CORRECT)

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
    server.reset(lambda _: 'I think {so}.\n```json\n{"reason": "{", "scores": {"right": 1, "short": 0.5}}\n```')
    score = await judge(server, id="rubric", criteria=CRITERIA).score(TASK, make_context(TASK, "Rome").trace)
    assert score == pytest.approx((3 * 1 + 1 * 0.5) / 4)
    assert "- right: names Rome" in server.requests[0]["messages"][0]["content"]
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["reason", "scores"]
    assert schema["properties"]["scores"]["required"] == ["right", "short"]


async def test_any_judge_scores_a_group(server):
    server.reset(lambda prompt: CORRECT if "It is Rome." in prompt else INCORRECT)
    traces = [make_context(TASK, reply).trace for reply in ("It is Rome.", "Paris", "It is Rome.")]
    assert await judge(server).score_group(TASK, traces) == [1.0, 0.0, 1.0]


async def test_verdicts_are_recorded_in_the_trace(server):
    server.reset(lambda _: CORRECT)
    context = make_context(TASK, "Rome")
    await judge(server).score(TASK, context.trace)
    await judge(server).score(TASK, context.trace, reply="another")
    assert context.trace.info["judge"] == [{"judge": "reference", "score": 1.0, "text": CORRECT}] * 2
    assert "another" in server.requests[1]["messages"][0]["content"]


async def test_calls_tokens_and_cost_are_metrics_of_the_trace(server):
    server.reset(lambda _: CORRECT)
    trace = make_context(TASK, "Rome").trace
    paid_judge = judge(server, prompt_price=2.0, completion_price=8.0)
    for _ in range(2):
        await paid_judge.score(TASK, trace)
    seconds = trace.metrics["judge/seconds"]
    assert seconds > 0
    assert trace.metrics == {
        "judge/calls": 2,
        "judge/cached": 0,
        "judge/prompt_tokens": 20,
        "judge/completion_tokens": 6,
        "judge/seconds": seconds,
        "judge/cost": pytest.approx((20 * 2 + 6 * 8) / 1e6),
    }


# -- repair -----------------------------------------------------------------------------------------------------------


async def test_a_verdict_that_cannot_be_read_is_repaired_once(server):
    server.reset(["It is correct.", CORRECT])
    trace = make_context(TASK, "Rome").trace
    assert await judge(server).score(TASK, trace) == 1.0
    first, reply, repair = server.requests[1]["messages"]
    assert (first, reply["content"]) == (server.requests[0]["messages"][0], "It is correct.")
    assert "expected a JSON object, found 'It is correct.'" in repair["content"]
    assert trace.metrics["judge/calls"] == 2


@pytest.mark.parametrize("verdict", ["I cannot say.", "", '{"correct": "maybe"}', "[1]"])
async def test_a_verdict_that_stays_unreadable_raises_and_its_calls_are_counted(server, verdict):
    server.reset(lambda _: verdict)
    trace = make_context(TASK, "Rome").trace
    with pytest.raises(JudgeError, match="the verdict of the judge 'reference' cannot be read"):
        await judge(server).score(TASK, trace)
    assert trace.metrics["judge/calls"] == len(server.requests) == 2
    assert "judge" not in trace.info


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        ("no scores", "expected a JSON object"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "expected a JSON object"),
        ('{"right": 1, "short": 1}', "found None"),
        ('{"scores": {"right": 1}}', "'short'"),
        ('{"scores": {"right": 7, "short": 1}}', "found 7"),
        ('{"scores": {"right": true, "short": 1}}', "found True"),
        ('{"scores": [1, 1]}', "found None"),
    ],
)
async def test_unreadable_rubric_scores_raise(server, verdict, message):
    server.reset(lambda _: verdict)
    with pytest.raises(JudgeError, match=message):
        await judge(server, id="rubric", criteria=CRITERIA).score(TASK, make_context(TASK, "Rome").trace)


# -- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path):
    """Let judges cache their replies, as in a run."""
    token = cache_directory.set(tmp_path)
    yield
    cache_directory.reset(token)


@pytest.fixture
def score_reply(server):
    async def score(reply: str, **table) -> tuple[float, dict[str, float]]:
        trace = make_context(TASK, reply).trace
        return await judge(server, **table).score(TASK, trace), trace.metrics

    return score


@pytest.mark.usefixtures("cached")
async def test_the_same_question_is_asked_once(server, score_reply):
    server.reset(lambda _: CORRECT)
    score, metrics = await score_reply("Rome")
    assert (score, metrics["judge/calls"], metrics["judge/cached"]) == (1.0, 1, 0)
    score, metrics = await score_reply("Rome")
    assert (score, metrics["judge/calls"], metrics["judge/cached"], metrics["judge/prompt_tokens"]) == (1.0, 0, 1, 0)
    assert len(server.requests) == 1


@pytest.mark.usefixtures("cached")
async def test_a_repaired_verdict_is_cached(server, score_reply):
    server.reset(["It is correct.", CORRECT])
    assert [(await score_reply("Rome"))[0] for _ in range(3)] == [1.0] * 3
    assert len(server.requests) == 2


@pytest.mark.usefixtures("cached")
async def test_an_unreadable_verdict_is_not_cached(server, score_reply):
    server.reset(["What?", "What?", CORRECT])
    with pytest.raises(JudgeError):
        await score_reply("Rome")
    assert (await score_reply("Rome"))[0] == 1.0


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"temperature": 0.5}, {"max_tokens": 99}, {"id": "rubric", "criteria": CRITERIA}],
)
async def test_another_model_sampling_or_rubric_is_another_question(server, score_reply, change):
    server.reset(lambda _: '{"correct": true, "scores": {"right": 1, "short": 1}}')
    await score_reply("Rome")
    await score_reply("Rome", **change)
    assert len(server.requests) == 2


@pytest.mark.usefixtures("cached")
async def test_another_price_limit_or_weight_is_the_same_question(server, score_reply):
    server.reset(lambda _: '{"scores": {"right": 1, "short": 0}}')
    heavy = [{**criterion, "weight": 1} for criterion in CRITERIA]
    assert (await score_reply("Rome", id="rubric", criteria=CRITERIA))[0] == 0.75
    keys = {"prompt_price": 1.0, "concurrency": 1, "requests_per_minute": 5, "timeout": 7}
    assert (await score_reply("Rome", id="rubric", criteria=heavy, **keys))[0] == 0.5
    assert len(server.requests) == 1


@pytest.mark.usefixtures("cached")
async def test_calls_at_the_same_time_share_one_reply(server):
    server.reset(lambda _: CORRECT)
    traces = [make_context(TASK, "Rome").trace for _ in range(8)]
    assert await judge(server).score_group(TASK, traces) == [1.0] * 8
    assert len(server.requests) == 1
    assert sum(trace.metrics["judge/cached"] for trace in traces) == 7


@pytest.mark.usefixtures("cached")
async def test_after_a_failure_only_failed_calls_are_repeated(server):
    server.reset(lambda prompt: (400, "no") if "Paris" in prompt else CORRECT)
    traces = [make_context(TASK, reply).trace for reply in ("Rome", "Paris", "Roma")]
    with pytest.raises(JudgeError):
        await judge(server).score_group(TASK, traces)
    server.reset(lambda _: CORRECT)
    assert await judge(server).score_group(TASK, traces) == [1.0] * 3
    assert len(server.requests) == 1


async def test_without_a_run_and_with_cache_mib_0_nothing_is_cached(server, score_reply, tmp_path):
    server.reset(lambda _: CORRECT)
    await score_reply("Rome")
    token = cache_directory.set(tmp_path)
    await score_reply("Rome", cache_mib=0)
    cache_directory.reset(token)
    assert (len(server.requests), list(tmp_path.iterdir())) == (2, [])


# -- the endpoint -----------------------------------------------------------------------------------------------------


async def test_busy_judge_is_retried(server):
    server.reset([(503, {}), (429, {}), CORRECT])
    assert await judge(server).score(TASK, make_context(TASK, "Rome").trace) == 1.0
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("answer", "tried"),
    [((400, {"error": "no"}), [True, False]), ((401, {"error": "no"}), [True]), ((200, {"choices": []}), [True])],
)
async def test_invalid_response_is_not_retried(server, answer, tried):
    server.reset(lambda _: answer)
    with pytest.raises(JudgeError, match="cannot be reached"):
        await judge(server).score(TASK, make_context(TASK, "Rome").trace)
    assert ["response_format" in request for request in server.requests] == tried


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
    server.reset(lambda _: CORRECT)
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
