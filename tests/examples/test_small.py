"""The small tasks and what is measured on them."""

import itertools
import math
import random
import re

import pytest
import torch

from fcoptim.demo import grpo


@pytest.fixture(params=["addition", "zebra"])
def name(request):
    return request.param


def encode_with(words):
    return lambda texts: [words(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_entries_depend_on_their_index_alone(name):
    import small

    task = small.TASKS[name]()
    assert task.entries(5, 20)[7:9] == task.entries(12, 2)
    assert len({entry["question"] for entry in task.entries(0, 500)}) > 490


def test_every_token_comes_back(name):
    import small

    words = small.tokenizer(name)
    for entry in small.TASKS[name]().entries(0, 50):
        text = entry["question"] + entry["answer"]
        ids = words(text)["input_ids"]
        assert words.unk_token_id not in ids and len(ids) == len(text)
        assert words.decode(ids) == text
    message = small.TASKS[name]().chat(entry)
    assert words.apply_chat_template(message, add_generation_prompt=True, tokenize=False) == entry["question"]


def test_sums_are_right():
    import small

    for entry in small.Addition().entries(0, 200):
        one, two = entry["question"].removesuffix("=").split("+")
        assert int(one) + int(two) == int(entry["answer"])


def test_puzzles_have_one_answer():
    """Against a solver of its own, which reads the text of the puzzle."""
    import small

    kinds = dict(small.Zebra.KINDS)
    for entry in small.Zebra().entries(0, 100):
        answers = set()
        for world in itertools.product(*(itertools.permutations(values) for values in kinds.values())):
            place = {value: house for order in world for house, value in enumerate(order)}
            clues = re.findall(r"(\w)([=<@])(\w);", entry["question"])
            if all(_holds(place, *clue) for clue in clues):
                answers.add("".join(world[list(kinds).index(entry["question"][-1])]))
        assert answers == {entry["answer"]}


def _holds(place, one, sign, two):
    if sign == "=":
        return place[one] == place[two]
    return place[one] + 1 == (place[two] if sign == "<" else int(two))


def test_chance_of_the_answer_is_what_sampling_gives(name):
    """``solved`` against 20,000 samples, five sigma; greedy against greedy decoding."""
    import small

    words, task = small.tokenizer(name), small.TASKS[name]()
    model = small.transformer(name, seed=1, width=24, layers=1).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    entries = task.entries(0, 4)
    encode = encode_with(words)
    for _ in range(60):  # enough for these four to be answered at times
        ids, labels = small._batch(*(encode([e[key] for e in entries]) for key in ("question", "answer")))
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if small.solved(model, encode, entries)[0] > 0.3:
            break
    chance, greedy = small.solved(model, encode, entries)
    assert 0.1 < chance < 0.95

    def reward(group, temperature):
        generator = torch.Generator().manual_seed(0)
        prompts = encode([entry["question"] for entry in entries])
        rollout = grpo.sample(
            model, prompts, group=group, max_new_tokens=6, end=0, generator=generator, temperature=temperature
        )
        answers = [
            [words.decode(ids[mask], skip_special_tokens=True) for ids, mask in zip(*row)]
            for row in zip(rollout.completion, rollout.completion_mask)
        ]
        return torch.tensor(task.rewards(answers, entries)).mean()

    sigma = math.sqrt(chance * (1 - chance) / 20_000)
    assert abs(reward(5_000, 1.0) - chance) < 5 * sigma
    assert reward(1, 1e-4) == pytest.approx(greedy)


def test_base_is_trained_to_its_target_on_nothing_held_out(monkeypatch, capsys):
    import small

    known = {entry["question"] for entry in small.held_out(small.Addition())}
    seen = []
    batch = small._batch
    monkeypatch.setattr(small, "HELD_OUT", 200)
    monkeypatch.setattr(small, "_batch", lambda questions, answers: seen.append(questions) or batch(questions, answers))
    monkeypatch.setattr(small.Addition, "entry", lambda self, draw: _easy(draw))
    model, record = small.train_base("addition", seed=0, target=0.5, width=24, layers=1, lr=1e-2, batch=32)
    assert record["steps"] % 20 == 0 and "0." in capsys.readouterr().out
    assert all(p.dtype == torch.bfloat16 for p in model.parameters()) and known and seen


def _easy(draw: random.Random) -> dict:
    return {"question": f"{draw.randrange(1000):03}+000=", "answer": "7"}
