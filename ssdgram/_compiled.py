"""Compiled code: the one way in which this package makes a GIL-free machine-code function, and the few primitives below it.

``@compiled`` is Numba's ``njit`` (no GIL, C-like error model) with a disk cache whose key holds a digest of all sources that
the function may depend on: Numba itself looks at the calling file only, so a change in a called file would go unseen.
The cache lives beside the sources, or, where that folder cannot be written, in the user's cache folder (with a log line).
One process compiles at a time; others wait for it and then load.

The primitives are what a loop without Python needs: atomics with acquire/release order, system calls, futexes, a clock,
CRC-32C in hardware, addresses and copies. This module knows nothing of rows, pages or stores.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import caching, cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

log = logging.getLogger("ssdgram")
F = TypeVar("F", bound=Callable[..., Any])

PACKAGE = Path(__file__).resolve().parent
_process_lock = threading.RLock()
COMPILE_NOTICE_S = 2.0                                       # a compilation that takes longer says what it is doing


# ---------------------------------------------------------------- disk cache


_IMPORT = re.compile(rb"^\s*(?:from|import)\s+(ssdgram[\w.]*)(?:\s+import\s+(\([^)]*\)|[^\n]*))?", re.MULTILINE)


def _source_of(module: str) -> Path | None:
    """Source file of a module of this package, if it is one."""
    parts = module.split(".")[1:]
    for path in (PACKAGE.joinpath(*parts).with_suffix(".py") if parts else None, PACKAGE.joinpath(*parts, "__init__.py")):
        if path is not None and path.is_file():
            return path
    return None


@functools.cache
def _imports_of(module: str) -> tuple[bytes, frozenset[str]]:
    """A module's source and the modules of this package that it imports anything from."""
    path = _source_of(module)
    text = path.read_bytes() if path is not None else b""
    found = set()
    for match in _IMPORT.finditer(text):
        base = match[1].decode()
        names = re.findall(r"[\w]+", re.sub(r" as \w+", "", (match[2] or b"").decode()))
        found |= {f"{base}.{name}" for name in names if _source_of(f"{base}.{name}")} or {base}
    return text, frozenset(found - {"ssdgram"})


@functools.cache
def stamp_of(module: str) -> str:
    """Digest of the sources that compiled code of `module` may depend on: its own and, transitively, those it imports."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(_imports_of(name)[1])
    digest = hashlib.sha256(f"{numba.__version__} {np.__version__}".encode())
    for name in sorted(seen):
        digest.update(name.encode() + b"\0" + _imports_of(name)[0])
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    """The folder of this build's compiled code: beside the sources if it can be written, else the user's cache."""
    chosen = os.environ.get("SSDGRAM_CACHE_DIR")
    if chosen:
        return Path(chosen, "ssdgram")
    beside = PACKAGE / "__pycache__" / "compiled"
    if _writable(beside):
        return beside
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssdgram"
    if _writable(home):
        log.info("compiled code is kept in %s, because %s cannot be written", home, beside.parent)
        return home
    import tempfile

    last = Path(tempfile.mkdtemp(prefix="ssdgram-"))
    log.warning("neither %s nor %s can be written: compiled code is kept for this process only", beside, home)
    return last


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


CACHE_FOLDER = _cache_folder()


def _file_stamp(path: str) -> str:
    """Stamp of compiled code outside the package (tests, scripts): its file, and all that it may import of us."""
    own = Path(path).read_bytes() if os.path.isfile(path) else os.urandom(16)
    ours = sorted({match[1].decode() for match in _IMPORT.finditer(own)})
    return hashlib.sha256(own + "".join(stamp_of(name) for name in ours).encode()).hexdigest()[:16]


class _Locator(caching._CacheLocator):
    """Puts every function's cache into CACHE_FOLDER, under a name that tells its sources, so that nothing in it goes stale."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        self._stamp = stamp_of(py_func.__module__) if py_func.__module__.startswith("ssdgram.") else _file_stamp(py_file)
        self._name = f"{py_func.__module__}.{py_func.__qualname__} {self._stamp}"

    def get_cache_path(self) -> str:
        return str(CACHE_FOLDER)

    def get_source_stamp(self) -> str:
        return self._stamp

    def get_disambiguator(self) -> str:
        return hashlib.sha256(self._name.encode()).hexdigest()[:10]

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func, py_file)


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_Locator]


