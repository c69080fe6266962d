"""Find and compare the Python values that a step reads in addition to its arguments.

They are constants of a program, so the step is traced again when one of them changes: numbers, strings, bools, None,
dtypes, devices and enums, and short containers of these. A step reads the closures, globals and defaults, and the
attributes of the user's objects and classes, that its code names. Its code includes the user's functions that it calls
by name. All plain attributes of an nn.Module that it reaches count, because libraries read these too. Everything else
is fixed when the step is traced.

Private attributes of torch's objects are read here; checked on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import argparse
import builtins
import dis
import enum
import functools
import inspect
import itertools
import numbers
import operator
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..ir.source import Source, is_library, is_user_code

# A container with more entries, nested ones included, is not read.
LONGEST = 100

# Messages cut the text of a value after this number of characters.
_LONGEST_TEXT = 80

_TORCH_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PYTHON_TYPES = (int, float, complex, bool, str, bytes, type(None), types.CodeType)
# A constant has one of these types, or a subclass of one of the bases.
_CONSTANT_TYPES = frozenset([*_PYTHON_TYPES, *_TORCH_TYPES])
_CONSTANT_BASES = (
    numbers.Number,
    numpy.bool_,
    str,
    bytes,
    enum.Enum,
    range,
    type,
    types.BuiltinFunctionType,
)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)

# The attributes that nn.Module itself sets.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
# A lifted step takes these attributes of optimizers and schedulers as inputs.
_INPUT_ATTRIBUTES = ("defaults", "param_groups", "state", "last_epoch", "base_lrs", "_last_lr")
# A step does not call these methods of an object that existed before it.
_UNCALLED_METHODS = ("__new__", "__init_subclass__", "__repr__", "__str__")
# Functions that take the name of an attribute as text: getattr(args, "rate", 0.5).
_ATTRIBUTE_READERS = frozenset({"getattr", "hasattr"})
_DEFAULTS = {"__defaults__": "a default", "__kwdefaults__": "a keyword default"}


class _Absent:
    """The value of a variable or an attribute that does not exist."""


class Place(NamedTuple):
    """A variable or an attribute that a step reads.

    Attributes:
        name: its name in messages.
        source: the user's line that writes it, or else the first line that reads it.
        reader: returns its present value.
    """

    name: str
    source: Source | None
    reader: Callable[[], Any]


@dataclass(frozen=True)
class ReadValues:
    """The values that a step reads at one time. Equal values share a program."""

    names: tuple[str, ...]
    values: tuple
    sources: tuple[Source | None, ...] = field(compare=False, repr=False)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.values)

    def __hash__(self) -> int:
        return self._hash

    def changes(self, later: ReadValues) -> list[str]:
        """The differences between these values and later ones, each in words."""
        before = self._by_place()
        after = later._by_place()
        changes = []
        for place in before | after:
            name, source, _ = place
            old = before.get(place, _Absent)
            new = after.get(place, _Absent)
            if old != new:
                line = f" ({source})" if source is not None else ""
                changes.append(f"{name} was {_text(old)} and is {_text(new)}{line}")
        return changes

    def _by_place(self) -> dict[tuple[Any, ...], Any]:
        """The values by name, line and number. Closures from one function have the same names and lines."""
        counts: Counter[tuple[Any, ...]] = Counter()
        by_place = {}
        for *place, value in zip(self.names, self.sources, self.values):
            number = counts[tuple(place)]
            counts[tuple(place)] += 1
            by_place[*place, number] = value
        return by_place


class Reads:
    """The places that a step reads, and the values that they had last.

    The places are searched once, and again only if a function or an object is replaced by another one, or if an object
    gets or loses an attribute.

    Args:
        fn: the function of the step.
        modules: modules that the step reads, even if its code does not name them.

    Attributes:
        attributes: all attributes that the code names, with its lines.
    """

    def __init__(self, fn: Callable, modules: Sequence[nn.Module] = ()) -> None:
        self._fn = fn
        self._modules = modules
        self._values = ReadValues((), (), ())
        self._find()

    def values(self) -> ReadValues:
        """The present values: the same object as in the last call if they are equal."""
        objects = [reader() for reader in self._readers]
        entries = self._entries_of_containers()
        has_new_sizes = list(map(len, self._namespaces)) != self._sizes
        # In most calls every place has the same object as in the last call, and nothing is compared by `==`.
        has_same_entries = _same(entries, self._entries)
        if has_same_entries and not has_new_sizes and _same(objects, self._objects):
            return self._values

        new_objects = [new for new, old in zip(objects, self._objects) if new is not old]
        if not has_same_entries:
            new_objects += entries
        if has_new_sizes or any(map(_leads_further, new_objects)):
            self._find()
        else:
            self._remember(objects)
        return self._values

    def present(self) -> Iterator[tuple[str, Any]]:
        """The names of the places, each with its present value."""
        for name, reader in zip(self._names, self._readers):
            yield name, reader()

    def _find(self) -> None:
        """Search the places, and read them."""
        search = _Search()
        search.visit(self._fn, getattr(self._fn, "__name__", "the step"))
        for module in self._modules:
            search.visit(module, "model")
        search.follow_attributes()
        places = search.places.values()
        self.attributes = search.attributes
        self._readers = [place.reader for place in places]
        self._names = tuple(place.name for place in places)
        self._sources = tuple(place.source for place in places)
        self._namespaces = search.namespaces
        self._sizes = list(map(len, self._namespaces))
        self._remember([reader() for reader in self._readers])

    def _remember(self, objects: list) -> None:
        """Store the present objects of the places. `_values` stays the same object if it is equal."""
        self._objects = objects
        self._containers = list(filter(_is_mutable, objects))
        self._entries = self._entries_of_containers()
        values = ReadValues(self._names, tuple(map(_constant, objects)), self._sources)
        if values != self._values:
            self._values = values

    def _entries_of_containers(self) -> list:
        entries: list[Any] = []
        for container in self._containers:
            entries += _entries(container)
        return entries


def _same(first: Sequence, second: Sequence) -> bool:
    """Whether two lists hold the same objects."""
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _is_mutable(value: Any) -> bool:
    """Whether a value is a container whose entries may change, or a tuple that holds one."""
    if isinstance(value, tuple):
        return any(map(_is_mutable, value))
    return isinstance(value, list | set | dict)


def _entries(container: Any) -> list:
    """The entries of a short container, and of the containers in it. A long container is data: it is not read."""
    entries: list[Any] = [container]
    # The list grows in the loop.
    for entry in entries:
        if isinstance(entry, _CONTAINERS):
            if len(entries) + len(entry) > LONGEST + 1:
                return []
            entries.extend(entry)
            if isinstance(entry, dict):
                entries.extend(entry.values())
    return entries[1:]


def _constant(value: Any) -> Any:
    """The part of a value that a program is specialised on: only its type if it is not a constant."""
    kind = type(value)
    if value is _Absent:
        return _Absent
    # As text, because 0.0 equals -0.0, and nan does not equal nan.
    if isinstance(value, float | complex):
        return kind, repr(value)
    if kind in _CONSTANT_TYPES:
        return kind, value
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    if isinstance(value, _CONTAINERS):
        is_long = value and not _entries(value)
        return kind if is_long else (kind, _constants(value))
    if isinstance(value, slice):
        return kind, (value.start, value.stop, value.step)
    if isinstance(value, _CONSTANT_BASES) and kind.__hash__ is not None:
        return kind, _comparable(value)
    return kind


def _comparable(value: Any) -> Any:
    """The text of a float, also of NumPy, because 0.0 == -0.0 and nan != nan; any other constant as it is."""
    is_integral = isinstance(value, numbers.Integral)
    return repr(value) if isinstance(value, numbers.Number) and not is_integral else value


def _constants(container: Any) -> Any:
    if isinstance(container, dict):
        return tuple((_constant(key), _constant(entry)) for key, entry in container.items())
    constants = map(_constant, container)
    return frozenset(constants) if isinstance(container, set | frozenset) else tuple(constants)


def is_constant(value: Any) -> bool:
    """Whether programs are specialised on a value, and no other place can be reached from it."""
    return type(value) in _CONSTANT_TYPES or isinstance(value, _CONSTANT_BASES)


def _leads_further(value: Any) -> bool:
    """Whether other places may be reached from a value, such as a function or an object with attributes."""
    if isinstance(value, _CONTAINERS):
        return any(map(_leads_further, _entries(value)))
    return type(value) is not torch.Tensor and not is_constant(value)


def _text(constant: Any) -> str:
    """A constant in a message."""
    if not isinstance(constant, tuple):
        return "absent" if constant is _Absent else f"a {constant.__name__}"
    kind, content = constant
    if issubclass(kind, numbers.Number) and isinstance(content, str):
        text = content
    elif issubclass(kind, types.CodeType):
        text = str(_head(content))
    elif issubclass(kind, dict):
        text = f"{{{', '.join(f'{_text(key)}: {_text(entry)}' for key, entry in content)}}}"
    elif issubclass(kind, _CONTAINERS):
        text = f"[{', '.join(map(_text, content))}]"
    else:
        text = repr(content)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _head(code: types.CodeType) -> Source:
    """The first line of the definition of a function."""
    return Source(code.co_filename, code.co_firstlineno, code.co_qualname)


class _Search:
    """Finds the places that the code of a function, and of the user's functions that it calls, can read."""

    def __init__(self) -> None:
        # By the id of the owner, and the name in it.
        self.places: dict[tuple[int, str], Place] = {}
        # The dicts of objects. Attributes may be added to them.
        self.namespaces: list[Any] = []
        # The attributes that the code names, of any object.
        self.attributes: dict[str, Source] = {}
        # The objects whose attributes are places if the code names them.
        self._owners: list[tuple[str, Any]] = []
        # The visited values by their ids. The dict keeps them alive, so that the ids stay valid.
        self._visited: dict[int, Any] = {}

    def visit(self, value: Any, name: str) -> None:
        """Follow a value: a function to the names in its code, an object to its methods."""
        if type(value) in _CONSTANT_TYPES or isinstance(value, torch.Tensor):
            return
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.visit(value.__self__, name.rpartition(".")[0] or "self")
            self.visit(value.__func__, name)
        elif isinstance(value, functools.partial):
            self.visit(value.func, name)
            self._place(value, "args", f"the arguments of {name}", lambda: value.args)
            self._place(value, "keywords", f"the keywords of {name}", lambda: value.keywords)
        elif isinstance(value, _CONTAINERS):
            self._container(value, name)
        else:
            self._object(value, name)

    def follow_attributes(self) -> None:
        """Add the attributes that the code names, until the code in them names no others."""
        old_count = -1
        while old_count != len(self._visited) + len(self.places):
            old_count = len(self._visited) + len(self.places)
            for name, owner in list(self._owners):
                # All attributes of a module are places already. Attributes of a class are found below.
                if not isinstance(owner, nn.Module | type):
                    self._named_attributes(owner, name)
                for base in _user_bases(owner):
                    for attribute in list(vars(base)):
                        if attribute in self.attributes:
                            self._class_attribute(owner, base, attribute)
        for (owner_id, attribute), place in self.places.items():
            if place.source is None:
                source = self.attributes.get(attribute)
                self.places[owner_id, attribute] = place._replace(source=source)

    def _place(
        self, owner: Any, key: str, name: str, reader: Callable, source: Source | None = None
    ) -> None:
        if (id(owner), key) not in self.places:
            self.places[id(owner), key] = Place(name, source, reader)
            self.visit(reader(), name)

    def _entry(
        self, mapping: Any, key: str, name: str, source: Source | None = None, owner: Any = None
    ) -> None:
        """Add an entry of a dict.

        For the dict of a class, `owner` is the class, because each `vars(cls)` is a new object, with a new id.
        """
        reader = functools.partial(mapping.get, key, _Absent)
        self._place(mapping if owner is None else owner, key, name, reader, source)

    def _container(self, container: Any, name: str) -> None:
        if not _entries(container):
            return
        pairs = container.items() if isinstance(container, dict) else enumerate(container)
        for key, entry in pairs:
            self.visit(entry, f"{name}[{key!r}]")

    def _function(self, f: types.FunctionType) -> None:
        code = f.__code__
        here = _head(code)
        read_code = functools.partial(getattr, f, "__code__")
        self._place(f, "__code__", f"the code of {f.__name__}", read_code, here)
        # The code of a library is not read, but it may call functions that the user passed to it.
        if is_library(code.co_filename):
            for variable, cell in _cells(f):
                function = _contents(cell)
                if callable(function):
                    self.visit(function, variable)
            self.visit(getattr(f, "__wrapped__", None), f.__name__)
            return

        self.namespaces.append(vars(f))
        self._owners.append((f.__name__, f))
        for attribute, kind in _DEFAULTS.items():
            if getattr(f, attribute):
                reader = functools.partial(getattr, f, attribute)
                self._place(f, attribute, f"{kind} of {f.__name__}", reader, here)
        names = _Names(code)
        for variable, cell in _cells(f):
            reader = functools.partial(_contents, cell)
            self._place(cell, "", variable, reader, names.variables.get(variable, here))
        for variable, source in names.globals.items():
            if variable in f.__globals__ or not hasattr(builtins, variable):
                self._entry(f.__globals__, variable, variable, source)
        # The line of an attribute comes from the first function that names it.
        self.attributes = names.attributes | self.attributes

    def _object(self, value: Any, name: str) -> None:
        kind = value if isinstance(value, type | types.ModuleType) else type(value)
        if isinstance(value, nn.Module):
            self._module(value, name)
        elif is_user_code(kind) or isinstance(value, _NAMESPACES):
            self.namespaces.append(getattr(value, "__dict__", ()))
        else:
            self.visit(_function_in(value), name)
            return
        self._owners.append((name, value))
        for base in _user_bases(value):
            for method, f in vars(base).items():
                if isinstance(f, types.FunctionType) and _is_implied(f, method, value):
                    self._class_attribute(value, base, method)

    def _module(self, m: nn.Module, name: str) -> None:
        self.namespaces += [vars(m), m._modules, m._parameters]
        is_users = is_user_code(type(m))
        for attribute in vars(m):
            # Private attributes count only in the user's own classes.
            if attribute in _MODULE_ATTRIBUTES or (attribute.startswith("_") and not is_users):
                continue
            self._entry(vars(m), attribute, f"{name}.{attribute}")
        for child in m._modules:
            self._entry(m._modules, child, f"{name}.{child}")
        for parameter in m._parameters:
            reader = functools.partial(_requires_grad, m._parameters, parameter)
            self._place(m._parameters, parameter, f"{name}.{parameter}.requires_grad", reader)

    def _named_attributes(self, owner: Any, name: str) -> None:
        inputs = _INPUT_ATTRIBUTES if isinstance(owner, Optimizer | LRScheduler) else ()
        for attribute in list(getattr(owner, "__dict__", ())):
            if attribute in self.attributes and attribute not in inputs:
                self._entry(vars(owner), attribute, f"{name}.{attribute}")

    def _class_attribute(self, owner: Any, base: type, attribute: str) -> None:
        """Add an attribute of a class, which may be a slot of its objects."""
        name = f"{base.__name__}.{attribute}"
        if isinstance(vars(base)[attribute], types.MemberDescriptorType):
            self._place(
                owner, attribute, name, functools.partial(getattr, owner, attribute, _Absent)
            )
        else:
            self._entry(vars(base), attribute, name, owner=base)


