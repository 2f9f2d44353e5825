"""Flags of vLLM, SGLang and llama.cpp on our command lines: what they mean is in foreign_flags.py."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tidemill.cli.foreign_flags import FOREIGN, LLAMA, Foreign
from tidemill.errors import ConfigError

_BY_FLAG = {flag: foreign for foreign in FOREIGN for flag in foreign.flags}


def translate(args: Sequence[str], params: Iterable[Any]) -> list[str]:
    """The arguments with only this command's own flags. `params`: the command's, as click has them."""
    params = list(params)
    values = {
        opt: not getattr(param, "is_flag", False)
        for param in params
        for opt in (*param.opts, *param.secondary_opts)
    }
    known = {opt: takes for opt, takes in values.items() if opt.startswith("-")} | {
        "--help": False,
        "-h": False,
    }
    if any(param.param_type_name == "argument" and param.name == "model" for param in params):
        known["MODEL"] = True
    left, done, has_model = list(args), list[str](), False
    refused: list[ConfigError] = []  # all are named at once
    is_llama = _peers(args) == {LLAMA}
    while left:
        arg = left.pop(0)
        if arg == "--":
            done += [arg, *left]
            break
        flag, member, equals, value = _parts(arg, known)
        flag = _whole(flag, known)
        if flag == "--seed" and is_llama and flag not in known:
            flag = "-s"  # of each request; in vLLM and SGLang it is that of the engine
        if flag in known:
            done.append(flag + equals + value)
            has_model |= flag in ("-m", "--model")
            if known[flag] and not equals and left:
                done.append(left.pop(0))
        elif flag in _BY_FLAG:
            foreign = _BY_FLAG[flag]
            if foreign.takes_value and not equals:
                try:
                    value = _next_value(foreign, flag, left)
                except ConfigError as error:
                    refused.append(error)
                    continue
            for name in reversed(member.split(".") if member else ()):
                value = json.dumps({name: _json(value)})
            # vLLM takes several, with spaces between them
            is_open = foreign.several or flag == "--served-model-name"
            while is_open and has_model and left and not left[0].startswith("-"):
                value += ("\n" if foreign.several else ",") + left.pop(0)
            try:
                done += _ours(foreign, flag, value, known)
            except ConfigError as error:
                refused.append(error)
            has_model |= "MODEL" in foreign.ours
        elif _is_flag(flag, known):
            refused.append(_unknown(flag, known))
        else:
            done.append(arg)
            has_model = True
    if refused:
        raise _together(refused)
    return _joined(done)


def _is_flag(arg: str, known: Collection[str]) -> bool:
    """`--x` and `-abc` are flags. `-n5` is one of ours with its value, `-5` and `-` are values."""
    has_value = arg[:2] in known and not arg[2:3].isalpha()
    return arg.startswith("--") or (arg.startswith("-") and arg[1:2].isalpha() and not has_value)


def _together(errors: list[ConfigError]) -> ConfigError:
    if len(errors) == 1:
        return errors[0]
    lines = [f"{len(errors)} options cannot be used:", *(f"  {error}" for error in errors)]
    return ConfigError("\n".join(lines))


def _parts(arg: str, known: Collection[str]) -> tuple[str, str, str, str]:
    """A flag, the member after a dot, the equals sign, and the value after it: `--flag=1`, and of
    others' short flags, as vLLM has them, `-O3`, `-tp=2` and `-cc.mode=3`."""
    flag, equals, value = arg.partition("=")
    if arg.startswith("--"):
        flag = flag.replace("_", "-")
    elif arg[:2] not in known and arg[:2] in _BY_FLAG and arg[2:].isdecimal():
        return arg[:2], "", "=", arg[2:]
    elif flag not in _BY_FLAG and flag.partition(".")[0] not in _BY_FLAG:
        return arg, "", "", ""
    base, dot, member = flag.partition(".")
    is_whole = not dot or flag in known or flag in _BY_FLAG or base not in _BY_FLAG
    return (
        (flag, "", equals, value) if is_whole else (base, member.replace("-", "_"), equals, value)
    )


def _whole(flag: str, known: Iterable[str]) -> str:
    """A flag of vLLM or SGLang by its beginning, as they take it: if it means one of ours, and no
    other begins so."""
    if flag in _BY_FLAG or not flag.startswith("--") or any(own.startswith(flag) for own in known):
        return flag
    found = {
        foreign.names: (name, foreign)
        for name, foreign in _BY_FLAG.items()
        if name.startswith(flag)
    }
    if len(found) != 1 or len(flag) <= 5:
        return flag
    name, foreign = next(iter(found.values()))
    return name if foreign.is_translated and foreign.source != LLAMA else flag


def _peers(args: Iterable[str]) -> set[str]:
    """The programs that have one of these flags and are the only ones to have it."""
    found = (_BY_FLAG.get(arg.partition("=")[0]) for arg in args)
    return {each.source for each in found if each and "," not in each.source}


def _joined(args: list[str]) -> list[str]:
    """One JSON object instead of several for the same option; of a member that is given twice, the
    last one counts. Sampling defaults that are one word are the base of the others."""
    for option in {each.inside[0] for each in FOREIGN if each.inside[0]}:
        split = [
            word
            for arg in args
            for word in (arg.split("=", 1) if arg.startswith(f"{option}=") else (arg,))
        ]
        places = [i for i, arg in enumerate(split[:-1]) if arg == option]
        if len(places) > 1:
            try:
                objects = [_object(option, split[i + 1]) for i in places]
            except (ValueError, RecursionError):
                return args  # told where it is read
            split[places[0] + 1] = json.dumps(
                {name: value for fields in objects for name, value in fields.items()}
            )
            for i in reversed(places[1:]):
                del split[i : i + 2]
            args = split
    return args


