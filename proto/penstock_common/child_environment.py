"""The environment of child processes: only variables of Python, libraries and devices, because
others may be secrets. The code that starts a child names the other variables that the child needs.
"""

from __future__ import annotations

import os

_NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TMP", "TEMP"),
        *("LANG", "LANGUAGE", "TZ", "TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CC", "CXX", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("HF_HOME", "DO_NOT_TRACK", "DISABLE_TELEMETRY"),
        *("PENSTOCK_CACHE", "PENSTOCK_LOAD_CACHE", "PENSTOCK_TRUSTED_DIRECTORIES"),
        *("PENSTOCK_STATE", "PENSTOCK_CPU_LEVEL"),
    )
)
_PREFIXES = (
    *("LC_", "LD_", "DYLD_", "MALLOC_", "XDG_", "PYTHON", "RUST_", "RAYON_", "TOKENIZERS_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "ROCR_", "HIP_", "HSA_", "TORCH", "PYTORCH_"),
    *("TRITON_", "FLASH_ATTENTION_", "TRANSFORMERS_", "SAFETENSORS_", "HF_HUB_", "HF_XET_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "VECLIB_", "GRPC_"),
    # Libraries for networks between ranks.
    *("NCCL_", "GLOO_", "UCX_", "FI_", "IBV_", "RDMAV_", "MLX5_", "NVSHMEM_"),
)

# Groups of variables that only some children need. A name that ends with "_" is a prefix.
_PROXY_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "grpc_proxy", "no_grpc_proxy")
# Proxy addresses may have passwords.
PROXIES = (*_PROXY_NAMES, *map(str.upper, _PROXY_NAMES))
HUB = (*PROXIES, "HF_ENDPOINT", "HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_")
VLLM = ("VLLM_", "RAY_", "FLASHINFER_", "TVM_")
# OTLP headers may have a collector's key.
TRACES = (*PROXIES, "OTEL_")


def child_environment(*needed: str) -> dict[str, str]:
    names = _NAMES.union(needed)
    prefixes = (*_PREFIXES, *(name for name in needed if name.endswith("_")))
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(prefixes)
    }


def reduce_environment(*needed: str) -> None:
    """Keep only common and `needed` variables in this process's own environment, which children of
    `multiprocessing` get whole.
    """
    kept = child_environment(*needed)
    for name in set(os.environ) - set(kept):
        del os.environ[name]
