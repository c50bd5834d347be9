"""LiteLLM, as its page on OpenAI-compatible endpoints has it.  Changed: api_base and api_key."""

import os

import litellm

URL = os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765") + "/v1"
KEY = os.environ.get("HALLUTRACER_API_KEY", "none")

response = litellm.completion(
    model="openai/mistral",  # add `openai/` prefix to model so litellm knows to route to OpenAI
    api_key=KEY,  # api key to your openai compatible endpoint
    api_base=URL,  # set API Base of your Custom OpenAI Endpoint
    messages=[{"role": "user", "content": "Hey, how's it going?"}],
)
print(response)

# A withheld answer has a refusal in provider_specific_fields, and the finish reason content_filter.
for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    choice = litellm.completion(
        model="openai/mistral",
        api_key=KEY,
        api_base=URL,
        messages=[{"role": "user", "content": question}],
        temperature=0,
    ).choices[0]
    if choice.finish_reason == "content_filter":
        print(
            f"{question} refused: {choice.message.provider_specific_fields['refusal']}"
            " (content_filter)"
        )
    else:
        print(f"{question} answered: {choice.message.content}")
