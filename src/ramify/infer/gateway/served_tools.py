"""The tools of a rollout for an agent that calls them over HTTP.

A tool call is an event of the rollout like a model call: it is recorded in the trace, bounded in time and size, and run
at most once per request id, so a client may send a request again whose response it lost. Calls run one after another,
as in the chat loop, because tools share the rollout's state; only the thread of a tool that is not `async` cannot be
ended, so after a timeout it goes on beside the next call. A failure of the system ends the agent.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from msgspec.structs import replace

from ramify.core.async_calls import cancel_all
from ramify.core.errors import ContextOverflow, PeerRefused, RamifyError
from ramify.infer.gateway.config import REQUEST_TASK_PREFIX
from ramify.infer.gateway.request_dedup import RECONNECT_TIMEOUT, SharedCall
from ramify.trace import Media, MediaPart, Message, ToolCall, Trace

ERROR_PREFIX = "error: "  # how the text of a failed call begins
INFO_KEY = "tool_calls"  # of the trace
MAX_RESULT_BYTES = 4 * 2**20  # of the text and the images of one result
MAX_KEPT_RESULTS = 16  # the last results that a repeated request can get again
MAX_RECORDED_CALLS = 1000  # that a trace has
MAX_RECORDED_CHARS = 1000  # of the arguments and of the result of a call in the trace


class ToolResult(NamedTuple):
    """The tool message of a call, and whether the call failed."""

    message: Message
    is_error: bool


class ServedTools:
    """The tools of one rollout. `run_tool` runs a call as the chat loop does.

    Use it with `async with` around the agent. If `run_tool` raises, the block is cancelled and ends with that failure.
    After the block, calls are refused.
    """

    def __init__(
        self,
        trace: Trace,
        schemas: Sequence[dict[str, Any]],
        run_tool: Callable[[ToolCall], Awaitable[ToolResult]],
    ) -> None:
        self.schemas = schemas
        self.on_call: Callable[[], None] | None = None
        """Called after every call."""
        self._trace, self._run_tool = trace, run_tool
        self._lock = asyncio.Lock()
        self._calls: dict[bytes, SharedCall[ToolResult] | None] = {}  # None: its result is not kept
        self._agent_task: asyncio.Task[Any] | None = None
        self._num_cancels = 0  # of the agent's task, before the block
        self._failure: RamifyError | None = None

    async def __aenter__(self) -> Self:
        self._agent_task = asyncio.current_task()
        assert self._agent_task is not None
        self._num_cancels = self._agent_task.cancelling()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        agent_task, self._agent_task = self._agent_task, None
        assert agent_task is not None
        await cancel_all(call.task for call in self._calls.values() if call is not None)
        if self._failure is not None and agent_task.uncancel() <= self._num_cancels:
            raise self._failure from error

    async def call(self, client: str, call: ToolCall) -> ToolResult:
        """Run a call, or join it if this client has sent it before. `call.id` is the id of the request.

        Raises PeerRefused if the agent has ended or if the result is no longer kept, and the failure of the system with
        which the rollout ends.
        """
        if self._agent_task is None:
            raise PeerRefused(f"the agent of this rollout has ended; its tool {call.name!r} cannot be called any more")
        key = hashlib.sha256(repr((client, call)).encode()).digest()
        if key not in self._calls:
            name = f"{REQUEST_TASK_PREFIX}{self._trace.id}"
            self._calls[key] = SharedCall(self._run(call), RECONNECT_TIMEOUT, name)
            self._forget_old_results()
        shared_call = self._calls[key]
        if shared_call is None:
            raise PeerRefused(f"the tool {call.name!r} has run for this request id, and its result is not kept")
        shared_call.join()
        try:
            await asyncio.wait([shared_call.task])
        finally:
            shared_call.leave(delivered=shared_call.task.done())
        if shared_call.task.cancelled():
            raise PeerRefused(f"the tool {call.name!r} was cancelled: its client disconnected, or the agent has ended")
        return shared_call.task.result()

    def find_media(self, part: MediaPart) -> Media:
        """Return the image of a part of a result."""
        return next(media for media in self._trace.graph.media if media.hash == part.hash)

    def _forget_old_results(self) -> None:
        finished = [key for key, call in self._calls.items() if call is not None and call.task.done()]
        for key in finished[:-MAX_KEPT_RESULTS]:
            self._calls[key] = None

    async def _run(self, call: ToolCall) -> ToolResult:
        async with self._lock:
            start, node = time.time(), len(self._trace.nodes) - 1
            try:
                result = await self._run_tool(call)
            except RamifyError as error:
                self._fail(error)
                raise
            try:
                self._check_size(call, result.message)
            except ContextOverflow as error:
                text = f"{ERROR_PREFIX}{error.name}: {error.message}"
                result = ToolResult(replace(result.message, content=text), is_error=True)
            self._record(call, result, node, start)
        if self.on_call is not None:
            self.on_call()
        return result

    def _fail(self, error: RamifyError) -> None:
        if self._failure is None and self._agent_task is not None:
            self._failure = error
            self._agent_task.cancel()

    def _check_size(self, call: ToolCall, message: Message) -> None:
        parts = () if isinstance(message.content, str) else message.content
        images = [self.find_media(part) for part in parts if isinstance(part, MediaPart)]
        num_bytes = len(message.text.encode()) + sum(len(image.data) for image in images)
        if num_bytes > MAX_RESULT_BYTES:
            limit = f"at most {MAX_RESULT_BYTES} are sent; ask for less"
            raise ContextOverflow(f"the result of {call.name!r} has {num_bytes} bytes, and {limit}")

    def _record(self, call: ToolCall, result: ToolResult, node: int, start: float) -> None:
        """Add a call to the trace. `node` is the last message of the model's conversation before it, or -1."""
        recorded: list[dict[str, Any]] = self._trace.info.setdefault(INFO_KEY, [])
        if len(recorded) < MAX_RECORDED_CALLS:
            recorded.append(
                {
                    "tool": call.name[:MAX_RECORDED_CHARS],
                    "arguments": call.arguments[:MAX_RECORDED_CHARS],
                    "result": result.message.text[:MAX_RECORDED_CHARS],
                    "is_error": result.is_error,
                    "node": node,
                    "start": start,
                    "end": time.time(),
                }
            )
