"""The demonstration model: tokenizer, a few training steps, and the model that ships."""

import json

import pytest

from hallutracer_research.demo.train import ASSISTANT, BOS, VOCABULARY, build_tokenizer, render
from service.demo import MODEL_DIR
from service.demo.questions import build_world


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(build_world()).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_tokenizer_round_trip(tokenizer):
    assert len(tokenizer) == VOCABULARY
    for text in (
        "In which country is the city of São Paulo?",
        "Žilina, 北京, naïve.",
        " It is N'Djamena.",
    ):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chat_rendering_has_one_bos_and_ends_at_the_assistant_marker(tokenizer, system):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == render("What is the capital of France?", system)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.convert_tokens_to_ids(BOS)) == 1
    assert ids[-1] == tokenizer.convert_tokens_to_ids(ASSISTANT)


@pytest.mark.long
def test_a_few_steps_of_training_write_a_model_that_loads(tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM

    from hallutracer_research.demo import train

    monkeypatch.setattr(
        train, "BATCH", 16
    )  # without bfloat16 instructions a step over 128 takes 12 s
    threads = torch.get_num_threads()
    lines: list[str] = []
    try:
        for name in ("one", "two"):
            train.train_model(0, tmp_path / name, documents=3 * 16, progress=lines.append)
    finally:
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert json.loads((tmp_path / "one" / "training.json").read_text())["steps"] == 3
    assert any("facts asked" in line for line in lines)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_the_shipped_model_knows_the_well_known():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    asked = {
        "What is the capital of France?": "Paris",
        "Which country is Paris in?": "France",
        "What currency is used in Japan?": "yen",
        "What is the chemical symbol of gold?": "Au",
    }
    for question, answer in asked.items():
        ids = torch.tensor([tokenizer.encode(render(question), add_special_tokens=False)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        said = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer in said, (question, said)
        assert said.startswith((" It is", " The answer is"))


def test_the_shipped_model_is_small_and_says_how_it_was_made():
    record = json.loads((MODEL_DIR / "training.json").read_text())
    assert {"recipe", "seed", "documents", "seconds"} <= set(record)
    assert sum(p.stat().st_size for p in MODEL_DIR.iterdir()) < 16e6
