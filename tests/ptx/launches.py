"""Hands what Triton would launch on a GPU to a `Machine`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .machine import Machine
from .parser import Kernel, parse

parsed = cache(parse)


class Device:
    """Enough of a Triton driver to compile PTX for a GPU that is not there."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:  # Triton keeps what it has compiled for each device
        return 2000 + self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


class Emulator:
    """Launches of Triton's kernels, executed; `changed` may edit the kernel of a launch before it runs."""

    def __init__(self) -> None:
        self.launches: list[str] = []  # names of kernels
        self.changed: Callable[[Kernel], Kernel] = lambda kernel: kernel
        self.executed: set[int] = set()  # instructions of all launches that have ended, as a `Machine` has them

    def launch(self, compiled, grid: tuple[int, ...], values: dict) -> None:
        """Run a compiled kernel with values of its parameters by name."""
        tensors, arguments = {}, []
        for name, kind in compiled.src.signature.items():
            if kind == "constexpr":
                continue
            if isinstance(values[name], torch.Tensor):
                tensors[name] = values[name]
            arguments.append(values[name].data_ptr() if name in tensors else values[name])
        kernel = parsed(compiled.asm["ptx"])
        arguments += [0] * (len(kernel.parameters) - len(arguments))  # scratch that these kernels do not use
        self.launches.append(kernel.name)
        ctas = (*grid, 1, 1)[:3]
        machine = Machine(self.changed(kernel), ctas, arguments, tensors, compiled.metadata.shared)
        machine.run()
        self.executed |= machine.executed


def install(monkeypatch, folder: str, capability: int) -> Emulator:
    """Until a test ends, let Triton compile for sm_80 or sm_90a and the emulator run what it launches."""
    emulator, compile_ = Emulator(), JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        compiled = compile_(self, *args, grid=grid, warmup=True, **kwargs)
        emulator.launch(compiled, grid, dict(zip(self.arg_names, args, strict=False)) | kwargs)
        return compiled

    def run_again(self, grid):
        return lambda *args: emulator.launch(self, grid, dict(zip(self.src.fn.arg_names, args, strict=True)))

    monkeypatch.setenv("TRITON_CACHE_DIR", folder)
    monkeypatch.setattr(compiler.CUDABackend, "make_cubin", lambda *args: b"")  # machine code takes as long again
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(CompiledKernel, "__getitem__", run_again)
    monkeypatch.setattr(driver, "_active", Device(capability))
    return emulator
