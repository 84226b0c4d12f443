"""Messages between the ranks of one chain, and errors that name a rank which does not answer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from gradfree.errors import ChainError

STATE, COTANGENT, OUTPUTS = range(3)
"""Kinds of messages; part of a message's tag."""
_KINDS, _PASSES = 4, 2**27


def group_of(mesh: DeviceMesh | distributed.ProcessGroup | None) -> distributed.ProcessGroup:
    """Return the process group of a mesh dimension, or that of all ranks for ``None``.

    Raises:
        ChainError: there is no process group.
    """
    if mesh is None and not distributed.is_initialized():
        raise ChainError(
            "there is no process group: call torch.distributed.init_process_group() first, under torchrun."
        )
    group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
    return distributed.group.WORLD if group is None else group  # type: ignore[return-value]


class Messages:
    """Sends and receives between the ranks of a process group, which hold the runs of one chain in its order.

    Args:
        group: of ``torch.distributed``; all its ranks make this object at the same time.

    Attributes:
        position: the index of this rank in the group.
        count: the number of ranks.
    """

    def __init__(self, group: distributed.ProcessGroup):
        self.position, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        self._group, self._ranks = group, distributed.get_process_group_ranks(group)
        # Pickled notes go over the CPU: reading them does not wait for a device.
        gloo = "gloo" in str(distributed.get_backend_config(group))
        self._notes = group if gloo else distributed.new_group(self._ranks, None, "gloo", None, True)
        self._sent: list[tuple[Any, Tensor, int, str]] = []

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise: with two copies of a model, a rank could receive the messages of the other copy."""
        raise ChainError("a model split across ranks cannot be copied. Copy it first, then call layer_parallel.")

    def agree(self, facts: dict[str, Any]) -> None:
        """Check that all ranks have the same ``facts``.

        Raises:
            ChainError: they differ; the message names two ranks and the fact.
        """
        first, *_ = all_facts = self.all_gather(facts, "its model and options")
        for rank, other in zip(self._ranks, all_facts, strict=True):
            for name in first | other:
                if other.get(name) != first.get(name):
                    raise ChainError(
                        f"the ranks of one chain differ in {name}: rank {self._ranks[0]} has {first.get(name)}, "
                        f"rank {rank} has {other.get(name)}. All must make the same call with the same model and the "
                        "same options."
                    )

    def gather(self, thing: Any) -> list[Any] | None:
        """Return the objects of all ranks on the first rank; ``None`` on the others."""
        found: list[Any] | None = [None] * self.count if self.position == 0 else None
        distributed.gather_object(thing, found, dst=self._ranks[0], group=self._notes)
        return found

    def all_gather(self, thing: Any, what: str) -> list[Any]:
        """Return the objects of all ranks; ``what`` names them in errors."""
        found: list[Any] = [None] * self.count
        with self._naming(what, (self.position + 1) % self.count):
            distributed.all_gather_object(found, thing, group=self._notes)
        return found

    def all_gather_scalars(self, number: Tensor) -> Tensor:
        """Return the numbers of all ranks, stacked."""
        found = [torch.empty_like(number) for _ in range(self.count)]
        distributed.all_gather(found, number, self._group)
        return torch.stack(found)

    def send(self, tensor: Tensor, to: int, number: int, kind: int, what: str) -> None:
        """Send a tensor without waiting for it.

        Args:
            tensor: of a shape that the other rank knows.
            to: the other rank.
            number: of the pass.
            kind: of the message.
            what: names the tensor in errors.
        """
        self._isend(tensor.detach().contiguous(), self._group, to, _tag(number, kind), what)

    def receive(self, into: Tensor, source: int, number: int, kind: int, what: str) -> Tensor:
        """Receive a tensor from rank ``source`` into ``into``, and return it."""
        return self._recv(into, self._group, source, _tag(number, kind), what)

    def send_all(
        self, tensors: Sequence[Tensor], to: int, number: int, kind: int, what: str, extra: Any = None
    ) -> None:
        """Send tensors whose shapes the other rank does not know, with an object ``extra`` that can be pickled."""
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        for frame in _frames((shapes, extra)):
            self._isend(frame, self._notes, to, _tag(number, kind), what)
        for tensor in tensors:
            self.send(tensor, to, number, kind, what)

    def receive_all(
        self, source: int, number: int, kind: int, what: str, device: torch.device
    ) -> tuple[list[Tensor], Any]:
        """Return what :meth:`send_all` has sent: the tensors, on ``device``, and ``extra``."""
        tag = _tag(number, kind)
        shapes, extra = _unframed(lambda frame: self._recv(frame, self._notes, source, tag, what))
        empty = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        return [self.receive(tensor, source, number, kind, what) for tensor in empty], extra

    def settle(self) -> None:
        """Wait until all messages that this rank has sent are received."""
        sent, self._sent = self._sent, []
        for work, _, to, what in sent:
            with self._naming(what, to):
                work.wait()

    def _isend(self, tensor: Tensor, group: distributed.ProcessGroup, to: int, tag: int, what: str) -> None:
        with self._naming(what, to):
            work = distributed.isend(tensor, self._ranks[to], group, tag)
        self._sent.append((work, tensor, to, what))

    def _recv(self, into: Tensor, group: distributed.ProcessGroup, source: int, tag: int, what: str) -> Tensor:
        with self._naming(what, source):
            distributed.recv(into, self._ranks[source], group, tag)
        return into

    @contextmanager
    def _naming(self, what: str, other: int) -> Iterator[None]:
        """Turn an error of ``torch.distributed`` into one that names the rank."""
        try:
            yield
        except RuntimeError as error:
            raise ChainError(
                f"rank {self._ranks[self.position]} waited for rank {self._ranks[other]} to send or receive {what}, "
                f"but got no answer. It has ended, hangs or does something else: {error}"
            ) from error


def _tag(number: int, kind: int) -> int:
    return number % _PASSES * _KINDS + kind


def _frames(note: Any) -> list[Tensor]:
    """Return two tensors: the length of the pickled ``note``, and the note."""
    content = torch.frombuffer(bytearray(pickle.dumps(note)), dtype=torch.uint8)
    return [torch.tensor([len(content)]), content]


def _unframed(receive: Callable[[Tensor], object]) -> Any:
    """Return the note of :func:`_frames`; ``receive`` fills its two tensors."""
    length = torch.zeros(1, dtype=torch.int64)
    receive(length)
    content = torch.empty(int(length), dtype=torch.uint8)
    receive(content)
    return pickle.loads(content.numpy().tobytes())
