"""The taskset openenv against a server that speaks the protocol."""

import asyncio
import contextlib
import sys

import pytest
from aiohttp import web

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env.adapters.openenv import LocalServer
from ramify.infer.gateway import Gateway
from ramify.rollout import Environment, SourceConfig, run_attempt
from tests.env.adapters.openenv_stand_in import StandInServer
from tests.support.attempts import error_names, scripted_policy


@contextlib.asynccontextmanager
async def serving(server: StandInServer):
    runner = web.AppRunner(server.app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def load(url: str, **keys) -> Environment:
    table = {"id": "openenv", "base_url": url, "action_field": "message", "observation_field": "text", **keys}
    return Environment.load(SourceConfig.model_validate({"taskset": table, "timeouts": {"setup": 10}}))


async def rollout(env: Environment, gateway: Gateway, replies: list[str], number: int = 0) -> rf.Trace:
    task = next(env.iter_tasks())
    async with asyncio.timeout(90):
        episode = await run_attempt(env, task, policy=scripted_policy(replies), gateway=gateway, id=f"r{number}")
    return episode.traces[0]


@pytest.fixture
async def gateway():
    async with Gateway() as gateway:
        yield gateway


@pytest.mark.process
async def test_observations_are_messages_and_replies_are_actions(gateway):
    async with serving(StandInServer()) as url:
        trace = await rollout(load(url, instructions="Count."), gateway, ["one", "two"])
    assert [(node.message.role, node.message.text) for node in trace.nodes] == [
        *(("system", "Count."), ("user", "step 0"), ("assistant", "one")),
        *(("user", "step 1"), ("assistant", "two")),
    ]
    assert (trace.stop, trace.reward, trace.metrics["steps"]) == ("done", 3.0, 2.0)


async def test_tools_of_an_mcp_environment_are_offered_and_called(gateway):
    call = '<tool_call>{"name": "echo", "arguments": {"message": "hi"}}</tool_call>'
    bad_call = '<tool_call>{"name": "echo", "arguments": {}}</tool_call>'
    async with serving(StandInServer(tools=("echo",), length=9)) as url:
        trace = await rollout(load(url), gateway, [call, call + bad_call, "It said hi."])
    roles = [node.message.role for node in trace.nodes]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert '"message": "hi"' in trace.nodes[2].message.text
    assert (trace.stop, trace.reward, trace.metrics["steps"]) == ("done", 6.0, 3.0)


async def test_calls_after_the_end_of_an_episode_are_not_sent(gateway):
    async with serving(StandInServer(tools=("echo",), length=1)) as url:
        calls = 2 * '<tool_call>{"name": "echo", "arguments": {}}</tool_call>'
        trace = await rollout(load(url), gateway, [calls])
    assert (error_names(trace), trace.stop, trace.reward) == ([], "done", 1.0)


async def test_more_rollouts_than_sessions_wait(gateway):
    server = StandInServer(max_sessions=8)
    async with serving(server) as url:
        env = load(url)
        traces = await asyncio.gather(*(rollout(env, gateway, ["one", "two"], n) for n in range(32)))
    assert [error_names(trace) for trace in traces] == [[]] * 32
    assert [trace.reward for trace in traces] == [3.0] * 32
    assert server.most_open <= 8 and any(trace.info["session_waits"] for trace in traces)


async def test_session_that_ends_is_a_named_failure(gateway):
    async with serving(StandInServer(ends_at_step=1)) as url:
        trace = await rollout(load(url), gateway, ["one", "two"])
    assert error_names(trace) == ["EnvironmentFault"]
    assert "ended the session" in trace.errors[0].message


async def test_reply_that_is_no_action_is_answered_and_ends_the_rollout(gateway):
    async with serving(StandInServer()) as url:
        env = load(url, action_field=None, max_invalid_actions=3)
        trace = await rollout(env, gateway, ["hello", "[1]", '{"text": "x"}'])
    assert (trace.stop, trace.reward, error_names(trace)) == ("invalid_action", 0.0, [])
    assert [node.message.text for node in trace.nodes if "not a valid action" in node.message.text]


async def test_unreachable_server_is_named(gateway):
    trace = await rollout(load("http://127.0.0.1:9"), gateway, [])
    assert "the OpenEnv server at http://127.0.0.1:9 cannot be reached" in trace.errors[0].message


def test_one_server_must_be_named():
    with pytest.raises(ConfigInvalid, match="set one of base_url, command and image"):
        load("http://127.0.0.1:9", command=["server"])


@pytest.mark.process
async def test_local_server_is_started_again_after_it_was_killed():
    server = LocalServer([sys.executable, "-m", "http.server", "{port}"], startup_timeout=60)
    try:
        first = await server.get_base_url()
        first_pid = server.pid
        assert await server.get_base_url() == first
        server.stop()
        await server.get_base_url()
        assert server.pid != first_pid
    finally:
        server.stop()


@pytest.mark.process
async def test_server_that_exits_is_named():
    server = LocalServer([sys.executable, "-c", "raise SystemExit(3)"], startup_timeout=60)
    with pytest.raises(EnvironmentFault, match="exited with 3 while it started"):
        await server.get_base_url()
