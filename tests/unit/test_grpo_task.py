"""The reward: exact, and not to be talked into anything."""

from __future__ import annotations

import pytest

from examples.grpo.task import Additions, Prompt

TASK = Additions()
SEVEN = Prompt(text="Question: What is 3 + 4?\nAnswer: ", answer="7")
THIRTEEN = Prompt(text="Question: What is 9 + 4?\nAnswer: ", answer="13")


@pytest.mark.parametrize("completion", ["7", " 7", "7\n", "\t7 \n"])
def test_the_number_alone_earns_everything(completion: str) -> None:
    assert TASK.reward(SEVEN, completion) == 1.0


@pytest.mark.parametrize("completion", ["7.", "7 is it", "7\n7", "7, of course", "7 8 9", "7<|im_end|>", "7\x00"])
def test_the_number_first_earns_half(completion: str) -> None:
    assert TASK.reward(SEVEN, completion) == 0.5


@pytest.mark.parametrize(
    "completion",
    [
        *("", " ", "8", "70", "77", "07", "+7", "-7", "7.5", "7,000", "3 + 4 = 7", "seven"),
        *("\uff17", "\u0667", "0 1 2 3 4 5 6 7", "\ufffd7"),
    ],
)
def test_anything_else_earns_nothing(completion: str) -> None:
    assert TASK.reward(SEVEN, completion) == 0.0


def test_a_digit_of_the_answer_is_not_the_answer() -> None:
    assert TASK.reward(THIRTEEN, "1") == 0.0
    assert TASK.reward(THIRTEEN, "1 3") == 0.0
    assert TASK.reward(THIRTEEN, "13") == 1.0


def test_the_example_is_right() -> None:
    assert TASK.reward(TASK.example, TASK.example.answer) == 1.0


def test_prompts_repeat_with_the_seed_and_change_without_it() -> None:
    assert TASK.prompts(5, 8) == TASK.prompts(5, 8)
    assert TASK.prompts(5, 8) != TASK.prompts(6, 8)


@pytest.mark.parametrize("n", [1, 8, 81, 100])
def test_prompts_are_as_many_as_asked_and_answered_right(n: int) -> None:
    prompts = TASK.prompts(0, n)
    assert len(prompts) == n
    assert len({prompt.text for prompt in prompts}) == min(n, 81)
    for prompt in prompts:
        left, right = prompt.text.removeprefix("Question: What is ").removesuffix("?\nAnswer: ").split(" + ")
        assert int(left) + int(right) == int(prompt.answer)
