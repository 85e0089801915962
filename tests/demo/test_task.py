"""Tasks from reasoning-gym: names, options, prompts and scores."""

import pytest

from fcoptim.demo.task import Task, check_task, task_names
from fcoptim.demo.train import DEFAULT_TASK


def test_default_exists():
    assert DEFAULT_TASK in task_names()


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("spel_backward", "spell_backward"),
        ("chainsum", "chain_sum"),
        ("zebra", "zebra_puzzles"),
        ("GCD", "gcd"),
        ("coinflip", "coin_flip"),
    ],
)
def test_unknown_name_lists_close_matches(name, close):
    with pytest.raises(ValueError, match=f"no dataset '{name}'; close matches: .*{close}"):
        check_task(name)


def test_a_name_like_no_other_lists_all():
    with pytest.raises(ValueError, match=r"there are ab, acre, .*zebra_puzzles"):
        check_task("@@@@")


@pytest.mark.parametrize("options", [{"no_such_option": 1}, {"min_word_len": 9, "max_word_len": 3}])
def test_refused_options_are_named(options):
    with pytest.raises(ValueError, match=f"refused 'spell_backward' with .*{next(iter(options))}"):
        Task("spell_backward", size=4, options=options)


def test_negative_shots():
    with pytest.raises(ValueError, match="shots must be >= 0; got -1"):
        Task("spell_backward", size=4, shots=-1)


def test_chat_shows_examples_that_are_never_asked():
    task = Task("spell_backward", size=6, seed=5, shots=2)
    entries = task.entries(0, 6)
    chat = task.chat(entries[0])
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert chat[-1]["content"] == entries[0]["question"]
    shown = {message["content"] for message in chat[:-1]}
    assert not shown & {entry["question"] for entry in entries}
    word = chat[1]["content"].rsplit(" ", 1)[-1]
    assert chat[2]["content"] == word[::-1]


def test_seed_chooses_the_questions():
    def questions(seed):
        return [entry["question"] for entry in Task("chain_sum", size=5, seed=seed).entries(0, 5)]

    assert questions(1) == questions(1) != questions(2)
    assert Task("chain_sum", size=5, seed=1).entries(3, 1)[0]["question"] == questions(1)[3]


@pytest.mark.parametrize("name", ["coin_flip", "spell_backward", "chain_sum", "letter_counting"])
def test_rewards_are_the_datasets_own(name):
    task = Task(name, size=3)
    entries = task.entries(0, 3)
    answers = [[f" {entry['answer']}\n", "", "no idea"] for entry in entries]
    for entry, (right, empty, wrong) in zip(entries, task.rewards(answers, entries)):
        assert right == 1.0
        assert 0.0 <= empty < 1.0 and 0.0 <= wrong < 1.0
        assert wrong == task._data.score_answer("no idea", entry)


def test_partial_credit():
    task = Task("spell_backward", size=1, options={"min_word_len": 4, "max_word_len": 4})
    (entry,) = task.entries(0, 1)
    assert task.reward(entry["answer"][:2] + "00", entry) == 0.5


def test_an_answer_the_scorer_stumbles_over_scores_nothing():
    task = Task("chain_sum", size=1)
    assert task.reward("3", {"no": "answer"}) == 0.0
