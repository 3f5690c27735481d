"""Two things that keep the readers' loops lean: `borrowed` arrays, and functions `inlined` into their callers.

A compiled function that is not inlined takes the State apart into some ninety arguments on every call, and counts a
reference to each array: locked additions on cache lines that all readers share. Together that was 0.9 of 1.1 us of a
reader's own time per page read. Whoever calls a loop holds its arrays until it returns, so nothing needs to be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba.core import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def inlined(function: F) -> F:
    """Have a compiled function put into its callers by LLVM. It can then be called from compiled code only."""
    options = function.targetoptions  # type: ignore[attr-defined]
    options.update(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    return function


def _uncounted(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.BaseTuple):  # type: ignore[attr-defined]
        for k, member in enumerate(kind.types):
            value = builder.insert_value(value, _uncounted(context, builder, member, builder.extract_value(value, k)), k)
        return value
    array = context.make_array(kind)(context, builder, value)
    array.meminfo = context.get_constant_null(types.MemInfoPointer(kind.dtype))  # type: ignore[attr-defined]
    return array._getvalue()


@intrinsic
def borrowed(typingctx, arrays):  # type: ignore[no-untyped-def]
    """The same array or (named) tuple of arrays, uncounted. The caller of the compiled loop keeps them alive: only for arguments
    of that loop, never for an array made in it."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return _uncounted(context, builder, signature.args[0], arguments[0])

    return arrays(arrays), codegen
