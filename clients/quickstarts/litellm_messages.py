"""LiteLLM with Anthropic's protocol, as its page on Anthropic has it.  Changed: api_base and
api_key."""

import os

import litellm

URL = os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765")
KEY = os.environ.get("HALLUTRACER_API_KEY", "none")

messages = [{"role": "user", "content": "Hey! how's it going?"}]
response = litellm.completion(
    model="anthropic/claude-haiku-4-5-20251001",
    api_base=URL,
    api_key=KEY,
    messages=messages,
    max_tokens=64,
)
print(response)

# A withheld answer has the policy's message as its text, and the finish reason content_filter.
for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    choice = litellm.completion(
        model="anthropic/claude-haiku-4-5-20251001",
        api_base=URL,
        api_key=KEY,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
    ).choices[0]
    if choice.finish_reason == "content_filter":
        print(f"{question} refused: {choice.message.content} (content_filter)")
    else:
        print(f"{question} answered: {choice.message.content}")
