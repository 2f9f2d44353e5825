"""Triton's interpreter, without what it does again and again.

A kernel is interpreted with the functions of `triton.language` replaced. Triton replaces them anew
at every call of a function by a kernel, for which it lists the members of whole modules: half of
the time of these tests. Within a launch, once is enough.

Of what is left, a third is the making of types: each value of a kernel gets one of its own, with a
name and lists of sizes. Types of the same shape and element share them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def replace_language_once() -> None:
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        return  # another version's
    replace: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[Any] = set()  # modules, in the launch under way

    @cache
    def modules_of(fn: Any) -> frozenset[Any]:
        """Those that Triton would look at."""
        return frozenset(
            value
            for value in fn.__globals__.values()
            if value is language or value is language.core
        )

    def replace_once(fn: Any) -> Any:
        modules = modules_of(fn)
        if modules and modules <= replaced:
            return interpreter._LangPatchScope()  # nothing to restore: the launch does that
        scope = replace(fn)
        replaced.update(modules)
        restore = scope.restore

        def restore_all() -> None:
            replaced.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = replace_once


def make_types_once() -> None:
    from triton.language import core
    from triton.runtime import interpreter

    plain_block, plain_tensor = core.block_type.__init__, core.tensor.__init__
    plain_dtype: Callable[[Any], Any] | None = getattr(interpreter, "_get_np_dtype", None)
    blocks: dict[Any, dict[str, Any]] = {}  # what the first one of its kind has
    tensors: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        known = blocks.get(key)
        if known is None:
            plain_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        else:
            vars(self).update(known)
            self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = tensors.get(type.name)
        if known is None:
            plain_tensor(self, handle, type)
            tensors[type.name] = {
                name: value for name, value in vars(self).items() if name != "handle"
            }
        else:
            vars(self).update(known)
            self.handle, self.type, self.dtype = handle, type, type.scalar

    def dtype_of(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = plain_dtype(type)  # type: ignore[misc]
        return dtypes[name]

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    if plain_dtype is not None:
        interpreter._get_np_dtype = dtype_of
