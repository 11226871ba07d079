"""Advantages, packing, the loss and its gradient, on a Llama of a few thousand parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from examples.grpo.grpo import Group, Trainer, advantages, pack, surrogate, token_logprobs
from examples.grpo.parity import Checker, ParityFailed, scores
from examples.grpo.rollout import Sample


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def sample(*tokens: int, logprob: float = -1.0) -> Sample:
    return Sample(tokens=tokens, logprobs=(logprob,) * len(tokens))


GROUPS = [
    Group(prompt=(1, 5, 9), samples=(sample(7, 3), sample(8), sample(7, 4, 2)), rewards=(1.0, 0.0, 0.5)),
    Group(prompt=(1, 6), samples=(sample(2), sample(11, 12, 13, 14)), rewards=(0.0, 1.0)),
]


def test_advantages_are_centred_and_scaled() -> None:
    values = advantages([1.0, 0.0, 0.0, 1.0])
    assert values == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-3)
    assert sum(advantages([0.3, 0.1, 1.0])) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [0.1] * 3, [0.5]])
def test_equal_rewards_teach_nothing(rewards: list[float]) -> None:
    assert advantages(rewards) == [0.0] * len(rewards)


def test_packed_logprobs_equal_those_of_each_sequence_alone(model: Any) -> None:
    packed = token_logprobs(model, pack(GROUPS))
    alone = []
    for group in GROUPS:
        for each in group.samples:
            logits = model(torch.tensor([[*group.prompt, *each.tokens]])).logits[0].log_softmax(-1)
            alone += [logits[len(group.prompt) - 1 + i, token] for i, token in enumerate(each.tokens)]
    assert torch.allclose(packed, torch.stack(alone), atol=1e-5)


def test_the_advantage_reaches_every_token_of_its_sample() -> None:
    batch = pack(GROUPS)
    assert batch.advantage.tolist() == pytest.approx(
        [a for g in GROUPS for a, s in zip(advantages(g.rewards), g.samples, strict=True) for _ in s.tokens]
    )
    assert batch.target.tolist() == [token for g in GROUPS for s in g.samples for token in s.tokens]


def test_the_gradient_on_policy_is_the_policy_gradient() -> None:
    new = torch.tensor([-0.5, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64)
    surrogate(new, new.detach(), advantage, 0.2).sum().backward()
    assert new.grad is not None
    assert torch.allclose(new.grad, -advantage)


def test_the_clip_stops_what_went_too_far_and_only_that() -> None:
    behaviour = torch.zeros(4, dtype=torch.float64)
    new = torch.tensor([0.5, -0.5, 0.5, -0.5], dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    surrogate(new, behaviour, advantage, 0.2).sum().backward()
    assert new.grad is not None
    assert (new.grad != 0).tolist() == [False, True, True, False]


def test_the_loss_agrees_with_finite_differences(model: Any) -> None:
    model.double()
    batch = pack(GROUPS)

    def loss() -> torch.Tensor:
        # A wide clip: a finite difference across its corner would not be a derivative.
        new = token_logprobs(model, batch).double()
        return surrogate(new, batch.behaviour.double(), batch.advantage.double(), 1e9).mean()

    loss().backward()
    step = 1e-3  # token_logprobs works in float32: a smaller step would measure its rounding
    probes = {"model.layers.0.self_attn.k_proj.weight": (1, 2), "model.layers.1.mlp.up_proj.weight": (3, 0)}
    for name, index in probes.items():
        weight = dict(model.named_parameters())[name]
        with torch.no_grad():
            weight[index] += step
            above = loss().item()
            weight[index] -= 2 * step
            below = loss().item()
            weight[index] += step
        assert weight.grad[index].item() == pytest.approx((above - below) / (2 * step), rel=2e-2, abs=1e-4)


def test_an_update_makes_good_samples_likelier_and_bad_ones_rarer(model: Any) -> None:
    batch = pack(GROUPS)
    with torch.no_grad():
        before = token_logprobs(model, batch)
    drawn = iter(before.tolist())
    groups = [
        Group(
            prompt=g.prompt,
            samples=tuple(Sample(tokens=s.tokens, logprobs=tuple(next(drawn) for _ in s.tokens)) for s in g.samples),
            rewards=g.rewards,
        )
        for g in GROUPS
    ]
    trainer = Trainer(model, learning_rate=1e-3)
    update = trainer.update(groups)
    with torch.no_grad():
        after = token_logprobs(model, batch)
    assert update.groups == 2
    assert ((after - before) * batch.advantage).sum() > 0


def test_without_a_usable_group_the_weights_stay(model: Any) -> None:
    before = [weight.clone() for weight in model.parameters()]
    group = Group(prompt=(1, 2), samples=(sample(3), sample(4)), rewards=(1.0, 1.0))
    assert Trainer(model, learning_rate=1.0).update([group]).groups == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_scores_are_those_of_the_rounded_weights(model: Any) -> None:
    tokens = [1, 5, 9, 7]
    before = [weight.clone() for weight in model.parameters()]
    got = scores(model, tokens, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    assert torch.allclose(got, scores(model, tokens, torch.float32), atol=1e-6)


def test_parity_passes_for_the_right_weights_and_measures_the_stale_ones(model: Any) -> None:
    checker = Checker(model, [1, 5, 9, 7], engine_dtype="float32", weight_dtype=torch.float32)
    first = scores(model, checker.tokens, torch.float32).tolist()
    assert [each.stale for each in checker.check({"engine-0": first, "engine-1": first})] == [None, None]
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    now = scores(model, checker.tokens, torch.float32).tolist()
    for second in checker.check({"engine-0": now, "engine-1": now}):
        assert second.max_abs_dlogprob == 0.0
        assert second.stale is not None
        assert second.tolerance is not None
        assert second.stale > second.tolerance


@pytest.mark.parametrize("wrong", [0.01, float("nan"), float("inf")])
def test_parity_fails_for_other_weights(model: Any, wrong: float) -> None:
    checker = Checker(model, [1, 5, 9, 7], engine_dtype="float32", weight_dtype=torch.float32)
    right = scores(model, checker.tokens, torch.float32).tolist()
    engine = [*right]
    engine[1] += wrong
    with pytest.raises(ParityFailed, match=r"engine-1 differ .*token 2"):
        checker.check({"engine-0": right, "engine-1": engine})
