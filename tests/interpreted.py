"""Triton's interpreter, without what it does again and again.

A kernel is interpreted with the functions of `triton.language` replaced. Triton replaces them anew at every call of a function by
a kernel, for which it lists the members of whole modules: half of the time of these tests. Within a launch, once is enough."""

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
        return frozenset(value for value in fn.__globals__.values() if value is language or value is language.core)

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
