"""langchain and langgraph against a server: a chat model, and a graph that calls a tool.

Run by an interpreter that has langchain, langchain-openai and langgraph: `python check_langchain.py http://127.0.0.1:8000`.
"""

import sys
from typing import Annotated, Literal, TypedDict

from features import MAX_TOKENS, MODEL, QUESTION, TOOL_NAME, FeatureReport, check_city, check_weather
from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    is_sunny: bool


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def check_chat_model(model: ChatOpenAI, report: FeatureReport) -> None:
    with report.check("langchain", "tools"):
        reply = model.bind_tools([get_weather], tool_choice="required").invoke(QUESTION)
        (call, *_) = reply.tool_calls
        assert call["name"] == TOOL_NAME
        check_city(call["args"])
        result = ToolMessage("sunny", tool_call_id=call["id"])
        model.bind_tools([get_weather]).invoke([HumanMessage(QUESTION), reply, result])
    with report.check("langchain", "structured output"):
        for method in ("json_schema", "function_calling"):
            weather = model.with_structured_output(Weather, method=method).invoke(QUESTION)
            check_weather(weather.model_dump())
    with report.check("langchain", "streaming"):
        assert "".join(str(part.text) for part in model.stream(QUESTION)) == model.invoke(QUESTION).text
        parts = list(model.bind_tools([get_weather], tool_choice="required").stream(QUESTION))
        whole = parts[0]
        for part in parts[1:]:
            whole += part
        check_city(whole.tool_calls[0]["args"])


def check_graph(model: ChatOpenAI, report: FeatureReport) -> None:
    def call_model(state: State) -> State:
        """Call the tool in the first turn, and answer after its result."""
        has_result = isinstance(state["messages"][-1], ToolMessage)
        bound = model if has_result else model.bind_tools([get_weather], tool_choice="required")
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(State)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "model")
    agent, start = graph.compile(), {"messages": [HumanMessage(QUESTION)]}
    with report.check("langgraph", "tools"):
        messages = agent.invoke(start)["messages"]
        roles = [message.type for message in messages]
        assert roles[:3] == ["human", "ai", "tool"] and roles[-1] == "ai", roles
        assert messages[2].content.startswith("sunny in")
    with report.check("langgraph", "structured output"):
        shaped = StateGraph(State)
        shaped.add_node("shape", lambda state: {"messages": [str(structured.invoke(state["messages"]).model_dump())]})
        structured = model.with_structured_output(Weather, method="json_schema")
        shaped.add_edge(START, "shape")
        assert "is_sunny" in shaped.compile().invoke(start)["messages"][-1].content
    with report.check("langgraph", "streaming"):
        streamed = [message for message, _ in agent.stream(start, stream_mode="messages")]
        assert {message.type for message in streamed} >= {"AIMessageChunk", "tool"}


if __name__ == "__main__":
    report = FeatureReport()
    model = ChatOpenAI(
        model=MODEL, base_url=f"{sys.argv[1]}/v1", api_key="none", max_tokens=MAX_TOKENS, temperature=0, max_retries=0
    )
    check_chat_model(model, report)
    check_graph(model, report)
    report.finish()