class _Names:
    """The names in a code object, each with the line that writes it, or else the first line that reads it."""

    def __init__(self, code: types.CodeType) -> None:
        self.globals: dict[str, Source] = {}
        # The variables of enclosing functions.
        self.variables: dict[str, Source] = {}
        self.attributes: dict[str, Source] = {}
        self._add(code)

    def _add(self, code: types.CodeType) -> None:
        here = _head(code)
        instructions = list(dis.get_instructions(code))
        for instruction in instructions:
            action, _, kind = instruction.opname.partition("_")
            names = self._of_kind(kind) if action in ("LOAD", "STORE", "DELETE") else None
            if names is not None:
                line = instruction.positions and instruction.positions.lineno
                source = Source(code.co_filename, line or code.co_firstlineno, code.co_qualname)
                # A line that writes the name counts more than one that reads it.
                if action != "LOAD" or instruction.argval not in names:
                    names[instruction.argval] = source
        self.attributes = dict.fromkeys(_in_class_patterns(instructions), here) | self.attributes

        # In code that calls `getattr`, any text may be the name of an attribute. Among the constants is also the code
        # of inner functions and comprehensions.
        calls_getattr = any(name in self.globals for name in _ATTRIBUTE_READERS)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add(constant)
            elif calls_getattr and isinstance(constant, str):
                self.attributes.setdefault(constant, here)

    def _of_kind(self, kind: str) -> dict[str, Source] | None:
        if kind in ("ATTR", "METHOD", "SUPER_ATTR"):
            return self.attributes
        if kind in ("GLOBAL", "NAME", "FROM_DICT_OR_GLOBALS"):
            return self.globals
        return self.variables if kind.endswith("DEREF") else None


