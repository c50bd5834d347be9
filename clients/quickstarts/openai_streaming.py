"""OpenAI's Python client, streaming a chat as its README has it.  Changed: base_url and api_key."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765") + "/v1",
    api_key=os.environ.get("HALLUTRACER_API_KEY", "none"),
)

stream = client.chat.completions.create(
    model="gpt-4o", messages=[{"role": "user", "content": "Say this is a test"}], stream=True
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="")
print()

# A withheld answer is one chunk with a refusal, and the finish reason content_filter.
for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    said = "answered: "
    for chunk in client.chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": question}], temperature=0, stream=True
    ):
        choice = chunk.choices[0]
        if choice.delta.refusal is not None:
            said = f"refused: {choice.delta.refusal} ({choice.finish_reason})"
        else:
            said += choice.delta.content or ""
    print(question, said)
