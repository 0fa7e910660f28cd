"""All suites, by name."""

from suites.llama import LLAMA
from suites.ollama import OLLAMA
from suites.sglang import SGLANG
from suites.suite import Suite
from suites.vllm import VLLM, VLLM_LARGE

SUITES: dict[str, Suite] = {
    suite.name: suite for suite in (LLAMA, OLLAMA, SGLANG, VLLM, VLLM_LARGE)
}
