"""A plan as commands that start it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from tidemill.planning.cluster import BOTH, DECODE, PREFILL
from tidemill.planning.hardware import Hardware
from tidemill.planning.plans import Plan, Pool

_FIRST_PORT = 8001


def commands(plan: Plan, names: Mapping[str, str], hardware: Hardware, longest: int) -> list[str]:
    """`names`: what to load for each model. `longest`: tokens of the longest request. Hosts are
    called host1, host2, ..."""
    servers = [
        server for pool in _whole(plan) for server in _servers(pool, names, hardware, longest)
    ]
    if len(servers) == 1 and servers[0][1] <= hardware.on_host:
        return [servers[0][0]]
    lines, urls, host, used = list[str](), list[str](), 1, 0
    for command, num_devices in servers:
        if used + num_devices > hardware.on_host:
            host, used = host + 1, 0
        port = _FIRST_PORT + sum(f"host{host}:" in url for url in urls)
        where = (
            ""
            if hardware.name == "CPU"
            else f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(used, used + num_devices)))} "
        )
        lines.append(
            f"host{host}$ {where}{command} --host 0.0.0.0 --api-key-file key --port {port}"
        )
        urls.append(f"http://host{host}:{port}")
        used += num_devices
    return [*lines, f"host1$ tidemill route --host 0.0.0.0 --api-key-file key {' '.join(urls)}"]


def _whole(plan: Plan) -> list[list[Pool]]:
    """Pools that one server has together."""
    return [list(plan.pools)] if plan.is_disaggregated else [[pool] for pool in plan.pools]


def _servers(
    pools: list[Pool], names: Mapping[str, str], hardware: Hardware, longest: int
) -> list[tuple[str, int]]:
    """Commands, and the devices that each takes."""
    if pools[0].role == BOTH:
        (pool,) = pools
        options = _options(
            pool.limits.policy, pool.limits.token_budget, pool.limits.max_requests, longest
        )
        models = " ".join(_named(name, names, len(pool.models) > 1) for name in pool.models)
        if pool.shape.num_devices == 1 and len(pool.models) == 1:
            return [
                (f"tidemill serve {models}{_number('data-parallel', num)}{options}", num)
                for num in _by_host(pool.num, hardware.on_host)
            ]
        cut = _number("tensor-parallel", pool.shape.tensor) + _number(
            "pipeline-parallel", pool.shape.stages
        )
        return [(f"tidemill serve {models}{cut}{options}", pool.shape.num_devices)] * pool.num
    prefill = next(pool for pool in pools if pool.role == PREFILL)
    decode = next(pool for pool in pools if pool.role == DECODE)
    options = _options(
        prefill.limits.policy, prefill.limits.token_budget, decode.limits.max_requests, longest
    )
    model = _named(prefill.models[0], names, several=False)
    cut = _number("tensor-parallel", prefill.shape.tensor) + _number(
        "pipeline-parallel", prefill.shape.stages
    )
    num_hosts = max(1, prefill.cells)
    num_prefill, num_decode = prefill.num // num_hosts, decode.num // num_hosts
    num_devices = (prefill.num_devices + decode.num_devices) // num_hosts
    return [
        (
            f"tidemill serve {model} --prefill {num_prefill} --decode {num_decode}{cut}{options}",
            num_devices,
        )
    ] * num_hosts


def _by_host(num: int, on_host: int) -> list[int]:
    return [min(on_host, num - begin) for begin in range(0, num, on_host)] if on_host > 1 else [num]


def _named(name: str, names: Mapping[str, str], several: bool) -> str:
    model = names[name]
    return shlex.quote(f"{name}={model}" if several and name != model else model)


def _number(option: str, num: int) -> str:
    return f" --{option} {num}" if num > 1 else ""


def _options(policy: str, token_budget: int, max_requests: int, longest: int) -> str:
    own = "" if policy == "continuous" else f" --policy {policy}"
    return (
        f" --token-budget {token_budget} --max-requests {max_requests} --max-context {longest}{own}"
    )
