"""OpenAI's Agents SDK, its hello world.  Changed: the client, greedy answers, and no traces are
sent to OpenAI."""

import os

from agents import (
    Agent,
    ModelRefusalError,
    ModelSettings,
    Runner,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_default_openai_client(
    AsyncOpenAI(
        base_url=os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765") + "/v1",
        api_key=os.environ.get("HALLUTRACER_API_KEY", "none"),
    )
)
set_tracing_disabled(True)


def shown(agent: Agent, question: str) -> str:
    """A withheld answer is raised, with the policy's message."""
    try:
        return f"answered: {Runner.run_sync(agent, question).final_output}"
    except ModelRefusalError as error:
        return f"refused: {error.refusal} (content_filter)"


agent = Agent(name="Assistant", instructions="You are a helpful assistant")
print(shown(agent, "Write a haiku about recursion in programming."))

agent = Agent(name="Assistant", model_settings=ModelSettings(temperature=0))
for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    print(question, shown(agent, question))
