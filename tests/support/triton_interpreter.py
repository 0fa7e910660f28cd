"""Triton's kernels on the processor, by its interpreter: chosen before a kernel is defined."""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import replace
from typing import Any

import numpy as np


def use_interpreter() -> bool:
    """Run Triton's kernels in its interpreter from now on, and return True; False without Triton.
    Call this before anything imports Triton.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _let_scalars_be_bounds(interpreter)
    _multiply_row_by_row(interpreter)
    _round_to_even(interpreter)
    _patch_once_a_launch(interpreter)
    _overflow_in_silence(interpreter)
    _look_for_no_overflow(interpreter)
    _remember_types(interpreter)
    return True


def _let_scalars_be_bounds(interpreter: Any) -> None:
    """Let the interpreter's scalars be used as integers. They are arrays of one element, which
    numpy 2.4 no longer converts.
    """
    patched = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _multiply_row_by_row(interpreter: Any) -> None:
    """Multiply tiles row by row. The interpreter hands whole tiles to numpy: a row then gets other
    bits in a larger tile, as on no tensor core, and bfloat16 comes as the integers with its bits.
    """

    def create_dot(self: Any, a: Any, b: Any, sums: Any, *others: Any) -> Any:
        left, right = (_widened(handle, sums.data.dtype) for handle in (a, b))
        product = np.matmul(left[:, None], right)[:, 0]
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _widened(handle: Any, dtype: Any) -> Any:
    if handle.dtype.scalar.name == "bf16":
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(dtype)


def _round_to_even(interpreter: Any) -> None:
    """Round to even, as devices and torch do. The interpreter truncates to bfloat16, gets most of
    fp8 wrong, and reads the smallest numbers of bfloat16 as others.
    """
    builder = interpreter.InterpreterBuilder
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, _by_torch(getattr(builder, name), interpreter.TensorHandle))


def _by_torch(cast: Any, handle: Any) -> Any:
    """Return the cast, with torch's in place of it from float32 to bfloat16 and fp8, and from
    bfloat16 to float32.
    """
    kinds = {"bf16": ("bfloat16", "uint16"), "fp8e4nv": ("float8_e4m3fn", "uint8")}

    def rounded(self: Any, source: Any, to: Any, *mode: Any) -> Any:
        names = (source.dtype.scalar.name, to.scalar.name)
        if names == ("bf16", "fp32"):
            return handle(_widened(source, np.float32), to.scalar)
        if names[0] != "fp32" or names[1] not in kinds:
            return cast(self, source, to, *mode)
        # Not for whoever only asks whether there is a Triton.
        import torch

        dtype, bits = (getattr(torch, each) for each in kinds[names[1]])
        values = torch.from_numpy(np.array(source.data, dtype=np.float32)).to(dtype)
        return handle(values.view(bits).numpy(), to.scalar)

    return rounded


def _patch_once_a_launch(interpreter: Any) -> None:
    """Patch each module once a launch. The interpreter looks through the whole language again each
    time that one kernel function calls another.
    """
    patched, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = set[str]()

    def patch(function: Any) -> Any:
        if function.__module__ in modules:
            return interpreter._LangPatchScope()
        modules.add(function.__module__)
        return patched(function)

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        modules.clear()
        run(self, *args, **kwargs)

    interpreter._patch_lang = patch
    interpreter.GridExecutor.__call__ = call


def _overflow_in_silence(interpreter: Any) -> None:
    """Overflow without a warning, as a device does. numpy warns."""
    executor = interpreter.GridExecutor
    run = executor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        # numpy warns of a row of NaN alone in another way.
        silent = warnings.catch_warnings(action="ignore", category=RuntimeWarning)
        with np.errstate(all="ignore"), silent:
            run(self, *args, **kwargs)

    executor.__call__ = call


def _look_for_no_overflow(interpreter: Any) -> None:
    """Compute each sum of integers once. The interpreter computes it again in 64 bits, for an
    assertion of its debug mode alone, which takes a quarter of its time.
    """
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _remember_types(interpreter: Any) -> None:
    """Remember types. The interpreter lists all types to find the numpy type of one, and makes and
    writes out the type of each shape's tuple, which nobody asks for: a third of its time.
    """
    language = interpreter.tl.core
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        return found[name] if name in found else found.setdefault(name, find(dtype))

    def set_types(self: Any, types: Any, fields: Any = None) -> None:
        self.types, self.fields = types, fields or [""] * len(types)

    def name(self: Any) -> str:
        pairs = zip(self.fields, self.types, strict=True)
        return "[" + ",".join(f"{field}:{kind}" for field, kind in pairs) + "]"

    def set_values(self: Any, values: Any, known: Any = None) -> None:
        self.values = list(values)
        listed = known is None or isinstance(known, language.tuple_type)
        self.known = known if listed else language.tuple_type(known)

    def type_of(self: Any) -> Any:
        if self.known is None:
            self.known = language._type_for_tuple_values(self.values)
        return self.known

    interpreter._get_np_dtype = numpy_type
    language.tuple_type.__init__ = set_types
    language.tuple_type.name = property(name)
    language.tuple.__init__ = set_values
    language.tuple.type = property(type_of, lambda self, value: setattr(self, "known", value))
