"""Judges ask a model over HTTP; what they cost is recorded, and a verdict that cannot be read has a name."""

import socket

import pytest
from starlette.responses import JSONResponse

from ramify.env import ChatClientConfig, Judge, Task, chat_client
from ramify.errors import ConfigInvalid, JudgeError
from tests.env.context import context, run
from tests.env.serving import chat_server

TASK = Task(prompt="What is the capital of Italy?", answer="Rome")
CRITERIA = [{"name": "right", "text": "names Rome", "weight": 3}, {"name": "short", "text": "is one word"}]


@pytest.fixture(scope="module")
def server():
    with chat_server() as found:
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(chat_client, "INITIAL_BACKOFF", 0.01)


def judge(server, **table) -> Judge:
    return Judge.load({"id": "reference", "base_url": server.url, "model": "judge", **table})


def test_a_reference_judge_compares_with_the_answer(server):
    server.reset(lambda body: "They say the same.\n**Verdict: CORRECT**")
    here = context(TASK, "It is Rome.")
    assert run(judge(server).score(TASK, here.trace)) == 1.0
    question = server.asked[0]["messages"][0]["content"]
    assert all(part in question for part in ("capital of Italy", "Rome", "It is Rome."))
    assert (server.asked[0]["model"], server.asked[0]["temperature"]) == ("judge", 0.0)
    server.reset(lambda body: "Not CORRECT as it stands.\nVerdict: INCORRECT")
    assert run(judge(server).score(TASK, here.trace)) == 0.0


def test_a_rubric_is_a_weighted_mean(server):
    server.reset(lambda body: 'I think {so}.\n```json\n{"right": 1, "short": 0.5}\n```')
    score = run(judge(server, id="rubric", criteria=CRITERIA).score(TASK, context(TASK, "Rome").trace))
    assert score == pytest.approx((3 * 1 + 1 * 0.5) / 4)
    assert "- right: names Rome" in server.asked[0]["messages"][0]["content"]


def test_what_a_judge_said_and_cost_is_in_the_trace(server):
    server.reset(lambda body: "Verdict: CORRECT")
    here = context(TASK, "Rome")

    async def twice():
        await judge(server).score(TASK, here.trace)
        await judge(server).score(TASK, here.trace, reply="another")

    run(twice())
    info = here.trace.info["judge"]
    assert (info["calls"], info["prompt"], info["completion"]) == (2, 20, 6)
    assert info["verdicts"][0] == {"judge": "reference", "score": 1.0, "said": "Verdict: CORRECT"}
    assert "another" in server.asked[1]["messages"][0]["content"]


@pytest.mark.parametrize("verdict", ["I cannot say.", "", "Verdict: maybe"])
def test_an_unreadable_verdict_is_named_and_still_paid_for(server, verdict):
    server.reset(lambda body: verdict)
    here = context(TASK, "Rome")
    with pytest.raises(JudgeError, match="expected a last line 'Verdict: CORRECT'"):
        run(judge(server).score(TASK, here.trace))
    assert here.trace.info["judge"]["calls"] == 1


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ("no scores", "expected a JSON object"),
        ('{"right": 1}', "'short'"),
        ('{"right": 7, "short": 1}', "found 7"),
        ('{"right": true, "short": 1}', "found True"),
    ],
)
def test_an_unreadable_rubric_is_named(server, verdict, said):
    server.reset(lambda body: verdict)
    with pytest.raises(JudgeError, match=said):
        run(judge(server, id="rubric", criteria=CRITERIA).score(TASK, context(TASK, "Rome").trace))


def test_a_judge_that_is_busy_is_asked_again(server):
    answers = iter([JSONResponse({}, 503), JSONResponse({}, 429), "Verdict: CORRECT"])
    server.reset(lambda body: next(answers))
    assert run(judge(server).score(TASK, context(TASK, "Rome").trace)) == 1.0
    assert len(server.asked) == 3


@pytest.mark.parametrize("answer", [JSONResponse({"error": "no"}, 400), JSONResponse({"choices": []})])
def test_an_answer_that_is_none_is_not_asked_for_again(server, answer):
    server.reset(lambda body: answer)
    with pytest.raises(JudgeError, match="cannot be reached"):
        run(judge(server).score(TASK, context(TASK, "Rome").trace))
    assert len(server.asked) == 1


def test_a_judge_that_is_not_there_is_named():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        config = {"id": "reference", "base_url": f"http://127.0.0.1:{held.getsockname()[1]}/v1", "model": "m"}
        with pytest.raises(JudgeError, match="ConnectError"):
            run(Judge.load(config).score(TASK, context(TASK, "Rome").trace))


def test_a_judge_that_never_answers_is_given_up():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        base_url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        silent = Judge.load({"id": "reference", "base_url": base_url, "model": "m", "timeout": 0.2})
        with pytest.raises(JudgeError, match=r"did not answer within 0\.2 s"):
            run(silent.score(TASK, context(TASK, "Rome").trace))


def test_the_key_comes_from_the_environment_and_is_not_in_the_config(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    server.reset(lambda body: "Verdict: CORRECT")
    run(judge(server, api_key_env="JUDGE_KEY").score(TASK, context(TASK, "Rome").trace))
    assert server.keys == ["Bearer sk-1"]
    with pytest.raises(ConfigInvalid, match="NO_SUCH_KEY is not set"):
        judge(server, api_key_env="NO_SUCH_KEY")


def test_a_judges_config_is_checked(server):
    with pytest.raises(ConfigInvalid, match=r"judge\.criteria: required"):
        judge(server, id="rubric")
    with pytest.raises(ConfigInvalid, match="two criteria have the name 'right'"):
        judge(server, id="rubric", criteria=[CRITERIA[0], CRITERIA[0]])
    with pytest.raises(ConfigInvalid, match=r"did you mean judge\.model\?"):
        judge(server, modl="m")
    assert ChatClientConfig(base_url="u", model="m").retries == 2
