"""Modules of a project that is not installed, so that its tests can be imported."""

from __future__ import annotations
import __future__

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from pydantic import BaseModel, ConfigDict


class AnyFields(BaseModel):
    """A response class of theirs: takes whatever was sent, and nested objects are read with a dot."""

    model_config = ConfigDict(extra="allow")

    def __getattr__(self, name: str) -> Any:
        return _with_dots(super().__getattr__(name))  # type: ignore[misc]


def _with_dots(value: Any) -> Any:
    if isinstance(value, dict):
        return AnyFields(**value)
    return (
        [_with_dots(item) for item in value]
        if isinstance(value, list) and value and isinstance(value[0], dict)
        else value
    )


class Absent(types.ModuleType):
    """Every name is there and does nothing; names of responses take any fields."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "pytest", "collect_ignore")):
            raise AttributeError(name)
        if name.endswith(("Response", "Item", "Info")):
            return type(name, (AnyFields,), {})
        return MagicMock(name=f"{self.__name__}.{name}")


class Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`package` and all below it are absent, but for `given` (names of ours) and `read` (files of
    the checkout, as they are)."""

    def __init__(
        self, package: str, given: dict[str, dict[str, Any]], read: dict[str, Path] | None = None
    ) -> None:
        self._package, self._given, self._read = package, given, read or {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        if name in self._read:
            return importlib.util.spec_from_file_location(name, self._read[name])
        if name in self._given or name.split(".")[0] == self._package:
            return importlib.machinery.ModuleSpec(
                name, self, is_package=name not in self._given or name == self._package
            )
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Absent(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(self._given.get(module.__name__, {}))

    def install(self) -> None:
        sys.meta_path.insert(0, self)


def names_from(path: Path, names: str, **known: Any) -> dict[str, Any]:
    """What a file of the checkout defines under names that match, without the rest of the file.
    `known`: what they use."""
    space: dict[str, Any] = dict(known)
    tree = ast.parse(path.read_text())
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case _:
                continue
        if re.fullmatch(names, name):
            try:
                exec(
                    compile(
                        ast.Module([node], []),
                        str(path),
                        "exec",
                        __future__.annotations.compiler_flag,
                    ),
                    space,
                )
            except NameError:  # made of what is left out
                continue
    return {name: value for name, value in space.items() if re.fullmatch(names, name)}


class AnyCount(int):
    """Stands for a number of tokens of their tokenizer: equal to every positive one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    __hash__ = int.__hash__