class _Cache(caching.FunctionCache):
    _impl_class = _Implementation

    def save_overload(self, sig: Any, data: Any) -> None:
        """One process at a time: two that save for different types would give both the same file, and one the other's code."""
        try:
            with _locked(".saving"):
                super().save_overload(sig, data)
        except OSError as error:
            _say_once(f"compiled code cannot be kept in {CACHE_FOLDER} ({error}): every process compiles for itself; let "
                      f"SSDGRAM_CACHE_DIR name a folder that can be written, or run `ssdgram warmup` where it can")


@functools.cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold the lock of that name of all processes that share CACHE_FOLDER. OSError if nothing can be written there."""
    CACHE_FOLDER.mkdir(parents=True, exist_ok=True)
    with open(CACHE_FOLDER / name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)                 # closing is not enough: a child forked meanwhile has it open too


@contextlib.contextmanager
def compile_lock() -> Iterator[None]:
    """Hold the machine-wide compile lock: one process compiles, the others wait and then load what it made. None in a folder that
    cannot be written, where nobody leaves anything."""
    with _process_lock, contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            held.enter_context(_locked(".lock"))
        yield


def compiled(function: F) -> F:
    """Compile `function` on first use to a GIL-free loop, cached on disk (see the module's text)."""
    return _cached(numba.njit(nogil=True, error_model="numpy")(function))


def compiled_lean(function: F) -> F:
    """As `compiled`, for functions that neither allocate nor return arrays: no reference counts, quicker code and compilation."""
    return _cached(numba.njit(nogil=True, error_model="numpy", _nrt=False)(function))


def compiled_inner(function: F) -> F:
    """As `compiled_lean`, for functions called from compiled code only: no entry from Python is made, which would take longer
    to compile than the function itself when its arguments are tuples of dozens of arrays."""
    return _cached(numba.njit(nogil=True, error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def _cached(dispatcher: Any) -> Any:
    dispatcher._cache = _Cache(dispatcher.py_func)
    return dispatcher


def compile_for(function: Any, *arguments: Any) -> None:
    """Load `function` from the cache, or compile it under the machine-wide lock, for the types of `arguments`."""
    signature = tuple(numba.typeof(argument) for argument in arguments)
    if signature in function.overloads:
        return
    notice = threading.Timer(COMPILE_NOTICE_S, log.warning, (
        "compiling %s, once for this installation and processor (about a minute; `ssdgram warmup` does it ahead)", function.__name__))
    notice.daemon = True
    notice.start()
    try:
        with compile_lock():
            function.compile(signature)
    finally:
        notice.cancel()


# ---------------------------------------------------------------- external functions

_libc = ctypes.CDLL(None)
for _symbol in ("syscall", "__errno_location", "clock_gettime"):    # a symbol that is not there would crash the process later
    if not hasattr(_libc, _symbol):
        raise ImportError(f"the C library does not export {_symbol}(): SSDGram runs on Linux with glibc or musl")
    llvmlite.binding.add_symbol(_symbol, cast(int, ctypes.cast(getattr(_libc, _symbol), ctypes.c_void_p).value))

_i8, _i32, _i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _declare(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type], variadic: bool = False) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments, var_arg=variadic), name)


