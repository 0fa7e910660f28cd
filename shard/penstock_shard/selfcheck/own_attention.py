"""Compares logits over the paged cache with those of the model code's own attention."""

from __future__ import annotations

from torch import Tensor

from penstock_shard.errors import ModelError

# The largest error of a logit that rounding explains, in standard deviations of the model's logits.
_TOLERANCE = {
    "float32": 1e-3,
    "float16": 0.1,
    "bfloat16": 0.3,
    "int8": 0.3,
    "fp8": 0.3,
    # The model's own attention has the matrices of latents as int4; ours has them in float32.
    # Wrong attention gives 3 or 4 deviations.
    "int4": 1.2,
}
# The share of tokens that must be within the tolerance. Below float32, rounding may send a few
# tokens to other experts. Wrong attention spoils nearly all tokens.
_SHARE = {"float32": 1.0, **dict.fromkeys(set(_TOLERANCE) - {"float32"}, 0.75)}


def check_logits(name: str, own: Tensor, paged: Tensor, precision: str) -> None:
    """Compare logits [N, V] over the paged cache with those of the model's own attention. Raises
    ModelError if they differ by more than rounding explains; `precision` is the coarsest dtype of
    any product.
    """
    expected = own.float()
    errors = (paged.float() - expected).abs().amax(dim=1)
    worst = float(errors.quantile(_SHARE[precision]))
    bound = _TOLERANCE[precision] * float(expected.std())
    # `worst > bound` would let a NaN pass.
    if not worst <= bound:
        raise ModelError(
            f"{name}: self-check failed: logits on the paged cache differ from "
            f"the model's own by {worst:.2g} (bound {bound:.2g}); it is not served"
        )
