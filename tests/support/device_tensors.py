"""Tensors of a device that is not there: torch sees the device type "gpu", and the numbers are in host memory.

A `DeviceTensor` is refused where a tensor of a GPU would be: with tensors of the host, with tensors of another GPU, by numpy,
and by what reads its address. It goes to the host by `.cpu()`, `.to` and `copy_`, and one number of it by `.item()`; not while
a graph is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE_TYPE = "gpu"
# what CUDA does with tensors of two devices: copies, and places that are given on the host
_BETWEEN_DEVICES = ("aten::copy_", "aten::_to_copy", "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_")
RECORDING = threading.local()  # `is_on`: this thread records a graph
_registered: list[torch.library.Library] = []
_registering = threading.Lock()


class DeviceTensor(Tensor):
    """
    Attributes:
        numbers: a tensor in host memory of the same shape and strides.
    """

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, device: torch.device) -> DeviceTensor:
        with torch.inference_mode(False):  # views of tensors that are older than this mode have their version
            tensor: DeviceTensor = Tensor._make_wrapper_subclass(
                cls,
                numbers.shape,
                strides=numbers.stride(),
                storage_offset=numbers.storage_offset(),
                dtype=numbers.dtype,
                device=device,
                requires_grad=False,
            )
        tensor.numbers = numbers
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        return _run(func, args, kwargs)


def gpu(index: int) -> torch.device:
    """The device with this number. From the first call on, torch knows the type "gpu" until the process ends."""
    with _registering:
        if not _registered:
            _register()
    return torch.device(DEVICE_TYPE, index)


def host_memory(value: Any) -> Any:
    """The numbers of a device tensor; everything else as it is."""
    return value.numbers if isinstance(value, DeviceTensor) else value


def _register() -> None:
    _setup_privateuseone_for_python_backend(DEVICE_TYPE)
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any) -> Tensor:
        return DeviceTensor(torch.empty(size, dtype=dtype, device="cpu"), device)

    def empty_strided(
        size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any
    ) -> Tensor:
        return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device)

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        _refuse_in_a_recording("a copy between host and device")
        host_memory(target).copy_(host_memory(source))
        return target

    operations: dict[str, Callable[..., Tensor]] = {
        "empty.memory_format": empty,
        "empty_strided": empty_strided,
        "_copy_from": copy_from,
    }
    for name, operation in operations.items():
        library.impl(name, operation, "PrivateUse1")  # type: ignore[no-untyped-call]
    _registered.append(library)


def _refuse_in_a_recording(what: str) -> None:
    """CUDA refuses to record what waits for the device, or reads memory of the host that is not pinned."""
    if getattr(RECORDING, "is_on", False):
        raise RuntimeError(f"{what} cannot be recorded in a graph")


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls `function` on the numbers. Its results are on the device of its arguments, or on the one that it was given."""
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    there = [each for each in tensors if isinstance(each, DeviceTensor)]
    device = there[0].device
    if not function.name().startswith(_BETWEEN_DEVICES):
        for each in tensors:
            if each.device != device and not (each.device.type == "cpu" and each.dim() == 0):
                raise RuntimeError(
                    f"{function.name()}: expected all tensors on the same device, and found {each.device} and {device}"
                )
    is_moved = kwargs.get("device") is not None
    if is_moved:
        device = torch.device(kwargs["device"])
        kwargs["device"] = torch.device("cpu")
    is_read = function.name() in ("aten::_local_scalar_dense", "aten::nonzero")
    if is_read or device.type != DEVICE_TYPE or any(each.device.type == "cpu" and each.dim() for each in tensors):
        _refuse_in_a_recording(function.name())
    same = {id(each.numbers): each for each in there}
    result = function(*pytree.tree_map(host_memory, args), **pytree.tree_map(host_memory, kwargs))

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or device.type != DEVICE_TYPE:
            return value
        return same.get(id(value)) if id(value) in same else DeviceTensor(value, device)

    return pytree.tree_map(wrapped, result)
