"""docs/engines.md says what each engine honours."""

from __future__ import annotations

import re
from pathlib import Path

from penstock_shard.vllm_engine.requests import CAPABILITIES as OF_VLLM
from penstock_shard.worker.capabilities import CAPABILITIES

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text("utf-8")


def test_the_page_says_of_each_field_whether_vllm_honours_it() -> None:
    section = PAGE.partition("## What each honours")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| yes \| (.*) \|$", section, re.MULTILINE)
    told = {
        name: verdict != "no" for names, verdict in rows for name in re.findall(r"`(\w+)`", names)
    }
    assert told.keys() <= CAPABILITIES
    assert told == {name: name in OF_VLLM for name in told}
    assert not (CAPABILITIES - told.keys()) & OF_VLLM
