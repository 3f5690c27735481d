"""The planner's and the readers' arrays as one block of memory: compiled code gets all of them by one address.

A call that passes a tuple of forty arrays passes some three hundred words: ten microseconds from Python, as long as the plan
of a decode step, and too much even between compiled functions. So the store writes down where the arrays lie, once, and
`plan_at(address)` and `state_at(address)` are, in compiled code, things with the same attributes that are one word each.
Invariant: the block lives, unchanged, as long as the arrays do, and they as long as any thread uses it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof
from numba.core import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model
from numba.np.arrayobj import populate_array

from ssdgram._arena import Arena
from ssdgram._budget import Shape, specs_of
from ssdgram._plan_state import Plan
from ssdgram._state import State

ARRAY_WORDS = 3                                              # of an array in the block: its address, its shape (1 or 2 numbers)


def lay_out(a: Arena | dict[str, np.ndarray]) -> tuple[State, Plan]:
    """The arena's arrays as the planner and the readers take them."""
    state = State(control=a["control"], words=a["words"], params=a["params"], faults=a["faults"], step_ring=a["step_ring"],
                  background_ring=a["background_ring"], done_ring=a["done_ring"], pages=a["pages"], targets=a["targets"],
                  files=a["files"], claims=a["claims"], staging=a["staging"], slab=a["slab"])
    plan = Plan(control=a["plan_control"], params=a["plan_params"], stats=a["stats"], requests=a["requests"], batches=a["batches"],
                layers=a["layers"], words=a["batch_words"], active=a["active"], gpu_words=a["gpu_words"],
                token_words=a["token_words"], hbm=a["hbm"], wants=a["wants"], copies=a["copies"], copy_word=a["copy_word"],
                slots=a["slots"], failures=a["failures"], directory=a["directory"], sketch=a["sketch"], overflow=a["overflow"],
                buckets=a["buckets"], building=a["building"],
                groups=a["groups"], group_index=a["group_index"], multipliers=a["multipliers"], token_map=a["token_map"],
                keys=a["keys"], found=a["found"], entries=a["entries"], crew=a["crew"], crew_futex=a["crew_futex"],
                chunks=a["chunks"])
    return state, plan


_SMALLEST = Shape(layers=1, orders=1, files=1, vocabulary=1, stride=64, heads=1, readers=1, depth=1, batches=2, hbm_slots=1, crew=1)
_sample = lay_out({name: np.zeros(shape, dtype) for name, dtype, shape in specs_of(_SMALLEST, 16, 1, 2, 1)})
PLAN_AT = len(State._fields) * ARRAY_WORDS * 8               # byte of the block where the plan's arrays begin


class ArraysType(types.Type):
    """Type, in compiled code, of the address of arrays that were written down, one behind the other."""

    def __init__(self, name: str, fields: tuple[tuple[str, Any], ...]) -> None:
        self.fields = dict(fields)
        digest = hashlib.sha256(", ".join(f"{field}: {kind}" for field, kind in fields).encode()).hexdigest()
        super().__init__(name=f"{name}_{digest[:8]}")            # short: it is part of every symbol's name


@register_model(ArraysType)
class _ArraysModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.IntType(64))


@infer_getattr
class _ArraysAttribute(AttributeTemplate):
    key = ArraysType

    def generic_resolve(self, kind: Any, name: str) -> Any:
        return kind.fields.get(name)


@lower_getattr_generic(ArraysType)
def _array_of(context: Any, builder: Any, kind: Any, address: Any, name: str) -> Any:
    """The array `name`: its address and shape are loaded, as words that never change."""
    array_type, i64 = kind.fields[name], ir.IntType(64)
    first = list(kind.fields).index(name) * ARRAY_WORDS
    words = builder.inttoptr(address, i64.as_pointer())

    def word(k: int) -> Any:
        loaded = builder.load(builder.gep(words, [ir.Constant(i64, first + k)]))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    array = context.make_array(array_type)(context, builder)
    element = context.get_data_type(array_type.dtype)
    size = ir.Constant(i64, context.get_abi_sizeof(element))
    shape = [word(1 + k) for k in range(array_type.ndim)]
    strides = [size] if array_type.ndim == 1 else [builder.mul(shape[1], size), size]
    populate_array(array, data=builder.inttoptr(word(0), element.as_pointer()), shape=shape, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()


def _reader(kind: ArraysType) -> Any:
    @intrinsic
    def at(typingctx, address):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return arguments[0]

        return kind(types.int64), codegen

    return at


def _type_of(name: str, arrays: Any) -> ArraysType:
    return ArraysType(name, tuple((field, typeof(array)) for field, array in zip(arrays._fields, arrays, strict=True)))


STATE_TYPE, PLAN_TYPE = _type_of("State", _sample[0]), _type_of("Plan", _sample[1])
state_at, plan_at = _reader(STATE_TYPE), _reader(PLAN_TYPE)


def keep(state: State, plan: Plan) -> np.ndarray:
    """The block (int64): `state_at(its address)` and `plan_at(its address + PLAN_AT)` are the arrays, in compiled code."""
    for name, arrays, expected in (("State", state, STATE_TYPE), ("Plan", plan, PLAN_TYPE)):
        if _type_of(name, arrays) != expected:
            raise TypeError(f"the arrays are {_type_of(name, arrays)}: compiled code expects {expected}")
    block = np.zeros((len(state) + len(plan), ARRAY_WORDS), np.int64)
    for words, array in zip(block, [*state, *plan], strict=True):
        words[:1 + array.ndim] = array.ctypes.data, *array.shape
    return block
