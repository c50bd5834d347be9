"""A small chat template with tools, for the tiny tokenizer; calls, as Qwen2.5 and Hermes write
them, and no calls."""

TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}{%"
    " if m.tool_calls %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls"
    ' %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments |'
    " tojson }}}\n</tool_call>\n{% endfor %}{% elif m.role == 'tool' %}tool: {{ m.content }}\n{%"
    " else %}{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<|assistant|>{% endif %}"
)
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "Pâris"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
SECRET = "Paris"
# What a model is made to write, and whether that is nothing but calls.
FORCED = {
    "a call": (CALL, True),
    "two": (f"{CALL}\n{ADD}", True),
    "text behind": (f"{CALL} {SECRET}", False),
    "text": (f"It is {SECRET}.", False),
    "cut": (CALL[:-1], False),
}
