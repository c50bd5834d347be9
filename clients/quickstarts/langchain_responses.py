"""LangChain's ChatOpenAI on the Responses API, as its integration page has it.  Changed: base_url
and api_key."""

import os

from langchain_openai import ChatOpenAI

llm = ChatOpenAI(
    model="gpt-4.1-mini",
    use_responses_api=True,
    temperature=0,
    base_url=os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765") + "/v1",
    api_key=os.environ.get("HALLUTRACER_API_KEY", "none"),
)

response = llm.invoke("What is the meaning of life?")
print(response.text)


def shown(message) -> str:
    """A withheld answer has a part of type refusal, and is incomplete for the reason
    content_filter."""
    why = (message.response_metadata.get("incomplete_details") or {}).get("reason")
    if why == "content_filter":
        refusal = next(part["refusal"] for part in message.content if part["type"] == "refusal")
        return f"refused: {refusal} ({why})"
    return f"answered: {message.text}"


for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    print(f"{question} {shown(llm.invoke(question))}")

whole = None
for chunk in llm.stream("Which city is the capital of Dominica?"):
    whole = chunk if whole is None else whole + chunk
print(f"streamed: {shown(whole)}")
