"""Two small verifiable tasks and a small transformer trained from scratch to partial skill on one of them.

    python examples/small.py addition --seed 0 --target 0.35 --out runs/bases/addition-0

The folder holds a Hugging Face model, rounded to bf16, and its tokenizer, which ``examples/grpo.py --model`` takes.
"""

import argparse
import functools
import itertools
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HELD_OUT = 8192  # entries from the first on that no training sees; a question drawn again is passed over


class OneAnswer:
    """A task whose questions have one right answer; each entry is made from its index alone."""

    def entries(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return the entries ``first <= i < first + count``: a question and its answer each."""
        return [self.entry(random.Random(index)) for index in range(first, first + count)]

    def entry(self, draw: random.Random) -> dict[str, Any]:
        """Draw one entry."""
        raise NotImplementedError

    def chat(self, entry: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the message that asks an entry's question."""
        return [{"role": "user", "content": entry["question"]}]

    def rewards(self, answers: Iterable[Iterable[str]], entries: Iterable[Mapping[str, Any]]) -> list[list[float]]:
        """Score a group of answers for each entry: 1 if it is the answer, else 0."""
        return [[float(answer == entry["answer"]) for answer in group] for group, entry in zip(answers, entries)]


class Addition(OneAnswer):
    """Sums of two numbers, ``"123+456="``.

    Args:
        digits: Of each number. Default 3.
    """

    def __init__(self, digits: int = 3) -> None:
        self.digits = digits

    def entry(self, draw: random.Random) -> dict[str, Any]:
        """Draw one entry."""
        one, two = (draw.randrange(10**self.digits) for _ in range(2))
        return {"question": f"{one:0{self.digits}}+{two:0{self.digits}}=", "answer": str(one + two)}


class Zebra(OneAnswer):
    """Zebra puzzles of three houses in a row, each with a person, a colour and a pet.

    Clues are true statements that together leave one answer: ``"A=r;"`` (A lives in the red house), ``"A<d;"`` (A's
    house is next to that of the dog, to its left), ``"d@2;"`` (the dog is in house 2). The question is the order of the
    persons, colours or pets, ``"?p"``.
    """

    KINDS: Mapping[str, str] = {"n": "ABC", "c": "rgb", "p": "dfh"}

    def entry(self, draw: random.Random) -> dict[str, Any]:
        """Draw one entry."""
        worlds, clues, holds, answers = _puzzles()
        world = draw.randrange(len(worlds))
        kind = draw.choice(sorted(self.KINDS))
        true = np.flatnonzero(holds[:, world]).tolist()
        draw.shuffle(true)
        left, chosen = np.ones(len(worlds), dtype=bool), []
        for clue in true:
            fewer = left & holds[clue]
            if fewer.sum() < left.sum():
                left, chosen = fewer, [*chosen, clues[clue]]
            if len(set(answers[kind][left])) == 1:
                break
        return {"question": f"{''.join(chosen)}?{kind}", "answer": str(answers[kind][world])}


@functools.cache
def _puzzles() -> tuple[list[Any], list[str], np.ndarray, dict[str, np.ndarray]]:
    """All worlds, all clues, which clue holds in which world, and each world's answers."""
    worlds = list(itertools.product(*(itertools.permutations(values) for values in Zebra.KINDS.values())))
    places = [{value: house for order in world for house, value in enumerate(order)} for world in worlds]
    values = "".join(Zebra.KINDS.values())
    found: dict[str, list[bool]] = {}
    for one, two in itertools.permutations(values, 2):
        found[f"{one}={two};"] = [place[one] == place[two] for place in places]
        found[f"{one}<{two};"] = [place[one] + 1 == place[two] for place in places]
    for one, house in itertools.product(values, range(3)):
        found[f"{one}@{house + 1};"] = [place[one] == house for place in places]
    holds = np.array(list(found.values()))
    answers = {kind: np.array(["".join(world[number]) for world in worlds]) for number, kind in enumerate(Zebra.KINDS)}
    return worlds, list(found), holds, answers


TASKS: Mapping[str, Any] = {"addition": Addition, "zebra": Zebra}
_ALPHABET = {"addition": "0123456789+=", "zebra": "ABCrgbdfh=<@123;?ncp"}


def tokenizer(task: str) -> PreTrainedTokenizerFast:
    """One token for each character of a task, with a chat template that only joins the messages."""
    words = ["<end>", "<unk>", *_ALPHABET[task]]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[^<]|<"), "isolated")
    made.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<end>",
        pad_token="<end>",
        unk_token="<unk>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def transformer(task: str, *, seed: int, width: int = 96, layers: int = 3) -> LlamaForCausalLM:
    """A Llama of ``12 * layers * width**2`` weights, in fp32, from a seed."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(_ALPHABET[task]) + 2,
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=layers,
            num_attention_heads=width // 24,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def held_out(task: OneAnswer) -> list[dict[str, Any]]:
    """The entries that no training sees."""
    return task.entries(0, HELD_OUT)


def solved(model: Any, encode: Any, entries: list[dict[str, Any]]) -> tuple[float, float]:
    """How often a model answers right: by sampling at temperature 1, exactly, and greedily.

    An answer is right if it is the one right text and ends there, so the chance to sample it is the product of the
    chances of its tokens, the end of turn included; and it is the greedy answer if each of them is the likeliest.

    Args:
        model: Causal language model.
        encode: From texts to lists of token ids.
        entries: With ``"question"`` and ``"answer"``.
    """
    sampled = greedy = 0.0
    for first in range(0, len(entries), 512):
        some = entries[first : first + 512]
        ids, labels = _batch(encode([e["question"] for e in some]), encode([e["answer"] for e in some]))
        with torch.no_grad():
            logits = model(input_ids=ids.to(model.device)).logits[:, :-1].float().cpu()
        wanted, asked = labels[:, 1:].clamp(min=0), labels[:, 1:] >= 0
        chances = torch.log_softmax(logits, -1).gather(-1, wanted[..., None])[..., 0]
        sampled += float((chances * asked).sum(1).exp().sum())
        greedy += float(((logits.argmax(-1) == wanted) | ~asked).all(1).sum())
    return sampled / len(entries), greedy / len(entries)


def _batch(questions: list[list[int]], answers: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, padded on the right with the end token, and labels: -100 but on the answer and one end token."""
    width = max(len(q) + len(a) for q, a in zip(questions, answers)) + 1
    ids = torch.zeros(len(questions), width, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, (question, answer) in enumerate(zip(questions, answers)):
        ends = len(question) + len(answer)
        ids[row, :ends] = torch.tensor(question + answer)
        labels[row, len(question) : ends] = torch.tensor(answer)
        labels[row, ends] = 0
    return ids, labels


def train_base(
    name: str, *, seed: int, target: float, width: int = 96, layers: int = 3, lr: float = 1e-3, batch: int = 256
) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Train a transformer on a task's answers until it samples the right one for a share of fresh entries.

    Args:
        name: Of the task.
        seed: Of the weights and the order of the entries.
        target: Share of right answers at which to stop.
        width: Of the transformer.
        layers: Of the transformer.
        lr: AdamW's learning rate.
        batch: Entries in each step.

    Returns:
        The model, its weights rounded to bf16, and what it reached.
    """
    task, model, words = TASKS[name](), transformer(name, seed=seed, width=width, layers=layers), tokenizer(name)
    encode = lambda texts: words(texts)["input_ids"]  # noqa: E731
    known = {entry["question"] for entry in held_out(task)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    order = random.Random(f"{name}/{seed}")
    reached, step = 0.0, 0
    while reached < target:
        entries = [task.entry(order) for _ in range(batch)]
        entries = [entry for entry in entries if entry["question"] not in known]
        ids, labels = _batch(encode([e["question"] for e in entries]), encode([e["answer"] for e in entries]))
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            reached, _ = solved(model, encode, task.entries(HELD_OUT, 512))
            print(f"{name} {seed}: step {step}, {reached:.3f}", flush=True)
    return model.bfloat16(), {"task": name, "seed": seed, "steps": step, "width": width, "layers": layers}


def save_base(name: str, out: Path, **options: Any) -> None:
    """Train a transformer and save it with its tokenizer, whole or not at all."""
    model, record = train_base(name, **options)
    partial = out.with_name(out.name + ".partial")
    model.save_pretrained(partial)
    tokenizer(name).save_pretrained(partial)
    (partial / "base.json").write_text(json.dumps(record) + "\n")
    partial.rename(out)


def main() -> None:
    """Train and save a base model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.35)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_base(args.task, args.out, seed=args.seed, target=args.target, width=args.width, layers=args.layers)


if __name__ == "__main__":
    main()
