"""LiteLLM's responses, as its page on the Responses API has it.  Changed: api_base and api_key."""

import os

import litellm

URL = os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765") + "/v1"
KEY = os.environ.get("HALLUTRACER_API_KEY", "none")

response = litellm.responses(
    model="openai/gpt-4o",
    api_base=URL,
    api_key=KEY,
    input="Tell me a three sentence bedtime story about a unicorn.",
    max_output_tokens=100,
)
print(response)

# A withheld answer has a part of type refusal, and is incomplete for the reason content_filter.
for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    response = litellm.responses(
        model="openai/gpt-4o", api_base=URL, api_key=KEY, input=question, temperature=0
    )
    if (
        response.incomplete_details is not None
        and response.incomplete_details.reason == "content_filter"
    ):
        refusal = next(
            part.refusal for part in response.output[0].content if part.type == "refusal"
        )
        print(f"{question} refused: {refusal} ({response.incomplete_details.reason})")
    else:
        print(f"{question} answered: {response.output_text}")
print(f"risk: {response.hallutracer['data'][0]['risk']:.2f}")
