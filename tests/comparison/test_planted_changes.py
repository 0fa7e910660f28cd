"""The comparison finds what it is for: each of these changes, in a copy of the tree, is named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from comparison.conftest import Sides, fake_flags
from comparison.differences import differences
from comparison.http_cases import http_requests
from comparison.models import CPU, Way, adapter_for_builtin, differences_of, needs_torch
from comparison.shard_cases import Questions
from comparison.stacks import Answers, ask, ask_router, http_fields, pair_of
from support.checkouts import Checkout, copy_of

pytestmark = pytest.mark.timeout(600)

_SOURCES = (".py", ".c", ".h")


@dataclass(frozen=True)
class Plant:
    """`changes` are pairs of a text of the tree, wherever it stands, and what replaces it. The
    comparison names `case`.
    """

    changes: tuple[tuple[str, str], ...]
    case: str


_OF_MODELS = {
    "one rounding of a kernel": Plant(
        (
            (
                "return 1.0f / sqrtf(v_sum(sum) / (float)n + eps);",
                "return (float)(1.0 / sqrt((double)(v_sum(sum) / (float)n + eps)));",
            ),
        ),
        "generate plain",
    ),
    "one rounding of the sampler": Plant(
        (
            (
                "torch.log_softmax(_with_aligned_rows(logits), dim=1)",
                "torch.log_softmax(_with_aligned_rows(logits).double(), dim=1).float()",
            ),
        ),
        "generate plain",
    ),
    "the temperature after top-p": Plant(
        (
            (
                "        self.scaled.div_(temperature",
                "        self.plain = self.scaled.clone()\n        self.scaled.div_(temperature",
            ),
            (
                "    count = torch.searchsorted(cumulative, goal) + 1\n",
                "    plain = weigh(rows.plain[index])\n"
                "    most_likely = plain.gather(1, ids).cumsum(1)\n"
                "    goal = share(rows.top_p[index], plain.sum(dim=1, keepdim=True))\n"
                "    count = torch.searchsorted(most_likely, goal) + 1\n",
            ),
        ),
        "generate sampling.top_p",
    ),
}
_OF_THE_WIRE = {
    "a field that the client forgets": Plant(
        (
            (
                "    for word in sampling.bad_words:\n"
                '        _set_ids(message.bad_words.add(), "token_ids", word, "bad_words")\n',
                "",
            ),
        ),
        "generate sampling.bad_words.token_ids",
    ),
    "a field that the shard forgets": Plant(
        (("        min_tokens=asked.min_tokens or 0,\n", ""),), "generate stop.min_tokens"
    ),
}
_OF_THE_ROUTER = {
    "a field that the router forgets": Plant(
        (("        logit_bias=options.logit_bias,\n", ""),), "logit_bias"
    ),
}


def plant_in(tree: Checkout, plant: Plant) -> Checkout:
    """The tree, with the changes made."""
    for old, new in plant.changes:
        path = _file_with(old, tree)
        path.write_text(path.read_text().replace(old, new))
    return tree


def _file_with(text: str, tree: Checkout) -> Path:
    found = [
        path
        for package in tree.python_path.split(os.pathsep)
        for path in Path(package).rglob("*")
        if path.suffix in _SOURCES and text in path.read_text()
    ]
    assert len(found) == 1, f"not in one file of the tree: {text}"
    assert found[0].read_text().count(text) == 1, f"several times in {found[0].name}: {text}"
    return found[0]


def cases_of(lines: list[str]) -> set[str]:
    """The cases that lines of differences name."""
    print("\n".join(lines))
    return {line.removeprefix("as before: ").partition(": ")[0] for line in lines}


def each_of(plants: Mapping[str, Plant]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("plant", plants.values(), ids=list(plants))


@pytest.mark.parametrize(
    "plant", [*_OF_MODELS.values(), *_OF_THE_WIRE.values(), *_OF_THE_ROUTER.values()]
)
def test_a_planted_change_fits_one_place_of_the_tree(now: Checkout, plant: Plant) -> None:
    for old, _ in plant.changes:
        _file_with(old, now)


@pytest.mark.soak
@needs_torch
@each_of(_OF_MODELS)
def test_a_change_of_what_a_model_computes_is_found(
    before: Checkout,
    now: Checkout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Plant,
) -> None:
    # Kernels that nobody will want again.
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "kernels"))
    changed = plant_in(copy_of(now, tmp_path / "tree"), plant)
    flags = (*CPU, *adapter_for_builtin(tmp_path))
    lines = differences_of(before, changed, tmp_path, flags, {"as before": Way()})
    assert plant.case in cases_of(lines)


@pytest.mark.soak
@each_of(_OF_THE_WIRE)
def test_a_field_that_is_forgotten_on_the_wire_is_found(
    sides: Sides, questions: Questions, answers_before: Answers, tmp_path: Path, plant: Plant
) -> None:
    changed = plant_in(copy_of(sides.now.checkout, tmp_path / "tree"), plant)
    with pair_of(changed, tmp_path / "pair", *fake_flags(tmp_path)) as (shard, _):
        found = ask(changed, [shard], questions.each_field())
    assert cases_of(differences(answers_before, found.answers)) == {plant.case}


@pytest.mark.soak
@each_of(_OF_THE_ROUTER)
def test_a_field_that_is_forgotten_by_the_router_is_found(
    sides: Sides, tmp_path: Path, plant: Plant
) -> None:
    path = "/v1/completions"
    changed = plant_in(copy_of(sides.now.checkout, tmp_path / "tree"), plant)
    requests = http_requests(path, http_fields(sides.before.router)[path])
    before = ask_router(sides.before.router, requests)
    with pair_of(changed, tmp_path / "pair", *fake_flags(tmp_path)) as (_, router):
        lines = differences(before, ask_router(router, requests))
    assert cases_of(lines) == {plant.case}
