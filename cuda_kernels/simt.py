"""The vocabulary of kernels and scalar functions, with one meaning in three places.

    on a GPU          Numba compiles to PTX; `ptx` functions are one instruction, `load_words` one 16-byte access
    on a CPU          Numba compiles the same `device` functions with LLVM (`cuda_kernels.host`)
    in the simulator  everything is plain Python (`cuda_kernels.simulator`, chosen by NUMBA_ENABLE_CUDASIM=1)

    device            scalar helper, inlined wherever it is called
    device_of_code    the same, of one code of up to 16 bits
    ptx               one instruction on a GPU; the decorated Python body is its meaning elsewhere
    on_gpu            another function on a GPU; the decorated Python body is its meaning elsewhere
    kernel            a function that a grid of threads runs
    load_words, load_two_words, store_words    16-byte (or 8-byte) accesses to global memory
    load_words_if, store_words_if    the same where a condition holds, without a branch
    select            a choice without a branch
    as_f32, as_u32, as_i32    the same bits as another type
    atomic_max        a running maximum that all threads share
    offset            where an element lies, in 64 bits
    thread_number     this thread's number, of kernels in which a thread makes one result; `first_row`, `first_column`:
                      where the part of the matrix begins that belongs to this block of threads

Factories of device functions (`make_...`) are cached: the same arguments give the same function, which Numba then
compiles once for all kernels of a process.

This is the only file that knows Numba's internals. Numbers: `F`, `U32`... make constants of a fixed width; one Python
float or int literal where a float32 or uint32 belongs would turn a kernel into float64 or int64 arithmetic.
"""

import hashlib
import inspect
import os
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

F, U16, U32, U64, I32, I64 = np.float32, np.uint16, np.uint32, np.uint64, np.int32, np.int64

#: Whether kernels run in the simulator; decided once, when this module is imported.
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"

if SIMULATED:
    from cuda_kernels.simulator import as_f32, as_i32, as_u32, cuda

    def device(function, called_with=None):
        """A scalar helper: in the simulator the Python function itself."""
        return function

    def device_of_code(function):
        """A scalar helper of one code of up to 16 bits: in the simulator each code's result is computed once."""
        return lru_cache(1 << 16, typed=True)(function)

    def kernel(function):
        """A kernel: in the simulator the Python function itself; `simulator.launch` runs it for each thread."""
        return function

    def on_gpu(replacement):
        """Decorate the meaning of `replacement` off the GPU; here the meaning is used."""
        return lambda meaning: meaning

    def ptx(asm, constraints, result, *arguments):
        """Decorate the meaning of one instruction; here the meaning is used."""
        return lambda meaning: meaning

    def select(condition, a, b):
        """`a` where the condition holds, else `b`; both are evaluated, nothing branches."""
        return a if condition else b

    def load_words(pointer, i):
        """The 16 bytes at element `i`, a multiple of 16 bytes from an aligned base, as four uint32."""
        return tuple(pointer.read(i, 16).view(np.uint32))

    def load_two_words(pointer, i):
        """The 8 bytes at element `i`, aligned alike, as two uint32."""
        return tuple(pointer.read(i, 8).view(np.uint32))

    def load_words_if(wanted, pointer, row, stride, column, skip):
        """`load_words` at row * stride + column + skip, but four zeros unless `wanted`; nothing branches."""
        return load_words(pointer, offset(row, stride, column) + skip) if wanted else (U32(0),) * 4

    def store_words(pointer, i, words):
        """Store a tuple of two or four uint32 at element `i` in one 8- or 16-byte access, aligned alike."""
        pointer.write(i, np.array(words, np.uint32))

    def store_words_if(wanted, pointer, row, stride, column, words):
        """`store_words` at row * stride + column if `wanted`; nothing branches."""
        if wanted:
            store_words(pointer, offset(row, stride, column), words)

    def atomic_max(pointer, i, value):
        """Raise element `i` of int32 memory to `value`, undisturbed by other threads."""
        pointer[i] = max(pointer[i], value)

