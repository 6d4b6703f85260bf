"""A verifiers environment with a tool: tell the weather of a city, which only the tool knows.

The harness is a loop in verifiers' own process. It asks the policy at the endpoint that it is given, as all of them do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai
import verifiers.v1 as vf

__all__ = ["WeatherHarness", "WeatherTaskset"]

WEATHER = {"Rome": "sunny", "Oslo": "snow", "London": "rain", "Cairo": "hot"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class WeatherState(vf.State):
    """The verdict stands here: a trace does not hold what came after its last model call."""

    told: str = ""
    looked: bool = False


class WeatherData(vf.TaskData):
    city: str


class WeatherTask(vf.Task[WeatherData, WeatherState]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(WEATHER[self.data.city] in trace.state.told)

    @vf.reward(weight=0.5)
    async def looked_it_up(self, trace: vf.Trace) -> float:
        return float(trace.state.looked)


class WeatherTaskset(vf.Taskset[WeatherTask]):
    def load(self) -> Iterable[WeatherTask]:
        for city in WEATHER:
            yield WeatherTask(WeatherData(prompt=f"Weather in {city}?", city=city), self.config.task)


class WeatherHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: WeatherData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as api:
            for _ in range(3):
                answer = await api.chat.completions.create(model=ctx.model, messages=messages, tools=[TOOL])
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    trace.state.told = message.content or ""
                    break
                for call in message.tool_calls:
                    arguments = json.loads(call.function.arguments)
                    trace.state.looked = True
                    result = WEATHER.get(str(arguments.get("city")), "no such city")
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return vf.ProgramResult(0, "", "")
