"""LangChain's ChatOpenAI, as its integration page has it.  Changed: base_url and api_key."""

import os

from langchain_openai import ChatOpenAI

llm = ChatOpenAI(
    model="gpt-5-nano",
    temperature=0,
    max_tokens=None,
    timeout=None,
    max_retries=2,
    base_url=os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765") + "/v1",
    api_key=os.environ.get("HALLUTRACER_API_KEY", "none"),
)

messages = [
    (
        "system",
        (
            "You are a helpful assistant that translates English to French. Translate the user"
            " sentence."
        ),
    ),
    ("human", "I love programming."),
]
ai_msg = llm.invoke(messages)
print(ai_msg.content)

# A withheld answer has a refusal in additional_kwargs, and the finish reason content_filter in
# response_metadata.
for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    answer = llm.invoke(question)
    if answer.response_metadata["finish_reason"] == "content_filter":
        print(f"{question} refused: {answer.additional_kwargs['refusal']} (content_filter)")
    else:
        print(f"{question} answered: {answer.content}")

# A stream keeps the finish reason and drops the refusal: `hallutracer serve --message-in-content`
# makes it text.
whole = None
for chunk in llm.stream("Which city is the capital of Dominica?"):
    whole = chunk if whole is None else whole + chunk
print(f"streamed: {whole.content or 'no text'} ({whole.response_metadata['finish_reason']})")
