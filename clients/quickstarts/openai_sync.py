"""OpenAI's Python client, as its README asks a chat model.  Changed: base_url and api_key."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765") + "/v1",
    api_key=os.environ.get("HALLUTRACER_API_KEY", "none"),
)

completion = client.chat.completions.create(
    model="gpt-5.2",
    messages=[
        {"role": "developer", "content": "Talk like a pirate."},
        {"role": "user", "content": "How do I check if a Python object is an instance of a class?"},
    ],
)

print(completion.choices[0].message.content)

# A withheld answer has a refusal, and the finish reason content_filter.
for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    choice = client.chat.completions.create(
        model="gpt-5.2", messages=[{"role": "user", "content": question}], temperature=0
    ).choices[0]
    if choice.message.refusal is not None:
        print(f"{question} refused: {choice.message.refusal} ({choice.finish_reason})")
    else:
        print(f"{question} answered: {choice.message.content}")
