"""The check of a Program in a file, beyond the check of every Program."""

from __future__ import annotations

import torch

from offload.errors import FileError, ProgramError
from offload.files.operators import check_operator
from offload.program import ITEM_BYTES, Program, Role, Symbol, TritonKernel, check_program
from offload.program.structure import constants


def check_file_program(program: Program) -> None:
    """Check that a Program may be executed if it is read from a file, or may be written to one.

    Raises:
        ProgramError: the parts contradict each other, or name what a file cannot hold; the message
            says where.
        FileError: a launch's operator is refused, or this torch does not have it.
    """
    _check_names(program)
    check_program(program)
    given = {index for launch in program.launches for index in launch.writes}
    for value in program.of_role(Role.OUTPUT):
        if value.index not in given and value.size_bytes:
            raise ProgramError(f"values[{value.index}] is returned, and no launch writes it")
    for value in program.values:
        is_number = (value.shape, value.size_bytes) == ((), ITEM_BYTES[value.dtype])
        if value.on_host and not is_number:
            raise ProgramError(
                f"values[{value.index}], a constant on the CPU, is not a single {value.dtype}"
            )
    for launch in program.launches:
        where = f"launches[{launch.index}]"
        for argument in launch.arguments:
            for item in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(item, Symbol):
                    _check_symbol(program, item, where)
        if not isinstance(launch.callee, TritonKernel):  # `check_program` has checked that
            check_operator(launch, where)


def _check_symbol(program: Program, symbol: Symbol, where: str) -> None:
    if symbol.kind == "device" and symbol.name != program.device:
        raise ProgramError(f"{where} is on device {symbol.name}, the program on {program.device}")
    if symbol.kind == "generator" and symbol.name != "0":
        raise ProgramError(f"{where} draws from generator {symbol.name}, and a file has only 0")


def _check_names(program: Program) -> None:
    """Check that torch has what the program names, before anything else asks torch for it."""
    views = [*program.inputs, *(result.view for result in program.results)]
    views += [view for holders in program.weight_views.values() for view in holders]
    symbols = [Symbol("dtype", one.dtype) for one in program.values]
    symbols += [Symbol("dtype", one.dtype) for one in views]
    for launch in program.launches:
        symbols += [Symbol("dtype", one.dtype) for one in (*launch.views(), *launch.made())]
        symbols += launch.symbols()
    for structure in (program.arguments_structure, program.result_structure):
        symbols += [one for one in constants(structure) if isinstance(one, Symbol)]
    for symbol in dict.fromkeys(symbols):
        if symbol.kind == "device":
            _check_device(symbol)
        elif symbol.kind != "generator" and not hasattr(torch, symbol.name):
            raise FileError(
                f"torch {torch.__version__} has no {symbol.kind} {symbol.name}: install a newer "
                "torch"
            )


def _check_device(symbol: Symbol) -> None:
    try:
        torch.device(symbol.name)
    except RuntimeError:
        raise ProgramError(f"expected a device, got {symbol.name!r}") from None
