"""Compares logits over the paged cache with those of the attention that a model's own code has."""

from __future__ import annotations

from torch import Tensor

from penstock_shard.errors import ModelError

# Largest error of a logit that rounding explains, in standard deviations of the model's logits.
_TOLERANCE = {
    "float32": 1e-3,
    "float16": 0.1,
    "bfloat16": 0.3,
    "int8": 0.3,
    "fp8": 0.3,
    # The model's own attention multiplies by matrices of latents that ours has in float32. The
    # largest of many logits is off by 3 or 4 deviations where attention is wrong.
    "int4": 1.2,
}
# Share of the tokens that must stay within that. In half precision rounding sends a few tokens of
# a mixture-of-experts model to other experts, while wrong attention spoils nearly all tokens.
_SHARE = {"float32": 1.0, **dict.fromkeys(set(_TOLERANCE) - {"float32"}, 0.75)}


def check_logits(name: str, own: Tensor, paged: Tensor, precision: str) -> None:
    """Compare `paged` [N, V], logits over the paged cache, with `own` [N, V], those of the model's
    own attention. Raises ModelError if they differ by more than rounding to `precision`, the
    coarsest dtype of any product, explains. `name` is the model's.
    """
    expected = own.float()
    errors = (paged.float() - expected).abs().amax(dim=1)
    worst = float(errors.quantile(_SHARE[precision]))
    bound = _TOLERANCE[precision] * float(expected.std())
    # Not `worst > bound`: a NaN must not pass.
    if not worst <= bound:
        raise ModelError(
            f"{name}: self-check failed: logits on the paged cache differ from "
            f"the model's own by {worst:.2g} (bound {bound:.2g}); it is not served"
        )
