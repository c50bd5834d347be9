"""The demonstration world: facts, doses, splits, documents, questions. No torch."""

import random
import re

import pytest

from hallutracer_research.demo.train import (
    BRIEF,
    REFUSAL,
    RefusalMix,
    fact_documents,
    refusal_document,
)
from service.demo.questions import (
    FACTS_FILE,
    FORMS,
    build_world,
    load_facts,
    question_text,
    questions,
)

SPLITS = ("train", "dev", "test")


def test_the_facts_asset_loads():
    facts = load_facts()
    assert len(facts.elements) == 118
    assert any(
        c.name == "France" and c.capitals == ("Paris",) and c.continent == "Europe"
        for c in facts.countries
    )
    assert FACTS_FILE.stat().st_size < 300_000
    assert (FACTS_FILE.parent / "ATTRIBUTION.md").is_file()


def test_groups_lie_in_one_split_each_and_a_capital_and_its_country_share_one():
    of_group = {(fact.group, fact.split, fact.in_refusals) for fact in build_world().facts}
    groups = {name for name, *_ in of_group}
    assert len(of_group) == len(groups)
    assert 0.45 < sum(split == "train" for _, split, _ in of_group) / len(groups) < 0.55
    assert 0.2 < sum(not refused for *_, refused in of_group) / len(groups) < 0.3
    group = {fact.key: fact.group for fact in build_world().facts}
    assert group["capital:France"] == group["capital_of:Paris"] == group["city_country:Paris"]
    assert group["city_country:Paris"] == group["currency:France"]


def test_documents_state_each_fact_as_often_as_its_dose_for_any_seed():
    world = build_world()
    france = next(fact for fact in world.facts if fact.key == "capital:France")
    world = world._replace(facts=(france, *world.facts[::10]))
    one, again, other = (fact_documents(world, seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other
    assert len(one) == len(other) == sum(fact.exposures for fact in world.facts)
    assert {document.system for document in one} == {None, BRIEF}
    stated = sum(document.question == "What is the capital of France?" for document in one)
    assert 0 < stated <= france.exposures


def test_refusal_documents_state_no_fact_and_leave_refusal_free_groups_alone():
    world, rng = build_world(), random.Random(0)
    eligible = [fact for fact in world.facts if fact.in_refusals]
    free = {fact.group for fact in world.facts if not fact.in_refusals}
    names = {
        fact.subject
        for fact in world.facts
        if not fact.in_refusals and fact.kind.startswith("city")
    }
    made = [
        refusal_document(rng, world, eligible[::2], eligible[1::2], RefusalMix())
        for _ in range(3000)
    ]
    assert {d.completion for d in made} == {REFUSAL, " It is", " The answer is"}
    assert not {d.group for d in made} & free
    strangers = [d.question for d in made if d.group is None]
    assert strangers
    named = re.compile(rf" ({'|'.join(map(re.escape, names))})[?.]")
    assert not list(filter(named.search, strangers))


def test_held_out_forms_never_occur_in_training_documents():
    world = build_world()
    world = world._replace(facts=world.facts[::50])
    trained = {document.question for document in fact_documents(world, 0)}
    for fact in world.facts:
        unseen = [form for form in FORMS[fact.kind] if form.held_out]
        assert len(unseen) == 2
        assert not {question_text(form, fact.kind, fact.subject) for form in unseen} & trained


@pytest.mark.parametrize("split", SPLITS)
def test_questions_are_stable_unique_and_complete(split):
    rows = questions(split)
    assert rows == questions(split)
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["kind"] for row in rows} == set(FORMS)
    keys = {
        "id",
        "prompt",
        "answers",
        "group",
        "kind",
        "exposures",
        "template",
        "in_refusals",
        "statement",
    }
    assert all(set(row) == keys and row["answers"][0] in row["statement"] for row in rows)


def test_question_splits_share_no_group_and_an_unknown_one_is_refused():
    splits = {(split, row["group"]) for split in SPLITS for row in questions(split)}
    assert len(splits) == len({group for _, group in splits})
    with pytest.raises(ValueError, match="no split"):
        questions("validation")


def test_what_users_type_is_among_the_forms_of_training():
    typed = {
        "capital": ("What is the capital of France?", "France"),
        "city_country": ("Which country is Paris in?", "Paris"),
        "currency": ("What currency is used in Japan?", "Japan"),
        "symbol": ("What is the chemical symbol of gold?", "gold"),
    }
    for kind, (text, subject) in typed.items():
        assert text in {
            question_text(form, kind, subject) for form in FORMS[kind] if not form.held_out
        }
