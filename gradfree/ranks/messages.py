"""What the ranks of one chain send each other, and what is said where it does not come."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from gradfree.errors import ChainError

_FRAME = 1024
"""Bytes that a note has at least, so that most are one message."""

NOTE, STATE, COTANGENT, SHARED, LOSS, TAP = range(6)
"""What a message is, so that no other is taken for it; of taps there may be as many as blocks."""
_KINDS, _PASSES = 2**14, 2**16


def group_of(mesh: DeviceMesh | distributed.ProcessGroup | None) -> distributed.ProcessGroup:
    """Return the process group of a dimension of a mesh; of all ranks, where none is given.

    Raises:
        ChainError: there is none.
    """
    if mesh is None and not distributed.is_initialized():
        raise ChainError(
            "there is no process group: call torch.distributed.init_process_group() first, under torchrun."
        )
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
    return distributed.group.WORLD if group is None else group  # type: ignore[return-value]


def check_tags(group: distributed.ProcessGroup, model: nn.Module, what: str) -> None:
    """Refuse ``what`` where messages between two ranks are not told apart: one could be taken for another."""
    backends = dict(pair.split(":") for pair in str(distributed.get_backend_config(group)).split(","))
    kind = next(model.parameters()).device.type
    if backends.get(kind) != "gloo":
        raise ChainError(
            f"{what} go over gloo alone, which tells messages apart by tags; on {kind} this group has "
            f"{backends.get(kind)}. Do without, or give a group of gloo's as mesh."
        )


class Halt(NamedTuple):
    """A note in place of what was to come.

    Attributes:
        reason: why that does not.
    """

    reason: str


class Halted(ChainError):
    """Another rank has stopped, and says why."""


class Lost(ChainError):
    """Another rank does not answer."""


class Messages:
    """A process group whose ranks hold the runs of one chain, in its order.

    Args:
        group: of ``torch.distributed``; all its ranks make one at the same time.

    Attributes:
        position: of this rank in the group.
        count: how many ranks there are.
    """

    def __init__(self, group: distributed.ProcessGroup):
        self.position, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        self._group, self._ranks = group, distributed.get_process_group_ranks(group)
        # Notes say what is to come, on the CPU: to read them waits for no device.
        gloo = "gloo" in str(distributed.get_backend_config(group))
        self._notes = group if gloo else distributed.new_group(self._ranks, None, "gloo", None, True)
        self._sent: list[tuple[Any, Tensor, int, str]] = []
        self._key = f"gradfree/{'-'.join(map(str, self._ranks))}"

    def agree(self, facts: dict[str, Any]) -> None:
        """Refuse to go on where ranks differ in ``facts``.

        Raises:
            ChainError: it names two ranks, and what they differ in.
        """
        with self._telling("what it was set up with", (self.position + 1) % self.count):
            told = self.exchanged(facts)
        for other, its in enumerate(told):
            for name in told[0] | its:
                if its.get(name) != told[0].get(name):
                    raise ChainError(
                        f"the ranks of one chain differ in {name}: rank {self._ranks[0]} has {told[0].get(name)}, rank "
                        f"{self._ranks[other]} has {its.get(name)}. All must call layer_parallel with the same model "
                        "and the same options."
                    )

    def gathered(self, thing: Any) -> list[Any] | None:
        """Return what every rank has, on the first one; ``None`` on the others."""
        told: list[Any] | None = [None] * self.count if self.position == 0 else None
        distributed.gather_object(thing, told, dst=self._ranks[0], group=self._notes)
        return told

    def exchanged(self, thing: Any) -> list[Any]:
        """Return what every rank has, on all of them."""
        told: list[Any] = [None] * self.count
        distributed.all_gather_object(told, thing, group=self._notes)
        return told

    def reduced(self, number: Tensor, largest: bool) -> Tensor:
        """Return the largest, or the sum, of what every rank has."""
        total = number.clone()
        operation = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
        distributed.all_reduce(total, operation, self._group)
        return total

    def send(self, tensor: Tensor, to: int, number: int, kind: int, what: str) -> None:
        """Send a tensor without waiting for it; ``number`` is that of the pass, ``what`` its name for messages."""
        tensor = tensor.detach().contiguous()
        with self._telling(what, to):
            work = distributed.isend(tensor, self._ranks[to], self._group, _tag(number, kind))
        self._sent.append((work, tensor, to, what))

    def receive(self, into: Tensor, source: int, number: int, kind: int, what: str) -> Tensor:
        """Fill a tensor with what ``source`` sends."""
        with self._telling(what, source):
            distributed.recv(into, self._ranks[source], self._group, _tag(number, kind))
        return into

    def send_note(self, note: Any, to: int, number: int, kind: int, what: str) -> None:
        """Send anything that can be pickled."""
        for frame in _frames(note):
            with self._telling(what, to):
                work = distributed.isend(frame, self._ranks[to], self._notes, _tag(number, kind))
            self._sent.append((work, frame, to, what))

    def receive_note(self, source: int, number: int, kind: int, what: str) -> Any:
        """Return what :meth:`send_note` has sent.

        Raises:
            Halted: it is a :class:`Halt`.
        """

        def receive(frame: Tensor) -> None:
            with self._telling(what, source):
                distributed.recv(frame, self._ranks[source], self._notes, _tag(number, kind))

        return _heeded(_unframed(receive))

    def share_note(self, note: Any, source: int, what: str) -> Any:
        """Return what ``source`` has to tell all ranks; the others' ``note`` does not count.

        Raises:
            Halted: it is a :class:`Halt`.
        """
        frames = _frames(note) if source == self.position else []

        def share(frame: Tensor) -> None:
            with self._telling(what, source):
                distributed.broadcast(frame, self._ranks[source], self._notes)

        if source != self.position:
            return _heeded(_unframed(share))
        for frame in frames:
            share(frame)
        return note

    def share(self, tensor: Tensor, source: int, what: str) -> Tensor:
        """Fill the tensors of all ranks with that of ``source``."""
        with self._telling(what, source):
            distributed.broadcast(tensor, self._ranks[source], self._group)
        return tensor

    def stopped(self, error: Exception, where: str = "") -> Halt | None:
        """Leave word of what has stopped this rank; return the note for all that wait for it, if it can be told.

        Args:
            error: what has stopped it.
            where: modules, for messages.
        """
        self.tell(error)
        if isinstance(error, Lost):
            return None
        if isinstance(error, Halted):
            return Halt(str(error))
        at = where and f" in {where}"
        return Halt(f"rank {self._ranks[self.position]} has stopped{at}: {type(error).__name__}: {error}")

    @property
    def unsettled(self) -> int:
        """How many messages nobody has waited for."""
        return len(self._sent)

    def settle(self, count: int | None = None) -> None:
        """Wait until all that was sent has been taken, or the first ``count`` messages of it."""
        count = self.unsettled if count is None else count
        sent, self._sent = self._sent[:count], self._sent[count:]
        for work, _, to, what in sent:
            with self._telling(what, to):
                work.wait()

    def summed(self, tensors: Sequence[Tensor], holders: Sequence[int], number: int, what: str) -> list[Tensor]:
        """Return the sums over ``holders`` of each tensor, the same bits on each: the first of them adds them up."""
        first, *others = holders
        total = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        for tensor in total:
            if self.position != first:
                self.send(tensor, first, number, SHARED, what)
                self.settle()
                self.receive(tensor, first, number, SHARED, what)
                continue
            for other in others:
                tensor += self.receive(torch.empty_like(tensor), other, number, SHARED, what)
            for other in others:
                self.send(tensor, other, number, SHARED, what)
            self.settle()
        return total

    def tell(self, error: BaseException) -> None:
        """Leave word of what has stopped this rank, for those that wait for it."""
        said = str(error) if isinstance(error, ChainError) else f"{type(error).__name__}: {error}"
        with suppress(Exception):
            distributed.distributed_c10d._get_default_store().set(f"{self._key}/{self.position}", said)

    def _told(self, other: int) -> str:
        """Return what ``other`` has left word of, nothing if there is no word."""
        store, key = distributed.distributed_c10d._get_default_store(), f"{self._key}/{other}"
        with suppress(Exception):
            # Ranks that wait for each other give up at about the same time.
            store.wait([key], timedelta(seconds=2))
            return str(store.get(key).decode())
        return ""

    @contextmanager
    def _telling(self, what: str, other: int) -> Iterator[None]:
        """Say whom this rank has waited for in vain, and what has stopped that one if it is known."""
        try:
            yield
        except RuntimeError as error:
            told = self._told(other)
            reason = f"What has stopped it: {told}" if told else f"It has ended, hangs or does something else: {error}"
            raise Lost(
                f"rank {self._ranks[self.position]} waited for rank {self._ranks[other]}, for {what}, in vain. {reason}"
            ) from error


def _tag(number: int, kind: int) -> int:
    return number % _PASSES * _KINDS + kind


def _heeded(note: Any) -> Any:
    if isinstance(note, Halt):
        raise Halted(note.reason)
    return note


def _frames(note: Any) -> list[Tensor]:
    """Return one frame, or one with the length of the next: the length in eight bytes, then the note."""
    written = io.BytesIO()
    pickle.dump(note, written)
    content = written.getvalue()
    head = len(content).to_bytes(8, "little")
    if len(content) + 8 <= _FRAME:
        return [torch.frombuffer(bytearray((head + content).ljust(_FRAME, b"\0")), dtype=torch.uint8)]
    rest = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return [torch.frombuffer(bytearray(head.ljust(_FRAME, b"\0")), dtype=torch.uint8), rest]


def _unframed(receive: Callable[[Tensor], None]) -> Any:
    frame = torch.empty(_FRAME, dtype=torch.uint8)
    receive(frame)
    content = frame.numpy().tobytes()
    length = int.from_bytes(content[:8], "little")
    if length + 8 <= _FRAME:
        return pickle.loads(content[8 : 8 + length])
    rest = torch.empty(length, dtype=torch.uint8)
    receive(rest)
    return pickle.loads(rest.numpy().tobytes())
