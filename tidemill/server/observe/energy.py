"""The energy that GPUs have used, from NVML, if its library is there: it comes with the driver."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"


class Energy:
    """Joules that some GPUs have used since it was made."""

    def __init__(self, library: Any, handles: list[Any]) -> None:
        self._library, self._handles = library, handles
        self._before = self._total_mj()

    @staticmethod
    def of(num_gpus: int, environ: Mapping[str, str] = os.environ) -> Energy | None:
        """The energy of the first so many GPUs that this process may use. None: nobody tells."""
        if not num_gpus:
            return None
        try:
            library = ctypes.CDLL(_LIBRARY)
            handles = _handles(library, num_gpus, environ.get("CUDA_VISIBLE_DEVICES"))
            return Energy(library, handles)
        except (OSError, AttributeError, LookupError, ValueError):
            return None

    def joules(self) -> float:
        return (self._total_mj() - self._before) / 1000

    def _total_mj(self) -> int:
        return sum(map(self._of_gpu, self._handles))

    def _of_gpu(self, handle: Any) -> int:
        total = ctypes.c_ulonglong()
        _check(self._library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(total)))
        return total.value


def _handles(library: Any, num_gpus: int, visible: str | None) -> list[Any]:
    """`visible`: numbers or ids of GPUs, as CUDA reads them."""
    _check(library.nvmlInit_v2())
    names = visible.split(",") if visible else [str(number) for number in range(num_gpus)]
    handles = []
    for name in names[:num_gpus]:
        handle = ctypes.c_void_p()
        if name.strip().isdigit():
            found = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
        else:
            uuid = name.strip().encode()
            found = library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
        _check(found)
        handles.append(handle)
    return handles


def _check(status: int) -> None:
    if status:
        raise LookupError(f"NVML's error {status}")
