"""LlamaIndex's OpenAILike, as its page on PyPI has it.  Changed: api_base, api_key and the context
window."""

import os

from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model="model-name",
    api_base=os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765") + "/v1",
    api_key=os.environ.get("HALLUTRACER_API_KEY", "none"),
    # Explicitly set the context window to match the model's context window
    context_window=512,
    # Controls whether the model uses chat or completion endpoint
    is_chat_model=True,
    # Controls whether the model supports function calling
    is_function_calling_model=False,
)

print(llm.complete("Paul Graham is "))

# Of a withheld answer LlamaIndex shows no text, unless the service has --message-in-content; `raw`
# has all of it.
for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
    response = llm.complete(question, temperature=0)
    choice = response.raw.choices[0]
    if choice.finish_reason == "content_filter":
        print(
            f"{question} refused: {choice.message.refusal} (content_filter), shown as:"
            f" {response.text or 'no text'}"
        )
    else:
        print(f"{question} answered: {response.text}")
