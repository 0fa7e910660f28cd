"""Several models behind one router: `model` picks, by names of shards and of the router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import Router, Shard, running, wait_until


class Fleet:
    """Two models, one of them on two shards."""

    def __init__(self, logs: Path) -> None:
        fast = ("--step-ms", "2", "--served-model-name")
        self.one = [
            Shard(logs / f"one{index}", *fast, "org/one", "uno", "--fake-weights", "1")
            for index in range(2)
        ]
        self.two = Shard(logs / "two", *fast, "two", "--fake-weights", "2")
        self.shards = [*self.one, self.two]
        aliases = ("--model-alias", "chatty=org/one", "--model-alias", "deux=two")
        # A request that is on its way when its shard dies waits for another one for so long.
        patience = ("--failover-timeout-s", "2")
        addresses = [shard.address for shard in self.shards]
        self.router = Router(logs / "router", addresses, *aliases, *patience)

    def get(self, path: str) -> Any:
        return json.loads(self.router.ask(path)[1])

    def complete(self, model: str | None, prompt: str = "Hello") -> tuple[int, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 12, "seed": 1}
        status, answer = self.router.ask("/v1/completions", body)
        return status, json.loads(answer)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("models"))
    with running(*made.shards, made.router):
        wait_until(
            lambda: len({card["root"] for card in made.get("/v1/models")["data"]}) == 2,
            timeout_s=20,
            what="both models",
        )
        yield made


def test_every_name_of_every_model_is_listed(fleet: Fleet) -> None:
    cards = {card["id"]: card["root"] for card in fleet.get("/v1/models")["data"]}
    assert cards == {
        **{"org/one": "org/one", "uno": "org/one", "chatty": "org/one"},
        **{"two": "two", "deux": "two"},
    }
    assert fleet.get("/v1/models/org/one")["id"] == "org/one"
    assert fleet.get("/v1/models/deux")["root"] == "two"


def test_the_models_name_picks_the_weights_whichever_name_it_is(fleet: Fleet) -> None:
    texts: dict[str, str] = {}
    for model, served in (("org/one", "org/one"), ("uno", "org/one"), ("chatty", "org/one"),
                          ("two", "two"), ("deux", "two")):  # fmt: skip
        status, answer = fleet.complete(model)
        assert status == 200
        assert answer["model"] == served
        texts[model] = answer["choices"][0]["text"]
    assert texts["org/one"] == texts["uno"] == texts["chatty"]
    assert texts["two"] == texts["deux"]
    assert texts["org/one"] != texts["two"]


def test_a_name_that_nobody_has_is_unknown(fleet: Fleet) -> None:
    status, answer = fleet.complete("three")
    assert (status, answer["error"]["param"]) == (404, "model")
    assert "`three`" in answer["error"]["message"]


# The last one: nobody needs that model any more.
def test_a_model_whose_shards_are_gone_is_away_and_the_other_goes_on(fleet: Fleet) -> None:
    assert fleet.complete("two")[0] == 200
    assert fleet.complete("org/one")[0] == 200
    fleet.two.process.kill()
    wait_until(lambda: fleet.complete("two")[0] == 503, timeout_s=20, what="two to be away")
    assert fleet.complete("deux")[0] == 503
    assert fleet.complete("chatty")[0] == 200
