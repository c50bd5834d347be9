"""Haystack's OpenAIChatGenerator, as its documentation has it.  Changed: api_base_url and
api_key."""

import os

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

messages = [ChatMessage.from_user("What's Natural Language Processing?")]

client = OpenAIChatGenerator(
    api_base_url=os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765") + "/v1",
    api_key=Secret.from_token(os.environ.get("HALLUTRACER_API_KEY", "none")),
)
response = client.run(messages)
print(response)

# Of a withheld answer Haystack keeps the finish reason, and text where the service has
# --message-in-content.
for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    reply = client.run([ChatMessage.from_user(question)], generation_kwargs={"temperature": 0})[
        "replies"
    ][0]
    if reply.meta["finish_reason"] == "content_filter":
        print(f"{question} refused: {reply.text or 'no text'} (content_filter)")
    else:
        print(f"{question} answered: {reply.text}")