@intrinsic
def syscall(typingctx, number, a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """One system call; the result, or minus errno. All arguments int64."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        function = _declare(builder, "syscall", _i64, [_i64], variadic=True)
        result = builder.call(function, arguments)
        failed = builder.icmp_signed("==", result, ir.Constant(_i64, -1))
        location = builder.call(_declare(builder, "__errno_location", _i32.as_pointer(), []), [])
        errno = builder.sext(builder.load(location), _i64)
        return builder.select(failed, builder.neg(errno), result)

    return types.int64(*[types.int64] * 7), codegen


@intrinsic
def now_ns(typingctx):  # type: ignore[no-untyped-def]
    """CLOCK_MONOTONIC in nanoseconds, int64."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pair = cgutils.alloca_once(builder, ir.ArrayType(_i64, 2))
        clock = _declare(builder, "clock_gettime", _i32, [_i32, _i8.as_pointer()])
        builder.call(clock, [ir.Constant(_i32, 1), builder.bitcast(pair, _i8.as_pointer())])
        seconds = builder.load(cgutils.gep_inbounds(builder, pair, 0, 0))
        nanos = builder.load(cgutils.gep_inbounds(builder, pair, 0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(_i64, 1_000_000_000)), nanos)

    return types.int64(), codegen


# ---------------------------------------------------------------- addresses and atomics (1-D C-contiguous arrays)


def _element_pointer(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def address_of(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Address of array[index], int64; the array is C-contiguous, the index is flat."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ptrtoint(_element_pointer(context, builder, signature.args[0], *arguments), _i64)

    return types.int64(array, types.int64), codegen


@intrinsic
def atomic_load(typingctx, array, index):  # type: ignore[no-untyped-def]
    """array[index] with acquire order."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = _element_pointer(context, builder, signature.args[0], *arguments)
        return builder.load_atomic(pointer, "acquire", signature.args[0].dtype.bitwidth // 8)

    return array.dtype(array, types.int64), codegen


@intrinsic
def atomic_load_at(typingctx, address):  # type: ignore[no-untyped-def]
    """The int64 at an address (8-aligned) with acquire order."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.load_atomic(builder.inttoptr(arguments[0], _i64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx, array, index, value):  # type: ignore[no-untyped-def]
    """array[index] = value with release order."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = _element_pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        builder.store_atomic(arguments[2], pointer, "release", signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), codegen


@intrinsic
def atomic_add(typingctx, array, index, value):  # type: ignore[no-untyped-def]
    """Add to array[index], sequentially consistent; the value before."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = _element_pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        return builder.atomic_rmw("add", pointer, arguments[2], "seq_cst")

    return array.dtype(array, types.int64, array.dtype), codegen


@intrinsic
def atomic_exchange(typingctx, array, index, value):  # type: ignore[no-untyped-def]
    """Store into array[index], sequentially consistent; the value before."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = _element_pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        return builder.atomic_rmw("xchg", pointer, arguments[2], "seq_cst")

    return array.dtype(array, types.int64, array.dtype), codegen


@intrinsic
def atomic_cas(typingctx, array, index, expected, value):  # type: ignore[no-untyped-def]
    """Store into array[index] if it holds `expected`, sequentially consistent; whether it did."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = _element_pointer(context, builder, signature.args[0], arguments[0], arguments[1])
        pair = builder.cmpxchg(pointer, arguments[2], arguments[3], "seq_cst", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(array, types.int64, array.dtype, array.dtype), codegen


@intrinsic
def atomic_add_at(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Add to the int32 at an address (4-aligned), sequentially consistent; the value before."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], _i32.as_pointer()), arguments[1], "seq_cst")

    return types.int32(types.int64, types.int32), codegen


@intrinsic
def atomic_exchange_at(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Store into the int64 at an address (8-aligned), sequentially consistent; the value before."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("xchg", builder.inttoptr(arguments[0], _i64.as_pointer()), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):  # type: ignore[no-untyped-def]
    """Tell the processor that this thread spins, so that its sibling gets the core."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        if platform.machine() == "x86_64":
            builder.call(_declare(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
        else:
            builder.call(_declare(builder, "llvm.aarch64.hint", ir.VoidType(), [_i32]), [ir.Constant(_i32, 1)])      # YIELD
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def fence(typingctx):  # type: ignore[no-untyped-def]
    """A full memory fence: a store before it is seen before a load after it is made."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at `address` (int64) without waiting for it."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(arguments[0], _i8.as_pointer())
        function = _declare(builder, "llvm.prefetch.p0", ir.VoidType(), [_i8.as_pointer(), _i32, _i32, _i32])
        builder.call(function, [pointer, ir.Constant(_i32, 0), ir.Constant(_i32, 3), ir.Constant(_i32, 1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def copy_bytes(typingctx, destination, source, length):  # type: ignore[no-untyped-def]
    """memcpy between addresses (int64); the regions do not overlap."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        to, start = (builder.inttoptr(a, _i8.as_pointer()) for a in arguments[:2])
        cgutils.raw_memcpy(builder, to, start, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _loader(name: str, bits: int, result: Any) -> Any:
    @intrinsic
    def load(typingctx, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            return builder.load(pointer, align=1)

        return result(types.int64), codegen

    load.__doc__ = f"The {name} at an address (int64), at any alignment."
    return load


load_u8 = _loader("uint8", 8, types.uint8)
load_u32 = _loader("uint32", 32, types.uint32)
load_u64 = _loader("uint64", 64, types.uint64)


def _viewer(dtype: Any, width: int) -> Any:
    kind = types.Array(dtype, 1, "C")

    @intrinsic
    def view(typingctx, address, length):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            array = context.make_array(kind)(context, builder)
            pointer = builder.inttoptr(arguments[0], context.get_data_type(dtype).as_pointer())
            size = ir.Constant(_i64, width)
            populate_array(array, data=pointer, shape=[arguments[1]], strides=[size], itemsize=size, meminfo=None)
            return array._getvalue()

        return kind(types.int64, types.int64), codegen

    view.__doc__ = f"{dtype} array over memory at an address (int64) that somebody else keeps alive."
    return view


view_i32 = _viewer(types.int32, 4)
view_i64 = _viewer(types.int64, 8)
view_u8 = _viewer(types.uint8, 1)


# ---------------------------------------------------------------- futex (int32 arrays)

_NUMBERS = {"x86_64": (202, 35, 230), "aarch64": (98, 101, 115)}.get(platform.machine())
if _NUMBERS is None:
    raise ImportError(f"SSDGram knows the system calls of x86_64 and aarch64, not of {platform.machine()}")
SYS_FUTEX = _NUMBERS[0]
SYS_SCHED_YIELD = {"x86_64": 24, "aarch64": 124}[platform.machine()]
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1                              # not private: the words may be shared between processes


@intrinsic
def _timespec(typingctx, seconds, nanoseconds):  # type: ignore[no-untyped-def]
    """Address (int64) of a struct timespec on the calling function's stack."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pair = cgutils.alloca_once(builder, ir.ArrayType(_i64, 2))
        for k in range(2):
            builder.store(arguments[k], cgutils.gep_inbounds(builder, pair, 0, k))
        return builder.ptrtoint(pair, _i64)

    return types.int64(types.int64, types.int64), codegen


@compiled
def futex_wait(words, index, expected, timeout_ns):  # type: ignore[no-untyped-def]
    """Sleep while words[index] (int32) equals `expected`, for at most `timeout_ns` (< 0: for ever). 0 or minus errno."""
    if timeout_ns < 0:
        return syscall(SYS_FUTEX, address_of(words, index), _FUTEX_WAIT, np.int64(expected), 0, 0, 0)
    limit = _timespec(timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000)
    return syscall(SYS_FUTEX, address_of(words, index), _FUTEX_WAIT, np.int64(expected), limit, 0, 0)


@compiled
def futex_wake(words, index, count):  # type: ignore[no-untyped-def]
    """Wake at most `count` sleepers of words[index] (int32)."""
    return syscall(SYS_FUTEX, address_of(words, index), _FUTEX_WAKE, np.int64(count), 0, 0, 0)


# ---------------------------------------------------------------- CRC-32C (Castagnoli, reflected, as iSCSI and ext4 use it)


def _crc_table() -> np.ndarray:
    """Slicing-by-8 tables of the reflected polynomial 0x82F63B78, uint32 [8, 256]."""
    table = np.zeros((8, 256), np.uint32)
    value = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        value = np.where(value & 1, (value >> 1) ^ np.uint32(0x82F63B78), value >> 1).astype(np.uint32)
    table[0] = value
    for k in range(1, 8):
        table[k] = (table[k - 1] >> 8) ^ table[0][table[k - 1] & 0xFF]
    return table


CRC_TABLE = _crc_table()
_features = llvmlite.binding.get_host_cpu_features()
if platform.machine() == "x86_64" and _features.get("sse4.2"):
    _CRC_HARDWARE = {64: ("llvm.x86.sse42.crc32.64.64", _i64), 8: ("llvm.x86.sse42.crc32.32.8", _i32)}
elif platform.machine() == "aarch64" and _features.get("crc"):
    _CRC_HARDWARE = {64: ("llvm.aarch64.crc32cx", _i32), 8: ("llvm.aarch64.crc32cb", _i32)}
else:
    _CRC_HARDWARE = {}


def _crc_step(bits: int) -> Any:
    name, width = _CRC_HARDWARE[bits]
    operand = _i32 if bits == 8 and "aarch64" in name else ir.IntType(bits)

    @intrinsic
    def step(typingctx, crc, value):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            state = builder.zext(arguments[0], _i64) if width is _i64 else arguments[0]
            data = builder.zext(arguments[1], operand) if operand.width > bits else arguments[1]
            result = builder.call(_declare(builder, name, width, [width, operand]), [state, data])
            return builder.trunc(result, _i32) if width is _i64 else result

        return types.uint32(types.uint32, types.uint64 if bits == 64 else types.uint8), codegen

    return step


if _CRC_HARDWARE:
    _crc_u64, _crc_u8 = _crc_step(64), _crc_step(8)
else:

    @compiled
    def _crc_u64(crc, value):  # type: ignore[no-untyped-def]
        low = np.uint32(value & np.uint64(0xFFFFFFFF)) ^ crc
        high = np.uint32(value >> np.uint64(32))
        result = np.uint32(0)
        for k in range(4):
            result ^= CRC_TABLE[7 - k, (low >> np.uint32(8 * k)) & np.uint32(0xFF)]
            result ^= CRC_TABLE[3 - k, (high >> np.uint32(8 * k)) & np.uint32(0xFF)]
        return result

    @compiled
    def _crc_u8(crc, value):  # type: ignore[no-untyped-def]
        return (crc >> np.uint32(8)) ^ CRC_TABLE[0, (crc ^ np.uint32(value)) & np.uint32(0xFF)]


@compiled
def crc32c_update(state, address, length):  # type: ignore[no-untyped-def]
    """Fold `length` bytes at `address` into a raw CRC-32C register (uint32; start 0xFFFFFFFF, result is its complement)."""
    state = np.uint32(state)
    end = address + (length & ~7)
    while address < end:
        state = _crc_u64(state, load_u64(address))
        address += 8
    for k in range(length & 7):
        state = _crc_u8(state, load_u8(address + k))
    return state


@compiled
def crc32c_word(state, value):  # type: ignore[no-untyped-def]
    """Fold one little-endian uint64 into a raw CRC-32C register."""
    return _crc_u64(np.uint32(state), np.uint64(value))


@compiled
def crc32c(address, length):  # type: ignore[no-untyped-def]
    """CRC-32C of `length` bytes at `address`, uint32."""
    return crc32c_update(np.uint32(0xFFFFFFFF), address, length) ^ np.uint32(0xFFFFFFFF)
