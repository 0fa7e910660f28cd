"""guidellm as it is released: a short run comes to its end, each answer of the length asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clients.asked import MODEL
from clients.environments import run

pytestmark = pytest.mark.soak

REQUESTS = 12
PROMPT_TOKENS = 32
TOKENS = 16


@pytest.fixture(scope="module", params=["/v1/completions", "/v1/chat/completions"])
def benchmark(request, toy, toy_files, tmp_path_factory: pytest.TempPathFactory) -> Any:
    report = tmp_path_factory.mktemp("guidellm") / "report.json"
    run(
        "harnesses", "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={toy.url},request_format={request.param}",
        "--tokenizer", f"kind=hf_auto,model={toy_files}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={TOKENS}",
        "--profile", "kind=concurrent,streams=3",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--output", f"kind=json,path={report}",
        "--disable-console",
        HF_HUB_OFFLINE="1",
        folder=Path(report).parent,
        GUIDELLM__MAX_WORKER_PROCESSES="1",
    )  # fmt: skip
    (found,) = json.loads(report.read_text())["benchmarks"]
    return found


def test_every_request_succeeds(benchmark) -> None:
    counts = benchmark["metrics"]["request_totals"]
    assert counts == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}


def test_every_answer_has_the_tokens_asked_for_and_says_so(benchmark) -> None:
    for request in benchmark["requests"]["successful"]:
        assert json.loads(request["request_args"])["body"]["model"] == MODEL
        assert request["output_metrics"]["text_tokens"] == TOKENS
        assert request["input_metrics"]["text_tokens"] >= PROMPT_TOKENS
        assert request["output"]
