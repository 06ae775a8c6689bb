"""A device that is not there: its tensors are computed on the CPU, and what CUDA refuses to mix is refused.

A tensor on it holds one of the CPU. Every operation of torch is made on those, after what CUDA would refuse has been refused:
tensors of two devices in one operation (a tensor of the CPU without axes, and places on the CPU in a tensor of the device, are
allowed), and a generator of the CPU for noise on the device. What code leaves behind on the host by mistake is then an error on
a machine without any GPU. The device has a type that torch has long known and has no kernels for, ``lazy``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)
PLACES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")  # with places that may be on the CPU
CPU = torch.device("cpu")


class Pretended(torch.Tensor):
    """A tensor of the device, which holds one of the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        out = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        out.held = held
        return out

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"{self.held!r} on {DEVICE}"

    def tolist(self):
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def __deepcopy__(self, memo):
        out = Pretended(self.held.clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            out._is_param = True
        return memo.setdefault(id(self), out)

    def __reduce_ex__(self, protocol):
        return Pretended, (self.held.detach(),)

    def numpy(self, *, force: bool = False):
        if not force:
            raise TypeError(f"can't convert {DEVICE.type} device type tensor to numpy")
        return self.held.detach().numpy()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _on_the_cpu(func, args, kwargs or {})


torch.serialization.add_safe_globals([Pretended])


class Here(TorchDispatchMode):
    """Within it, torch makes tensors of the device where it is asked to."""

    def __enter__(self):
        self.before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(
            True
        )  # torch.tensor makes its tensor on the CPU, then moves it by an operation
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(self.before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _on_the_cpu(func, args, kwargs or {})


def _on_the_cpu(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    ours = [x for x in leaves if isinstance(x, Pretended)]
    name, _, _ = func.__name__.partition(".")
    if "device" in kwargs and kwargs["device"] is not None:
        place = torch.device(kwargs["device"])
    else:
        first = next((x for x in leaves if isinstance(x, torch.Tensor)), None)
        place = CPU if first is None else (DEVICE if name not in PLACES and ours else first.device)
    if name not in ("_to_copy", "copy_", "_copy_from"):
        _refuse(name, leaves, place, kwargs.get("generator"))
    if name == "_efficientzerotensor":  # the zeros of forward derivatives, which hold nothing
        func = torch.ops.aten.zeros.default
    out = func(*tree_map(_bare, args), **tree_map(_bare, kwargs))
    known = {id(x.held): x for x in ours}  # what an operation in place returns is what it was given
    if name == "copy_":
        return args[0]
    if place.type != DEVICE.type:
        return out
    return tree_map(lambda x: known.get(id(x), Pretended(x)) if isinstance(x, torch.Tensor) else x, out)


def _bare(x: Any) -> Any:
    if isinstance(x, torch.device):
        return CPU if x.type == DEVICE.type else x
    return x.held if isinstance(x, Pretended) else x


def _refuse(name: str, leaves: list[Any], place: torch.device, generator: Any) -> None:
    if generator is not None and generator.device.type != place.type:
        raise RuntimeError(f"Expected a {place.type!r} device type for generator but found {generator.device.type!r}")
    first = next((x for x in leaves if isinstance(x, torch.Tensor)), None)
    if name in PLACES and isinstance(first, Pretended):
        return
    devices = {x.device.type for x in leaves if isinstance(x, torch.Tensor) and (x.ndim or isinstance(x, Pretended))}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(devices)} in {name}")