else:
    import numba
    from llvmlite import ir
    from numba import types

    if not hasattr(np, "row_stack"):  # numba-cuda 0.30.4 looks it up; NumPy 2.5 has only the other name
        np.row_stack = np.vstack

    from numba import cuda as cuda
    from numba.extending import overload

    def named_by_content(function):
        """Give a function a qualified name that says what it closes over, and return it.

        Numba names machine code by the qualified name and a number that each process counts anew. Functions of one
        factory that different processes kept on disk would share a symbol, and the first to be loaded would serve for
        all.
        """
        function.__qualname__ = (
            f"{function.__qualname__}_{hashlib.sha256(_content(function).encode()).hexdigest()[:12]}"
        )
        return function

    def _content(value):
        value = getattr(value, "py_func", value)
        cells = getattr(value, "__closure__", None)
        if callable(value) and hasattr(value, "__code__"):
            kept = [_content(cell.cell_contents) for cell in cells or () if cell.cell_contents is not value]
            text = _text(value.__code__, value.__globals__)
            return f"{value.__module__}.{value.__qualname__} {text}({', '.join(kept)})"
        if isinstance(value, tuple):
            return f"({', '.join(map(_content, value))})"
        return f"{value.dtype} {value.tobytes().hex()}" if isinstance(value, np.ndarray) else repr(value)

    def _text(code, names):
        """A function's text: its bytecode, its constants and those of its module."""
        inner = [_text(one, names) if hasattr(one, "co_code") else repr(one) for one in code.co_consts]
        numbers = [repr(names[name]) for name in code.co_names if isinstance(names.get(name), np.number | int | float)]
        return f"{code.co_code.hex()} {code.co_names} {inner} {numbers}"

    #: Options of a function that only compiled code calls: the entries for Python and C, a fifth of the time that it
    #: takes, are not compiled. A call from Python ends the process. A division by zero gives infinity, as everywhere.
    ONLY_FROM_COMPILED_CODE = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

    def device(function, called_with=None):
        """A scalar helper: the Python function itself, compiled for whichever target calls it.

        Its calls are left to LLVM, which inlines them all: inlining in Numba's own representation loses variables that
        are assigned in branches. `called_with` is a list that gets the Numba types of each kind of call.
        """
        named_by_content(function)
        names = ", ".join(inspect.signature(function).parameters)
        note = [].append if called_with is None else called_with.append
        choose = eval(f"lambda {names}: note([{names}]) or function", {"function": function, "note": note})
        overload(function, target="cuda", jit_options={"forceinline": True})(choose)
        overload(function, target="cpu", jit_options={"forceinline": True, **ONLY_FROM_COMPILED_CODE})(choose)
        return function

    device_of_code = device

    def kernel(function):
        """A kernel: the Python function itself; `launch` and `compile_report` compile it for a signature."""
        return function

    def on_gpu(replacement):
        """Decorate the meaning of `replacement` off the GPU: on a GPU `replacement` is called instead.

        Args:
            replacement: what CUDA code calls: a `math` function, an intrinsic, a device function.
        """

        def decorate(meaning):
            names = ", ".join(inspect.signature(meaning).parameters)
            scope = {"replacement": replacement, "meaning": meaning}
            exec(f"def on_cuda({names}):\n    return replacement({names})", scope)
            exec(f"def choose_cuda({names}):\n    return on_cuda", scope)
            exec(f"def choose_cpu({names}):\n    return meaning", scope)
            overload(meaning, target="cuda")(scope["choose_cuda"])
            overload(meaning, target="cpu", jit_options={"error_model": "numpy", "forceinline": True})(
                scope["choose_cpu"]
            )
            return meaning

        return decorate

    def ptx(asm, constraints, result, *arguments):
        """Decorate the meaning of one PTX instruction (or a few) off the GPU.

        Args:
            asm: the text, with $0 for the result and $1, $2, ... for the arguments.
            constraints: LLVM's: a letter for each operand, f float32, r 32 bits, h 16 bits, l 64 bits.
            result, *arguments: NumPy scalar types.
        """
        result, arguments = numba.from_dtype(np.dtype(result)), [numba.from_dtype(np.dtype(a)) for a in arguments]

        def emit(context, builder, signature, values):
            llvm = context.get_value_type
            function = ir.FunctionType(llvm(signature.return_type), [llvm(a) for a in signature.args])
            return builder.call(ir.InlineAsm(function, asm, constraints), values)

        def decorate(meaning):
            names = ", ".join(inspect.signature(meaning).parameters)
            scope = {"signature": result(*arguments), "emit": emit}
            exec(f"def {meaning.__name__}(typingctx, {names}):\n    return signature, emit", scope)
            return on_gpu(_intrinsic(scope[meaning.__name__]))(meaning)

        return decorate

    @contextmanager
    def each_rounded():
        """A context in which NVVM contracts no product and sum to a multiply-add; other threads compile after it."""
        from numba.cuda import compiler
        from numba.cuda.cudadrv import nvvm

        original = nvvm.compile_ir
        with compiler.global_compiler_lock:
            nvvm.compile_ir = lambda ir, **options: original(ir, **{**options, "fma": False})
            try:
                yield
            finally:
                nvvm.compile_ir = original

    def _intrinsic(function):
        from numba.cuda.extending import intrinsic

        return intrinsic(function)

    def _select(typingctx, condition, a, b):
        unified = typingctx.unify_types(a, b)

        def emit(context, builder, signature, values):
            return builder.select(*values)

        return unified(types.boolean, unified, unified), emit

    _select_on_cuda, _select_on_cpu = _intrinsic(_select), numba.extending.intrinsic(_select)

    def select(condition, a, b):
        """`a` where the condition holds, else `b`; both are evaluated, nothing branches."""
        return a if condition else b

    overload(select, target="cuda", jit_options={"forceinline": True})(lambda condition, a, b: _call_select_on_cuda)
    overload(select, target="cpu", jit_options={"forceinline": True})(lambda condition, a, b: _call_select_on_cpu)

    def _call_select_on_cuda(condition, a, b):
        return _select_on_cuda(condition, a, b)

    def _call_select_on_cpu(condition, a, b):
        return _select_on_cpu(condition, a, b)

    _WORD = ir.IntType(32)

    def _vector_address(builder, pointer, i, lanes):
        return builder.bitcast(builder.gep(pointer, [i]), ir.PointerType(ir.VectorType(_WORD, lanes)))

    def _load(lanes):
        def emit(context, builder, signature, values):
            vector = builder.load(_vector_address(builder, *values, lanes), align=4 * lanes)
            words = [builder.extract_element(vector, _WORD(k)) for k in range(lanes)]
            return context.make_tuple(builder, signature.return_type, words)

        return emit

    @_intrinsic
    def load_words(typingctx, pointer, i):
        """The 16 bytes at element `i`, a multiple of 16 bytes from an aligned base, as four uint32."""
        return types.UniTuple(types.uint32, 4)(pointer, types.intp), _load(4)

    @_intrinsic
    def _load_two_words_on_cuda(typingctx, pointer, i):
        return types.UniTuple(types.uint32, 2)(pointer, types.intp), _load(2)

    @on_gpu(_load_two_words_on_cuda)
    def load_two_words(pointer, i):
        """The 8 bytes at element `i`, aligned alike, as two uint32; on a CPU of float32."""
        return as_u32(pointer[U64(i)]), as_u32(pointer[U64(i) + U64(1)])

    _ADDRESS = ir.IntType(64)
    #: Zeros, and over them what lies at an address if a flag is set: as PTX, no copy joins the two.
    _LOAD_IF = (
        "{ .reg .pred p; .reg .b64 a; setp.ne.u32 p, $4, 0; cvta.to.global.u64 a, $5;"
        " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [a]; }"
    )

    def _address(builder, size, pointer, row, stride, column):
        """The address of pointer[row * stride + column], elements of 1, 2 or 4 bytes; a column's is found once."""
        base = builder.ptrtoint(builder.gep(pointer, [builder.zext(column, _ADDRESS)]), _ADDRESS)
        factors = builder.shl(row, _WORD(size // 4)), builder.shl(stride, _WORD(min(size // 2, 1)))  # below 2^32
        function = ir.FunctionType(_ADDRESS, [_WORD, _WORD, _ADDRESS])
        return builder.call(ir.InlineAsm(function, "mad.wide.u32 $0, $1, $2, $3;", "=l,r,r,l"), [*factors, base])

    _PLACE = (types.int32,) * 3

    @_intrinsic
    def load_words_if(typingctx, wanted, pointer, row, stride, column, skip):
        """`load_words` at row * stride + column + skip, but four zeros unless `wanted`; nothing branches."""
        function = ir.FunctionType(ir.LiteralStructType([_WORD] * 4), [_WORD, _ADDRESS])
        asm, size = ir.InlineAsm(function, _LOAD_IF, "=&r,=&r,=&r,=&r,r,l"), pointer.dtype.bitwidth // 8

        def emit(context, builder, signature, values):
            further = builder.mul(values[-1], _ADDRESS(size))
            address = builder.add(_address(builder, size, *values[1:-1]), further)
            loaded = builder.call(asm, [builder.zext(values[0], _WORD), address])
            words = [builder.extract_value(loaded, k) for k in range(4)]
            return context.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.uint32, 4)(types.boolean, pointer, *_PLACE, types.intp), emit

    @_intrinsic
    def store_words_if(typingctx, wanted, pointer, row, stride, column, words):
        """`store_words` at row * stride + column if `wanted`; nothing branches."""
        lanes, size = len(words), pointer.dtype.bitwidth // 8
        operands = ", ".join(f"${2 + k}" for k in range(lanes))
        text = "{ .reg .pred p; .reg .b64 a; setp.ne.u32 p, $0, 0; cvta.to.global.u64 a, $1;"
        text += f" @p st.global.v{lanes}.b32 [a], {{{operands}}}; }}"
        function = ir.FunctionType(ir.VoidType(), [_WORD, _ADDRESS, *[_WORD] * lanes])
        asm = ir.InlineAsm(function, text, "r,l" + ",r" * lanes + ",~{memory}", side_effect=True)

        def emit(context, builder, signature, values):
            packed = context.cast(builder, values[-1], signature.args[-1], types.UniTuple(types.uint32, lanes))
            given = [builder.extract_value(packed, k) for k in range(lanes)]
            address = _address(builder, size, *values[1:-1])
            builder.call(asm, [builder.zext(values[0], _WORD), address, *given])
            return context.get_dummy_value()

        return types.void(types.boolean, pointer, *_PLACE, words), emit

    @_intrinsic
    def store_words(typingctx, pointer, i, words):
        """Store a tuple of two or four uint32 at element `i` in one 8- or 16-byte access, aligned alike."""
        lanes = len(words)

        def emit(context, builder, signature, values):
            address, index, given = values
            packed = context.cast(builder, given, signature.args[2], types.UniTuple(types.uint32, lanes))
            vector = ir.Constant(ir.VectorType(_WORD, lanes), ir.Undefined)
            for k in range(lanes):
                vector = builder.insert_element(vector, builder.extract_value(packed, k), _WORD(k))
            builder.store(vector, _vector_address(builder, address, index, lanes), align=4 * lanes)
            return context.get_dummy_value()

        return types.void(pointer, types.intp, words), emit

    @_intrinsic
    def atomic_max(typingctx, pointer, i, value):
        """Raise element `i` of int32 memory to `value`, undisturbed by other threads."""

        def emit(context, builder, signature, values):
            address = builder.gep(values[0], [values[1]])
            builder.atomic_rmw("max", address, values[2], "monotonic")
            return context.get_dummy_value()

        return types.void(pointer, types.intp, types.int32), emit

    # --- reinterpretation -------------------------------------------------------------------------

    @device
    def as_f32(bits):
        """The float32 with these bits."""
        return np.uint32(bits).view(np.float32)

    @device
    def as_u32(x):
        """The bits of a float32."""
        return np.float32(x).view(np.uint32)

    @device
    def as_i32(x):
        """The bits of a float32 as a signed integer: the order of non-negative floats."""
        return np.float32(x).view(np.int32)


# --- offsets ----------------------------------------------------------------------------------------


@ptx("{ .reg .u64 t; cvt.u64.u32 t, $3; mad.wide.u32 $0, $1, $2, t; }", "=l,r,r,r", I64, I32, I32, I32)
def offset(row, stride, column):
    """row * stride + column in 64 bits, of numbers from 0 to 2^31 - 1: one instruction on a GPU."""
    return I64(row) * I64(stride) + I64(column)


# --- where a thread is in its grid ------------------------------------------------------------------

#: Threads of a block, of kernels whose blocks have one size.
THREADS = 256


@device
def thread_number():
    """This thread's number in a one-dimensional launch of 256 threads a block."""
    return I32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)


