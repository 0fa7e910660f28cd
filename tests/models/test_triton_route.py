"""Kernels route tokens to the experts that plain torch routes them to, with the same weights."""

from __future__ import annotations

import random

import pytest
import torch
from support.budget import budget, seeded
from support.triton_interpreter import use_interpreter

if not use_interpreter():
    pytest.skip("there is no Triton here", allow_module_level=True)

from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.kernels import triton_route
from penstock_shard.kernels.triton_route import fits
from penstock_shard.ops.base import Routing, RoutingRule
from penstock_shard.ops.experts import route
from penstock_shard.ops.triton_ops import TritonOps

route_tokens = TritonOps(torch.device("cpu"), torch.float32, "float32", SdpaBackend()).route


def random_rule(rng: random.Random, experts: int) -> RoutingRule:
    groups = rng.choice([1, 1, 2, 4]) if experts in (16, 32) else 1
    top_groups = rng.randint(1, groups)
    return RoutingRule(
        top_k=rng.randint(1, min(8, experts // groups * top_groups)),
        scores=rng.choice(["softmax", "sigmoid"]),
        is_normalised=rng.random() < 0.5,
        scale=rng.choice([1.0, 2.5]),
        eps=rng.choice([1e-20, 1e-6]),
        groups=groups,
        top_groups=top_groups,
    )


def assert_same(found: Routing, expected: Routing) -> None:
    for name in ("tokens", "experts", "offsets", "rows"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-6, atol=1e-9)


def test_tokens_go_to_the_experts_that_plain_torch_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = seeded("routes")
    for _ in range(budget(25, 60)):
        # Fewer than there are tokens: a program reads them bit by bit.
        monkeypatch.setattr(triton_route, "_TOKENS", rng.choice([2, 8, 256]))
        experts, tokens = rng.choice([1, 3, 16, 32, 60]), rng.choice([1, 2, 7, 16, 33])
        generator = torch.Generator().manual_seed(rng.randrange(2**32))
        logits = torch.randn(tokens, experts, generator=generator) * rng.choice([0.5, 4.0])
        bias = None
        rule = random_rule(rng, experts)
        if rule.scores == "sigmoid" and rng.random() < 0.5:
            bias = torch.randn(experts, generator=generator)
        assert fits(experts, rule.groups)
        assert_same(route_tokens(logits, rule, bias), route(logits, rule, bias))


def test_equal_scores_go_to_the_lower_expert() -> None:
    routing = route_tokens(torch.zeros(3, 6), RoutingRule(2))
    assert routing.experts.tolist() == [0, 0, 0, 1, 1, 1]
    assert routing.rows.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert routing.tokens.tolist() == [0, 1, 2, 0, 1, 2]
    assert routing.offsets.tolist() == [0, 3, 6, 6, 6, 6, 6]


def test_a_token_whose_logits_are_no_numbers_goes_somewhere_and_has_no_numbers_as_weights() -> None:
    """The token's rows must be rows, and other tokens must not change."""
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    logits[1], logits[2] = torch.nan, -torch.inf
    routing = route_tokens(logits, RoutingRule(2))
    assert sorted(routing.rows.flatten().tolist()) == list(range(8))
    assert routing.offsets[-1] == 8
    assert routing.weights[1:3].isnan().all()
    alone = route_tokens(logits[:1], RoutingRule(2))
    assert torch.equal(routing.weights[0], alone.weights[0])
    assert torch.equal(routing.experts[routing.rows[0]], alone.experts[alone.rows[0]])


def test_groups_that_are_no_blocks_are_left_to_plain_torch() -> None:
    assert fits(160, 1)
    assert fits(256, 8)
    assert not fits(24, 3)
    assert not fits(160, 8)
    assert not fits(4, 4)
    logits = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    rule = RoutingRule(2, groups=3, top_groups=2)
    assert_same(route_tokens(logits, rule), route(logits, rule))