def _object(option: str, text: str) -> dict[str, Any]:
    if option == "--sampling-defaults" and text in ("model", "neutral"):
        return {"base": text}
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _next_value(foreign: Foreign, flag: str, left: list[str]) -> str:
    is_optional = flag in ("-fa", "--flash-attn")  # they were switches once
    if is_optional and (not left or left[0] not in (foreign.accepted or ())):
        return "on"
    if not left:
        raise ConfigError(f"{flag} needs a value.")
    return left.pop(0)


def _ours(foreign: Foreign, flag: str, value: str, known: Iterable[str]) -> list[str]:
    """The arguments that stand for a flag and its value."""
    if foreign.stands_for:
        return _stands_for(foreign, flag, value, known)
    mine = next((ours for ours in foreign.ours if ours in known), None)
    if value in foreign.automatic and foreign.takes_value:
        return []
    if foreign.variable:
        os.environ[foreign.variable] = value or "1"
        return []
    if mine is not None:
        if foreign.several:
            words = value.split("\n")
            return [
                word
                for part in (value.split(",") if foreign.by_commas else words)
                for word in (mine, part)
            ]
        has_value = foreign.takes_value and not foreign.is_switch
        return [value] if mine == "MODEL" else [mine, value + foreign.unit] if has_value else [mine]
    option, member = foreign.inside
    if option in known:
        return [option, json.dumps({member: _json(value)})]
    if (foreign.ours or option) and not foreign.is_optional:
        raise ConfigError(
            f"This command has no {(*foreign.ours, option)[0]}, which {flag} means.",
            fix="See --help.",
        )
    if foreign.accepted is not None and value not in foreign.accepted:
        raise ConfigError(
            f"{flag} {value} is not supported: {foreign.why}.",
            fix=f"Possible: {', '.join(foreign.accepted)}.",
        )
    if foreign is _BY_FLAG["-ngl"] and value == "0":
        return ["--device", "cpu"]
    print(f"note: {flag} has no effect: {foreign.why}.", file=sys.stderr)
    return []


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _stands_for(foreign: Foreign, flag: str, value: str, known: Iterable[str]) -> list[str]:
    words = foreign.stands_for.get(value)
    if words is None:
        fix = f"Possible: {', '.join(foreign.stands_for)}."
        raise ConfigError(f"{flag} {value} is not supported.", fix=fix)
    there = [
        word
        for pair in zip(words[::2], words[1::2], strict=True)
        if pair[0] in known
        for word in pair
    ]
    if words and not there:
        raise ConfigError(f"This command has no {words[0]}, which {flag} means.", fix="See --help.")
    return there


def _unknown(flag: str, known: Collection[str]) -> ConfigError:
    name = flag.partition("=")[0]
    see = f"See {'--help-all' if '--help-all' in known else '--help'}."
    candidates = [*known, *(name for name, foreign in _BY_FLAG.items() if foreign.is_translated)]
    near = (
        difflib.get_close_matches(name, candidates, n=1, cutoff=0.8)
        if name.startswith("--")
        else []
    )
    return ConfigError(
        f"There is no option {name}.", fix=f"Did you mean {near[0]}?" if near else see
    )


def hint(key: str, options: Collection[str]) -> str:
    """A hint for a key of a config file that is another program's; empty: it is none. `options`:
    names of ours."""
    foreign = _BY_FLAG.get(f"--{key.replace('_', '-')}")
    if foreign is None:
        return ""
    for name in (ours.removeprefix("--") for ours in foreign.ours):
        if name in options:
            return f"Did you mean {name}?"
        if name.removeprefix("no-") in options:
            return f"Write {name.removeprefix('no-')} = false."
    option, member = foreign.inside
    if option:
        return f"Write {option.removeprefix('--')} = '{{\"{member}\": ...}}'."
    if meant := sorted(
        {word.removeprefix("--") for words in foreign.stands_for.values() for word in words[::2]}
    ):
        return f"See {', '.join(meant)}."
    if foreign.variable:
        return f"Set the environment variable {foreign.variable}."
    return (
        f"Leave it out. It has no effect: {foreign.why}."
        if foreign.why
        else "It is no option of a config file."
    )


def table(is_translated: bool) -> list[str]:
    """Lines of a table in docs/reference/foreign-flags.md: flags that something of ours stands for,
    or those without effect."""
    lines = ["| flag | of | here |", "|---|---|---|"]
    for each in (foreign for foreign in FOREIGN if foreign.is_translated == is_translated):
        names = ", ".join(f"`{flag}`" for flag in each.flags)
        if each.stands_for:
            meant = {
                value: f"`{' '.join(words)}`" if words else "nothing"
                for value, words in each.stands_for.items()
            }
            here = "; ".join(
                f"{value}: {words}" if value else words for value, words in meant.items()
            )
        elif each.inside[0]:
            here = (
                f"`{each.ours[0]}`; `serve`: " if each.ours else ""
            ) + f"`{each.inside[1]}` in `{each.inside[0]}`"
        elif each.is_optional:
            here = f"`{each.ours[0]}`; `serve`: no effect: {each.why}"
        elif each.ours:
            mine = " or ".join(f"`{ours}`" for ours in each.ours if ours != "MODEL")
            here = mine + (f". {each.why}" if each.why else "")
        elif each.variable:
            here = f"sets `{each.variable}`"
        elif each.accepted is not None:
            here = f"only {', '.join(each.accepted)}: {each.why}"
        else:
            here = each.why
        lines.append(f"| {names} | {each.source} | {here} |")
    return lines
