"""Chat templates in files of their own, from a shard's directory to the prompt of a router."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import Router, Shard, running

from penstock_client import SyncShardClient

BUILTIN = Path(__file__).parents[2] / "shard" / "penstock_shard" / "builtin_model"
TEMPLATES = {
    "chat_template.jinja": "plain:{{ messages[0].content }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools | length }}:{{ messages[0].content }}",
    "additional_chat_templates/rag.jinja": "{{ documents | length }} documents",
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def shard_with(templates: dict[str, str], directory: Path) -> Shard:
    model = shutil.copytree(BUILTIN, directory / "model")
    (model / "additional_chat_templates").mkdir()
    for name, source in templates.items():
        (model / name).write_text(source)
    return Shard(directory / "log", "--runner", "fake", "--model", str(model))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    service = shard_with(TEMPLATES, tmp_path_factory.mktemp("shard"))
    with running(service):
        yield service


def prompt_of(router: Router, **fields: Any) -> str:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "add_special_tokens": False}
    status, text = router.ask("/tokenize", asked | fields)
    assert status == 200, text
    status, text = router.ask("/detokenize", {"tokens": json.loads(text)["tokens"]})
    assert status == 200, text
    prompt: str = json.loads(text)["prompt"]
    return prompt


def test_templates_in_files_of_their_own_reach_routers_and_tool_use_is_taken_with_tools(
    shard: Shard, tmp_path: Path
) -> None:
    with SyncShardClient(shard.address) as client:
        files = client.tokenizer_files()
    assert {name: files[name].decode() for name in TEMPLATES} == TEMPLATES
    router = Router(tmp_path / "router", [shard.address])
    with running(router):
        assert prompt_of(router) == "plain:Hi"
        assert prompt_of(router, tools=[TOOL]) == "1:Hi"


def test_a_further_template_is_part_of_what_shards_must_have_alike(
    shard: Shard, tmp_path: Path
) -> None:
    changed = {**TEMPLATES, "additional_chat_templates/rag.jinja": "other documents"}
    other, infos = shard_with(changed, tmp_path), []
    with running(other):
        for service in (shard, other):
            with SyncShardClient(service.address) as client:
                infos.append(client.info())
    assert infos[0].weights_hash == infos[1].weights_hash
    assert infos[0].tokenizer_hash != infos[1].tokenizer_hash
