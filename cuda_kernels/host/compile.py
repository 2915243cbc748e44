"""Compile one loop for this CPU, once: the machine code is kept on disk and says so when it is made.

`compiled(name, function, signature)` is all that others use. Numba's own cache looks at the file of a function alone;
this one is keyed by a digest of all source files that become code (`ptx_cache.sources`), because a loop inlines scalar
functions of other modules. Files go to NUMBA_CACHE_DIR, else ~/.cache/cuda_kernels, in a folder for each version of
the sources; folders that got nothing new for 30 days are removed when another is made. Where neither can be written
nothing is kept.

Compiling takes about a second a loop, and says so (`cuda_kernels.messages`).
"""

import hashlib
import os
import pickle
import shutil
import sys
import time
import uuid
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps
from numba.extending import intrinsic

from cuda_kernels import ptx_cache
from cuda_kernels.declared import explain_declared
from cuda_kernels.host.widths import are_faster, wide_where_measured
from cuda_kernels.messages import announced
from cuda_kernels.simt import ONLY_FROM_COMPILED_CODE, named_by_content

#: Numba's variables that change machine code.
CODE_OPTIONS = ("NUMBA_OPT", "NUMBA_BOUNDSCHECK", "NUMBA_DEBUGINFO", "NUMBA_LOOP_VECTORIZE", "NUMBA_SLP_VECTORIZE")
#: Days that machine code of other versions of the sources is kept.
KEPT_DAYS = 30

if hasattr(os, "register_at_fork"):  # a process forked while another thread compiles would find the lock held for ever
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )


@lru_cache(maxsize=1)
def source_digest():
    """Digest of everything that machine code depends on besides its name: sources, compiler versions and options."""
    versions = (sys.version_info[:2], numba.__version__, llvmlite.__version__, np.__version__)
    options = sorted((name, value) for name, value in os.environ.items() if name in CODE_OPTIONS)
    return hashlib.sha256(f"{versions} {options} {ptx_cache.sources()}".encode()).hexdigest()


def cache_directory():
    """The directory that machine code is kept in."""
    given = numba.config.CACHE_DIR
    if given:
        return Path(given) / "cuda_kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cuda_kernels"


def folder_of_these_sources():
    """The folder in it for the sources as they are."""
    return cache_directory() / f"host-{source_digest()[:20]}"


def remove_old_folders(folder):
    """Remove the folders of other versions beside `folder` that got nothing new for `KEPT_DAYS`."""
    for other in folder.parent.glob("host-*"):
        if other != folder and time.time() - other.stat().st_mtime > KEPT_DAYS * 86400:
            shutil.rmtree(other, ignore_errors=True)


class DiskCache(NullCache):
    """Machine code of one named loop, one file for each digest of sources, compiler and CPU.

    Files are written under another name and then moved, so that processes which compile the same loop at once are safe.
    Whatever goes wrong with a file means compiling again. `while_compiling` ends what is said of it.
    """

    def __init__(self, name):
        self._name = name
        self.while_compiling = ExitStack()

    def _path(self, signature, codegen):
        key = f"{source_digest()} {signature} {codegen.magic_tuple()} {are_faster(cache_directory())}"
        return folder_of_these_sources() / f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.nbc"

    def load_overload(self, sig, target_context):
        """Return the compiled function, or None (and say that it is being compiled)."""
        target_context.refresh()
        try:
            payload = pickle.loads(self._path(sig, target_context.codegen()).read_bytes())
            return CompileResult._rebuild(target_context, *payload)
        except Exception:  # no file, no home, or one that a crash cut short
            self.while_compiling.enter_context(announced(self._name, "this CPU"))
            return None

    def save_overload(self, sig, data):
        """Keep a compiled function; a directory that cannot be written is no error."""
        try:
            path = self._path(sig, data.codegen)
            is_new = not path.parent.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
            try:
                temporary.write_bytes(dumps(data._reduce()))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            if is_new:
                remove_old_folders(path.parent)
        except (OSError, RuntimeError):
            return


def routine(function):
    """A part of a stage: a function of its own for compiled code alone (`ONLY_FROM_COMPILED_CODE`)."""
    return numba.njit(nogil=True, **ONLY_FROM_COMPILED_CODE)(named_by_content(function))


def inlined(function):
    """A `routine` that is compiled into its caller however long it is: a call once a row costs some 20 ns."""
    return numba.njit(nogil=True, forceinline=True, **ONLY_FROM_COMPILED_CODE)(named_by_content(function))


def compiled(name, function, signature):
    """Compile a Python function for one signature, or load it.

    Args:
        name: what is compiled, unique in the package: letters, digits, "-" and "_".
        function: the function; it runs without the GIL.
        signature: Numba signature.

    Returns:
        The dispatcher, callable.
    """
    if numba.config.DISABLE_JIT:
        raise RuntimeError("cuda_kernels.host is compiled code, but NUMBA_DISABLE_JIT=1 turns Numba off: unset it")
    with global_compiler_lock:
        dispatcher = numba.njit(nogil=True, error_model="numpy")(named_by_content(function))
        dispatcher._cache = cache = DiskCache(name)
        with cache.while_compiling, explain_declared(function), wide_where_measured(cache_directory()):
            dispatcher.compile(signature)
        dispatcher.disable_compile()
    return dispatcher


#: Dispatchers whose addresses were given out: they keep the machine code.
_addressed: list[Any] = []


def address_of(name, function, signature):
    """Compile as `compiled` does and return the address of the machine code, for `call_address`."""
    with global_compiler_lock:
        dispatcher = compiled(name, function, signature)
        result = dispatcher.get_compile_result(signature)
        _addressed.append(dispatcher)
        return result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name)


@intrinsic
def call_address(typingctx, address, arguments):
    """Call the compiled function at `address` with a tuple of arguments of exactly the types that it takes."""

    def emit(context, builder, signature, values):
        function = ir.FunctionType(
            context.get_value_type(types.none), [context.get_value_type(argument) for argument in arguments]
        )
        pointer = builder.inttoptr(values[0], ir.PointerType(function))
        builder.call(pointer, [builder.extract_value(values[1], k) for k in range(len(arguments))])
        return context.get_dummy_value()

    return types.void(types.int64, arguments), emit


@intrinsic
def fill_sixteen(typingctx, array, first, value):
    """Store a number in 16 neighbours of a float32 array, as one vector.

    LLVM unrolls a loop of 16 rounds, and then takes the same element of several such loops together, which lie apart.
    """
    vector, lane = ir.VectorType(ir.FloatType(), 16), ir.IntType(32)

    def emit(context, builder, signature, values):
        base = context.make_array(signature.args[0])(context, builder, values[0]).data
        pointer = builder.bitcast(builder.gep(base, [values[1]]), vector.as_pointer())
        nothing = ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(nothing, values[2], lane(0))
        all_lanes = builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(lane, 16), [0] * 16))
        builder.store(all_lanes, pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32), emit


@intrinsic
def fused_multiply_add(typingctx, a, b, c):
    """a * b + c in float32, rounded once."""

    def emit(context, builder, signature, values):
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), emit
