"""The programs that a step keeps, and which of them runs a call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from .calling.call import BoundCall, StepFunction
from .calling.inputs import Inputs
from .calling.signature import Signature, Surroundings
from .compiled import Compiled
from .ir.dependencies import grouped

# The most programs that a step keeps. A program takes about 4 KB for each equation.
MOST_PROGRAMS = 64


@dataclass(eq=False)
class _CachedProgram:
    """An entry of the cache.

    Attributes:
        compiled: the program.
        sizeless: its signature without the sizes of the batch, the same for all programs of a family.
        number: its position in the order of addition.
        last_use: the time of its last use, counted in uses of all programs.
    """

    compiled: Compiled
    sizeless: Signature
    number: int
    last_use: int


class ProgramCache:
    """The programs of a step by signature, at most `MOST_PROGRAMS`.

    Programs that differ only in the sizes of the batch are a family. The ranks have agreed on the plan of its oldest
    member, and the other members follow that plan, so the cache first removes the least recently used followers. With
    more than `MOST_PROGRAMS` families it also removes the oldest families, the same on all ranks.

    A search begins with the program that was added or looked up last: a loop seldom returns to an older one.
    """

    def __init__(self) -> None:
        self._programs: OrderedDict[Signature, _CachedProgram] = OrderedDict()
        self._uses = 0
        self._added = 0
        # For calls whose trace changed what the step reads: the signature before the trace -> the one after it.
        self._after_trace: dict[Signature, Signature] = {}
        self._function: StepFunction | None = None

    def __len__(self) -> int:
        return len(self._programs)

    def values(self) -> list[Compiled]:
        """The programs, the one that was added or looked up last at the end."""
        return [cached.compiled for cached in self._programs.values()]

    def function(self, fn: Callable) -> StepFunction:
        """`fn`, the function of the step, with its parameters and what it reads."""
        if self._function is None:
            self._function = StepFunction(fn)
        return self._function

    def match(self, call: BoundCall, surroundings: Surroundings) -> tuple[Compiled, Inputs] | None:
        """The program whose last call was like this one, with the inputs of this call; None if no program matches."""
        for cached in reversed(self._programs.values()):
            inputs = cached.compiled.binding.match(call, surroundings)
            if inputs is not None:
                self._uses += 1
                cached.last_use = self._uses
                return cached.compiled, inputs
        return None

    def get(self, signature: Signature) -> Compiled | None:
        """The program to run for a signature; None if there is none.

        If this program has never run and follows no agreed plan, but a program for another batch size has run since,
        this program is removed: the ranks have agreed on the other one's plan, and this rank may be the only one with
        a batch of this size.
        """
        signature = self._after_trace.get(signature, signature)
        cached = self._programs.get(signature)
        if cached is None:
            return None
        if not (cached.compiled.is_bound or cached.compiled.agreed):
            leader = self.of_any_size(signature)
            if leader is not None and leader.is_bound:
                del self._programs[signature]
                return None
        self._uses += 1
        cached.last_use = self._uses
        # One call, because an interrupt between a removal and an insertion would lose the program on this rank only.
        self._programs.move_to_end(signature)
        return cached.compiled

    def of_any_size(self, signature: Signature) -> Compiled | None:
        """A program whose signature differs at most in the sizes of the batch, preferably one that has run."""
        sizeless = signature.without_sizes()
        unbound = None
        for cached in self._programs.values():
            if cached.sizeless == sizeless:
                if cached.compiled.is_bound:
                    return cached.compiled
                unbound = unbound or cached.compiled
        return unbound

    def add(self, compiled: Compiled, signature_before: Signature | None = None) -> None:
        """Add a program under its signature.

        `signature_before` is the signature of the call before its trace. It also leads to the program: a trace may
        change what the step reads, but the program is the same before and after (see `purity`).
        """
        signature = compiled.lowered.recording.signature
        self._uses += 1
        self._added += 1
        sizeless = signature.without_sizes()
        self._programs[signature] = _CachedProgram(compiled, sizeless, self._added, self._uses)
        if signature_before is not None and signature_before != signature:
            self._after_trace[signature_before] = signature
        if len(self._programs) > MOST_PROGRAMS:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Remove programs until at most `MOST_PROGRAMS` are left."""
        in_order = sorted(self._programs.items(), key=lambda item: item[1].number)
        families = grouped((cached.sizeless, signature) for signature, cached in in_order)
        for sizeless in list(families)[:-MOST_PROGRAMS]:
            for signature in families.pop(sizeless):
                del self._programs[signature]

        followers = [signature for _, *others in families.values() for signature in others]
        followers.sort(key=lambda signature: self._programs[signature].last_use)
        for signature in followers[: len(self._programs) - MOST_PROGRAMS]:
            del self._programs[signature]
        self._after_trace = {k: v for k, v in self._after_trace.items() if v in self._programs}

    def remove_other_sizes(self, signature: Signature) -> None:
        """Remove all programs whose signatures differ from this one only in the sizes of the batch."""
        sizeless = signature.without_sizes()
        self._programs = OrderedDict(
            (key, cached)
            for key, cached in self._programs.items()
            if key == signature or cached.sizeless != sizeless
        )

    def changes(self, compiled: Compiled) -> tuple[str, ...]:
        """How the signature of a new program differs from that of the newest program that has run, in words."""
        for signature, cached in reversed(self._programs.items()):
            if cached.compiled.is_bound:
                return tuple(signature.changes(compiled.lowered.recording.signature))
        return ()

    def last_change(self) -> list[str]:
        """How the signatures of the last two programs differ, in words. The last one has just been added."""
        *_, previous, newest = self._programs
        return previous.changes(newest)

    def clear(self) -> None:
        """Remove all programs, and forget where the step reads values."""
        self._programs.clear()
        self._after_trace.clear()
        self._function = None
