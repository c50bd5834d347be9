"""LangChain's ChatAnthropic, as its integration page has it.  Changed: base_url and api_key."""

import os

from langchain_anthropic import ChatAnthropic

model = ChatAnthropic(
    model="claude-haiku-4-5-20251001",
    temperature=0,
    max_tokens=64,
    timeout=None,
    max_retries=2,
    base_url=os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765"),
    api_key=os.environ.get("HALLUTRACER_API_KEY", "none"),
)

messages = [
    ("system", "You are a helpful translator. Translate the user sentence to French."),
    ("human", "I love programming."),
]
print(model.invoke(messages).text)


def shown(message) -> str:
    """A withheld answer has the policy's message as its text, and the stop reason refusal."""
    why = message.response_metadata["stop_reason"]
    return f"refused: {message.text} ({why})" if why == "refusal" else f"answered: {message.text}"


for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    answer = model.invoke(question)
    print(f"{question} {shown(answer)}")
print(f"risk: {answer.response_metadata['hallutracer']['data'][0]['risk']:.2f}")

whole = None
for chunk in model.stream("Which city is the capital of Dominica?"):
    whole = chunk if whole is None else whole + chunk
print(f"streamed: {shown(whole)}")
