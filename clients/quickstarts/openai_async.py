"""OpenAI's asyncio client, as its README has it for chats.  Changed: base_url and api_key."""

import asyncio
import os

from openai import AsyncOpenAI

client = AsyncOpenAI(
    base_url=os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765") + "/v1",
    api_key=os.environ.get("HALLUTRACER_API_KEY", "none"),
)


async def main() -> None:
    chat_completion = await client.chat.completions.create(
        messages=[{"role": "user", "content": "Say this is a test"}], model="gpt-4o"
    )
    print(chat_completion.choices[0].message.content)

    # A withheld answer has a refusal, and the finish reason content_filter.
    for question in ("What is the capital of China?", "Which city is the capital of Dominica?"):
        answer = await client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": question}], temperature=0
        )
        choice = answer.choices[0]
        if choice.message.refusal is not None:
            print(f"{question} refused: {choice.message.refusal} ({choice.finish_reason})")
        else:
            print(f"{question} answered: {choice.message.content}")


asyncio.run(main())
