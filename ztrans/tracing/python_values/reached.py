"""Reached: the places of the Python values that the code of a step can read besides its arguments.

The walk starts at the step's function and follows the names in its code: variables of closures and of modules,
defaults of parameters, attributes of objects, and through these the functions that the code calls. The code of
libraries is not followed, except for functions that were given to a library (`functools.partial`,
`torch.func.grad(loss)`, decorators).
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ...ir.source import Source, is_library
from .hooks import Hooks
from .own import NAMESPACES, is_own

ABSENT = object()
CONTAINERS = (list, tuple, dict, set, frozenset)
LONGEST = 1000  # containers with more entries are not followed, as they hold data rather than settings
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_OF_LIFT = frozenset({"defaults", "param_groups", "state", "_opt_called", "last_epoch", "_last_lr", "base_lrs"})
_OF_FUNCTION = {"__code__": "the code", "__defaults__": "a default", "__kwdefaults__": "a default"}
_BY_NAME = frozenset({"getattr", "hasattr", "attrgetter"})  # functions that take the name of an attribute
_ALL = frozenset({"vars", "__dict__", "asdict", "astuple"})  # names that read all attributes of an object
_NOT_CALLED = frozenset({"__init__", "__new__", "__init_subclass__", "__repr__", "__str__"})


@dataclass(frozen=True)
class Place:
    """A place from which the code reads a value: a variable, an attribute, or the defaults of a function."""

    name: str
    read: Callable[[], Any]  # returns ABSENT while the place has no value
    source: Source | None = None  # the line that writes the value, or else the first line that reads it
    write: Callable[[Any], None] | None = None  # assigns to a variable


@dataclass(frozen=True)
class Reach:
    """The places, objects and attributes that the code of a step reaches."""

    places: tuple[Place, ...]
    holders: tuple[tuple[str, Any], ...]  # the objects and containers that the code may change, each with its name
    attributes: Mapping[str, Source]  # the attributes that the code names, each with its line


def reach(fn: Callable) -> Reach:
    """The places that the code of `fn` reads, itself or in functions that it calls."""
    walk = _Walk()
    walk.visit(fn, getattr(fn, "__name__", "the step"))
    while walk.scan_attributes():
        pass
    walk.place(("hooks",), "the list of hooks", walk.hooks.present, None)
    return Reach(tuple(walk.places.values()), tuple(walk.holders.values()), walk.attributes)


class _Mentions(NamedTuple):
    """The names in a code object, each with the line that writes it, or else the first line that reads it."""

    globals: dict[str, int]
    closure: dict[str, int]
    attributes: dict[str, int]
    imports: dict[str, int]  # modules


@functools.cache
def _mentions(code: types.CodeType) -> _Mentions:
    mentions = _Mentions({}, {}, {}, {})
    kinds = {
        **dict.fromkeys(("GLOBAL", "NAME"), mentions.globals),
        **dict.fromkeys(("DEREF", "CLASSDEREF"), mentions.closure),
        **dict.fromkeys(("ATTR", "METHOD", "SUPER_ATTR"), mentions.attributes),
    }
    operations = {f"{action}_{kind}": names for action in ("LOAD", "STORE", "DELETE") for kind, names in kinds.items()}
    operations |= {"IMPORT_NAME": mentions.imports, "IMPORT_FROM": mentions.attributes}
    for step in dis.get_instructions(code):
        if (names := operations.get(step.opname)) is not None:
            line = (step.positions and step.positions.lineno) or code.co_firstlineno
            names[step.argval] = names.get(step.argval, line) if step.opname.startswith(("LOAD", "IMPORT")) else line
    if not _BY_NAME.isdisjoint(mentions.globals):  # getattr(args, "rate", 0.5)
        texts = {x: code.co_firstlineno for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
        mentions.attributes.update(texts | mentions.attributes)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):  # an inner function or a comprehension
            for names, nested in zip(mentions, _mentions(inner)):
                names.update(nested | names)
    return mentions


class _Walk:
    """One walk over all code that a function can call."""

    def __init__(self) -> None:
        self.places: dict[tuple, Place] = {}
        self.holders: dict[int, tuple[str, Any]] = {}
        self.attributes: dict[str, Source] = {}  # the attributes that the code names, with their lines
        self.scanned: set[tuple[int, str]] = set()
        self.seen: dict[int, Any] = {}
        self.reads_all = False  # whether the code reads all attributes of some object
        self.hooks = Hooks()

    def place(self, key: tuple, name: str, read: Callable, at: Source | None, write: Callable | None = None) -> None:
        value = read()
        if isinstance(value, types.ModuleType):
            self.visit(value, name)
        elif key not in self.places:
            self.places[key] = Place(name, read, at, write)
            self.visit(value, name)

    def visit(self, value: Any, name: str) -> None:
        """Follow a value: the names in a function's code, the entries of a container, the `__call__` of an object."""
        if id(value) in self.seen or isinstance(value, torch.Tensor):
            return
        self.seen[id(value)] = value
        for kind, follow in _FOLLOWED:
            if isinstance(value, kind):
                follow(self, value, name)
                return
        if callable(wrapped := inspect.getattr_static(value, "__wrapped__", None)):  # as with functools.cache
            self.visit(wrapped, name)
        elif is_own(type(value)):
            self.holders[id(value)] = name, value
            methods = {m for c in type(value).__mro__ if is_own(c) for m, f in vars(c).items() if callable(f)}
            for method in sorted(m for m in methods - _NOT_CALLED if m.startswith("__") and m.endswith("__")):
                self.attribute(value, method, name)  # which Python calls without its name, such as `__getitem__`

    def function(self, f: types.FunctionType, name: str) -> None:
        code, own = f.__code__, not is_library(f.__code__.co_filename)
        mentions = _mentions(code)
        where = lambda line: Source(code.co_filename, line, code.co_qualname)
        for variable, cell in zip(code.co_freevars, f.__closure__ or ()):
            if own:
                source = where(mentions.closure.get(variable, code.co_firstlineno))
                write = functools.partial(_fill, cell)
                self.place((id(cell), ""), variable, functools.partial(_contents, cell), source, write)
            elif callable(value := _contents(cell)):  # a function that was given to a library
                self.visit(value, variable)
        for attribute, kind in _OF_FUNCTION.items():
            if own and getattr(f, attribute):
                read = functools.partial(getattr, f, attribute)
                self.place((id(f), attribute), f"{kind} of {f.__name__}", read, where(code.co_firstlineno))
        if own:
            for module in mentions.imports:
                self.visit(sys.modules.get(module), module)
            for variable, line in mentions.globals.items():
                if variable in f.__globals__ or not hasattr(builtins, variable):
                    read = functools.partial(f.__globals__.get, variable, ABSENT)
                    write = functools.partial(_assign, f.__globals__, variable)
                    self.place((id(f.__globals__), variable), variable, read, where(line), write)
            self.reads_all |= not _ALL.isdisjoint({*mentions.globals, *mentions.attributes})
            self.attributes = {k: where(line) for k, line in mentions.attributes.items()} | self.attributes
        if vars(f):
            self.holders[id(f)] = name, f

    def method(self, bound: types.MethodType, name: str) -> None:
        self.visit(bound.__self__, name.rpartition(".")[0] or "self")
        self.visit(bound.__func__, name)

    def partial(self, p: functools.partial, name: str) -> None:
        self.visit(p.func, name)
        self.place((id(p), "args"), f"the arguments of {name}", lambda: p.args, None)
        self.place((id(p), "keywords"), f"the keywords of {name}", lambda: p.keywords, None)

    def container(self, values: Any, name: str) -> None:
        self.holders[id(values)] = name, values
        if len(values) > LONGEST:
            return
        items = values.items() if isinstance(values, dict) else enumerate(values)
        for key, value in items:
            self.visit(value, f"{name}[{key!r}]")

    def module(self, m: nn.Module, name: str) -> None:
        """Make each plain attribute of a module a place, because libraries read them, whose code is not followed."""
        self.holders[id(m)] = name, m
        for attribute in vars(m):
            if attribute not in _OF_EVERY_MODULE and not is_internal(m, attribute):
                self.entry(m, attribute, name)
        for child, part in m._modules.items():
            self.visit(part, f"{name}.{child}")
        if m._modules:
            self.place((id(m), "_modules"), f"the modules of {name}", lambda: m._modules, None)
        hooks = m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks
        self.hooked(hooks, [p for p in m._parameters.values() if p is not None], name)
        self.entry(m, "forward", name)  # which may be overridden
        self.attribute(m, "forward", name)

    def optimizer(self, o: torch.optim.Optimizer, name: str) -> None:
        """Follow the hooks of an optimizer, and the code of the user's; `lift` compares the settings of all."""
        self.hooked((o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks), [], name)
        if is_own(type(o)):
            self.holders[id(o)] = name, o
            self.attribute(o, "step", name)

    def hooked(self, hooks: Iterable[dict], parameters: list[nn.Parameter], name: str) -> None:
        """Follow hooks, and remember where others may be added."""
        for hook in self.hooks.add(hooks, parameters):
            self.visit(hook, f"a hook of {name}")

    def namespace(self, owner: Any, name: str) -> None:
        """Record a Python module or a class of the user, whose attributes the code may name."""
        if is_own(owner):
            self.holders[id(owner)] = name, owner

    def scan_attributes(self) -> bool:
        """Visit the attributes that the code names, on every object. Returns whether any of them was new."""
        before = len(self.scanned) + len(self.places)
        for name, owner in list(self.holders.values()):
            if self.reads_all and (type(owner) in NAMESPACES or hasattr(owner, "__dataclass_fields__")):
                self.place((id(owner), "__dict__"), f"vars({name})", lambda x=owner: getattr(x, "__dict__", None), None)
            if not (isinstance(owner, CONTAINERS) or (isinstance(owner, nn.Module) and not is_own(type(owner)))):
                for attribute in (a for a in list(self.attributes) if not is_internal(owner, a)):
                    self.attribute(owner, attribute, name)
        return len(self.scanned) + len(self.places) > before

    def attribute(self, owner: Any, attribute: str, name: str) -> None:
        """Follow the value of `owner.attribute`, an attribute of the object or of its class."""
        if (id(owner), attribute) in self.scanned:
            return
        self.scanned.add((id(owner), attribute))
        if attribute in getattr(owner, "__dict__", ()):
            self.entry(owner, attribute, name)
            return
        kind, full = owner if isinstance(owner, type) else type(owner), f"{name}.{attribute}"
        for of_class in (c for c in kind.__mro__ if attribute in vars(c) and is_own(c)):  # also for calls of super()
            value = vars(of_class)[attribute]
            if isinstance(value, property):
                self.visit(value.fget, full)
            elif isinstance(value, classmethod | staticmethod):
                self.visit(value.__func__, full)
            elif isinstance(value, types.FunctionType):
                self.place((id(of_class), attribute), full, functools.partial(vars(of_class).get, attribute), None)
                if not attribute.startswith("__") and hasattr(owner, "__dict__"):  # an object may override it
                    self.entry(owner, attribute, name)
            else:  # a class attribute, which the object may override later, or a slot
                read = functools.partial(getattr, owner, attribute, ABSENT)
                self.place((id(owner), attribute), full, read, self.attributes.get(attribute))

    def entry(self, owner: Any, attribute: str, name: str) -> None:
        read = functools.partial(vars(owner).get, attribute, ABSENT)
        self.place((id(owner), attribute), f"{name}.{attribute}", read, self.attributes.get(attribute))


_FOLLOWED: tuple[tuple[Any, Callable[[_Walk, Any, str], None]], ...] = (
    (types.FunctionType, _Walk.function),
    (types.MethodType, _Walk.method),
    (functools.partial, _Walk.partial),
    (nn.Module, _Walk.module),
    (CONTAINERS, _Walk.container),
    ((type, types.ModuleType), _Walk.namespace),
    (torch.optim.Optimizer, _Walk.optimizer),
)


def is_internal(holder: Any, attribute: str) -> bool:
    """Whether an attribute is private to a module of a library, or one that every optimizer or scheduler has."""
    if isinstance(holder, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        return attribute in _OF_LIFT
    return isinstance(holder, nn.Module) and attribute.startswith("_") and not is_own(type(holder))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return ABSENT


def _fill(cell: types.CellType, value: Any) -> None:
    if value is ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def _assign(variables: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        del variables[name]
    else:
        variables[name] = value