def _in_class_patterns(instructions: Sequence[dis.Instruction]) -> Iterator[str]:
    """The attributes that class patterns name, such as `rate` in `case Config(rate=r)`."""
    for previous, instruction in itertools.pairwise(instructions):
        if instruction.opname == "MATCH_CLASS":
            yield from previous.argval


def _cells(f: types.FunctionType) -> list[tuple[str, types.CellType]]:
    """The variables of enclosing functions that a function reads, without the `__class__` of `super()`."""
    cells = zip(f.__code__.co_freevars, f.__closure__ or ())
    return [(variable, cell) for variable, cell in cells if variable != "__class__"]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Nothing has been assigned to the variable yet.
        return _Absent


def _requires_grad(parameters: Mapping[str, nn.Parameter | None], name: str) -> bool | None:
    """Whether a parameter of a module requires a gradient; None if the module does not have it."""
    parameter = parameters.get(name)
    return None if parameter is None else parameter.requires_grad


def _function_in(value: Any) -> Any:
    """The function inside an object of a library: a property, a class method, a cached function."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, classmethod | staticmethod):
        return value.__func__
    return inspect.getattr_static(value, "__wrapped__", None)


def _user_bases(owner: Any) -> list[type]:
    """The user's classes among the bases of an object's class, or of a class."""
    kind = owner if isinstance(owner, type) else type(owner)
    return [base for base in kind.__mro__ if is_user_code(base)]


def _is_implied(f: types.FunctionType, method: str, owner: Any) -> bool:
    """Whether code may call a method without naming it."""
    # Methods that a dataclass generates do not count. Like code of `python -c` they have no file, but a function of
    # this name makes them.
    if f.__code__.co_qualname.startswith("__create_fn__."):
        return False
    if method == "forward":
        return isinstance(owner, nn.Module)
    if method == "__init__":
        return isinstance(owner, type)
    return method.startswith("__") and method not in _UNCALLED_METHODS
