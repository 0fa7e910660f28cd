"""Chat templates of released models: which format each shows, and its calls read back.

They are unpacked for the soak from a released source, and nothing of them is copied here.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.vendored_templates import vendored_templates
from unit.router.formats.test_round_trip import CALLS, TOOLS, model_of

from penstock_router.apis.chat_messages import MESSAGES
from penstock_router.request import ChatRequest, ToolChoice
from penstock_router.text.answer_pieces import PieceKind, join_pieces
from penstock_router.text.answer_reader import make_reader
from penstock_router.text.marks import NO_MARKS
from penstock_router.text.prompts import render

_REAL = vendored_templates()
# The formats of calls and of reasoning; "": none.
_SHOWN = {
    "Apertus-8B-Instruct": ("apertus", "apertus"),
    "Apriel-1.6-15b-Thinker-fixed": ("tool_calls", "apriel"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "think"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed"),
    "Cohere2MoE": ("cohere", "cohere_text"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", ""),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "cohere"),
    "GLM-4.6": ("glm", "think"),
    "GLM-4.7-Flash": ("glm", "think"),
    "GigaChat3-10B-A1.8B": ("gigachat3", ""),
    "GigaChat3.1-10B-A1.8B": ("gigachat3", ""),
    "HuggingFaceTB-SmolLM3-3B": ("plain_json", "think"),
    "Kimi-K2-Instruct": ("kimi_k2", ""),
    "Kimi-K2-Thinking": ("kimi_k2", "think"),
    "Kimi-K3": ("kimi_k3", "kimi_k3"),
    "LFM2-8B-A1B": ("lfm2", ""),
    "LFM2.5-8B-A1B": ("lfm2", "think"),
    "LFM2.5-Instruct": ("lfm2", "think"),
    "MiMo-VL": ("hermes", ""),
    "MiniMax-M1": ("minimax_m1", ""),
    "MiniMax-M2": ("minimax_m2", "think"),
    "MiniMax-M3": ("minimax_m3", "minimax_m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral_named", ""),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen_xml", "think"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", ""),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", ""),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", ""),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen_xml", ""),
    "Qwen3.5-4B": ("qwen_xml", "think"),
    "Reka-Edge": ("hermes", "think"),
    "Spark2.5": ("glm", "think"),
    "StepFun3.5-Flash": ("qwen_xml", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_dsml", "think"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek_dsml", "think"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_dsml", "think"),
    "fireworks-ai-llama-3-firefunction-v2": ("functools", ""),
    "google-gemma-2-2b-it": ("plain_json", ""),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma4"),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "think_response"),
    "ibm-granite-granite-4.0": ("hermes", ""),
    "ibm-granite-granite-4.1": ("hermes", ""),
    "inclusionai-ling-3.0-flash": ("glm", "think"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "think"),
    "llama-cpp-rwkv-world": ("plain_json", "think"),
    "meetkai-functionary-medium-v3.1": ("functionary_v3_1", ""),
    "meetkai-functionary-medium-v3.2": ("functionary_v3_2", ""),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama_json", ""),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama_json", ""),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama_json", ""),
    "microsoft-Phi-3.5-mini-instruct": ("plain_json", ""),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral_named", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", ""),
    "moonshotai-Kimi-K2": ("kimi_k2", ""),
    "muse-glimmer": ("muse_glimmer", "muse_glimmer"),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "openbmb-MiniCPM5-1B": ("minicpm5", "think"),
    "poolside-Laguna-S-2.1": ("glm", "think"),
    "poolside-Laguna-XS-2.1": ("glm", "think"),
    "poolside-Laguna-XS.2": ("glm", "think"),
    "tencent-Hy3": ("hy_v3", "hy_v3"),
    "unsloth-Apriel-1.5": ("tool_calls", "apriel"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral_named", ""),
    "upstage-Solar-Open-100B": ("solar_open", "solar_open"),
}
# Of these the calls are in words, or their form of earlier turns is none that models write; Llama's
# count only where an answer begins.
_NOT_READ_BACK = {
    *("HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct"),
    *(name for name in _SHOWN if name.startswith("meta-llama")),
    *("llama-cpp-rwkv-world", "GigaChat3-10B-A1.8B", "Kimi-K2-Instruct", "Kimi-K2-Thinking"),
}
# These refuse what is asked here, with any server.
_REFUSING = {
    *("CohereForAI-c4ai-command-r-plus-tool_use", "llama-cpp-deepseek-r1"),
    "fireworks-ai-llama-3-firefunction-v2",
}


@pytest.mark.soak
def test_every_real_template_is_known_here() -> None:
    assert _REAL.keys() == _SHOWN.keys()


@pytest.mark.soak
@pytest.mark.parametrize("name", _REAL)
def test_a_real_template_shows_its_formats(name: str) -> None:
    assert model_of(_REAL[name]).conventions.names == _SHOWN[name]


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(_REAL.keys() - _NOT_READ_BACK - _REFUSING))
def test_calls_of_earlier_turns_are_written_as_the_model_writes_them(name: str) -> None:
    model = model_of(_REAL[name])
    functions: list[dict[str, Any]] = [
        {"name": function, "arguments": arguments} for function, arguments in CALLS
    ]
    calls = [
        {"id": f"call_{at}", "type": "function", "function": function}
        for at, function in enumerate(functions)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"Result {at}"}
        for at, call in enumerate(calls)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    chat = [{"role": "user", "content": "Look!"}, message, *results]
    asked = ChatRequest(
        messages=MESSAGES.read("messages", chat), tools=TOOLS, tool_choice=ToolChoice("auto")
    )
    told = "".join(render(asked, model)).rpartition("Look!")[2]
    reader = make_reader(model.conventions, TOOLS, NO_MARKS, begun=False)
    said = told.partition("Result 0")[0]
    pieces = join_pieces([*reader.feed(said), *reader.flush()])
    read = [piece.text for piece in pieces if piece.kind is PieceKind.CALL]
    assert read in ([name for name, _ in CALLS], [CALLS[0][0]]), said