@device
def first_row(rows_of_a_block):
    """First row of this thread block's part of the grid; rows may be folded over y and z."""
    return I32((cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y) * rows_of_a_block)


@device
def first_column(columns_of_a_block):
    """First column of this thread block's part of the grid."""
    return I32(cuda.blockIdx.x * columns_of_a_block)


# --- float32 instructions ---------------------------------------------------------------------------


@ptx("max.f32 $0, $1, $2;", "=f,f,f", F, F, F)
def maximum(a, b):
    """The larger of two; a NaN `b` loses. `a` is no NaN."""
    return select(b > a, b, a)


@ptx("min.f32 $0, $1, $2;", "=f,f,f", F, F, F)
def at_most(x, limit):
    """x, but `limit` where it is larger or NaN."""
    return select(x <= limit, x, limit)


@ptx("max.f32 $0, $1, $2;", "=f,f,f", F, F, F)
def at_least(x, limit):
    """x, but `limit` where it is smaller or NaN."""
    return select(x >= limit, x, limit)


@ptx("{ .reg .f32 t; abs.f32 t, $2; min.f32 $0, $1, t; }", "=f,f,f", F, F, F)
def smaller_magnitude(a, x):
    """The smaller of `a` and |x|; a NaN `x` loses. `a` is no NaN. One instruction on a GPU."""
    m = as_f32(np.uint32(as_u32(x) & U32(0x7FFFFFFF)))
    return select(m < a, m, a)


@ptx("{ .reg .f32 t; abs.f32 t, $2; max.f32 $0, $1, t; }", "=f,f,f", F, F, F)
def larger_magnitude(a, x):
    """The larger of `a` and |x|; a NaN `x` loses. `a` is no NaN. One instruction on a GPU."""
    m = as_f32(np.uint32(as_u32(x) & U32(0x7FFFFFFF)))
    return select(m > a, m, a)


@ptx("set.le.f32.f32 $0, $1, $2;", "=f,f,f", F, F, F)
def is_at_most(x, limit):
    """1 where x <= limit, else 0: a mask to multiply by."""
    return select(x <= limit, F(1), F(0))


@ptx("{ .reg .f32 t; abs.f32 t, $1; set.le.f32.f32 $0, t, $2; }", "=f,f,f", F, F, F)
def is_within(x, limit):
    """1 where |x| <= limit, else 0."""
    return is_at_most(as_f32(as_u32(x) & U32(0x7FFFFFFF)), limit)


@ptx("fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", F, F, F, F)
def fma_sat(a, b, c):
    """a * b + c, rounded once and cut to [0, 1]; NaN gives 0."""
    total = np.float64(a) * np.float64(b) + np.float64(c)
    return select(total > 0, F(select(total < 1, total, np.float64(1))), F(0))


@ptx("mul.rn.sat.f32 $0, $1, $2;", "=f,f,f", F, F, F)
def mul_sat(a, b):
    """a * b cut to [0, 1]; NaN gives 0."""
    product = a * b
    return select(product > 0, select(product < 1, product, F(1)), F(0))


@device
def magnitude(x):
    """|x|."""
    return as_f32(as_u32(x) & U32(0x7FFFFFFF))


@device
def clipped(x, limit):
    """x cut to [-limit, limit]; NaN stays."""
    x = select(x > limit, limit, x)
    return select(x < -limit, -limit, x)


@ptx("{ .reg .f32 t; neg.f32 t, $2; min.NaN.f32 $0, $1, $2; max.NaN.f32 $0, $0, t; }", "=&f,f,f", F, F, F)
def clipped_natively(x, limit):
    """`clipped` in two instructions, from sm_80 on."""
    return clipped(x, limit)
