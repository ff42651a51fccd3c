"""A side's process, from inside: makes the side that it is told of, executes orders, answers (``python -m`` this).

Owns the private wire and the things that orders give names to. An order is a JSON line ``{"n": number, "do": op,
...}``; the answer is ``{"n": number, "ok": value}``, ``{"n", "error": {code, retryable, message, context}}`` for a
`MoonrelayError`, or ``{"n", "failed": {type, text, trace}}`` for anything else, which no adapter may raise. What the
host prints, or reads from its standard input, does not reach the wire. One thread executes orders.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from moonrelay.errors import ConfigError, MoonrelayError
from moonrelay_conformance.child import die_with, private_wire
from moonrelay_conformance.targets.adapter import (
    AdapterSide,
    Outgoing,
    SideClaim,
    SidePublication,
    SideSettings,
    Ticket,
)

_TRACE_LINES: Final = 12


class Runner:
    """The side of this process, and what was made with it, by name. Public methods are the operations."""

    def __init__(self) -> None:
        self._side: AdapterSide | None = None
        self._claims: dict[str, SideClaim] = {}
        self._chunks: dict[str, Iterator[Any]] = {}
        self._indices: dict[str, int] = {}
        self._open: dict[str, _Opened] = {}
        self._trees: dict[str, Any] = {}

    # -- life -------------------------------------------------------------------------------------------------------

    def warm(self) -> None:
        """Import what every side needs; the first call in a process takes seconds."""
        if gc.get_freeze_count():
            return
        # Nothing that an import makes is garbage. Frozen, it is not looked through again whenever a test collects.
        gc.disable()
        try:
            importlib.import_module("moonrelay_conformance.corpus.trees")
            importlib.import_module("torch")
            gc.freeze()
        finally:
            gc.enable()

    def start(self, side: str, settings: dict[str, Any]) -> None:
        """Make and start ``module:Class`` with settings."""
        if self._side is not None:
            message = "a side runs in this process already; reset first"
            raise ConfigError(message, field="side")
        self.warm()
        self._side = side_class(side)(msgspec.convert(settings, SideSettings))
        self._side.start()

    def close(self) -> None:
        """End the side; what it made may still be asked for, and must answer with typed errors."""
        self._running().close()

    def reset(self) -> None:
        """End the side and forget everything."""
        side, self._side = self._side, None
        for chunks in self._chunks.values():
            _closed(chunks)
        self.__init__()  # type: ignore[misc]
        try:
            if side is not None:
                side.close()
        finally:
            del side
            gc.collect()

    # -- producing --------------------------------------------------------------------------------------------------

    def publish(self, name: str, outgoing: dict[str, Any], tree: Any) -> dict[str, Any]:
        """Build a tree and publish it; return the ticket and the digest of what was built."""
        built = _build(tree)
        digest = _arriving(tree)
        ticket = self._running().publish(_outgoing(outgoing, built))
        return {"ticket": ticket, "digest": digest}

    def open(self, name: str, outgoing: dict[str, Any], tree: Any) -> dict[str, Any]:
        """Build a tree and publish it with chunks to follow; return ticket, digest, and the chunks' digests.

        The memory that is published holds zeros where it can: a chunk gets its bytes just before `ready` says so.
        """
        built = _build(tree)
        digest = _arriving(tree)
        out = _outgoing(outgoing, built)
        opened = _Opened(out)
        chunk_digests = [_digest(chunk) for chunk in opened.chunks]
        opened.publication = self._running().open(opened.blank())
        self._open[name] = opened
        return {"ticket": opened.publication.ticket, "digest": digest, "chunk_digests": chunk_digests}

    def ready(self, name: str, chunk: int) -> None:
        """Fill a chunk and say that it is final."""
        opened = _named(self._open, name, "publication")
        opened.fill(chunk)
        opened.publication.ready(chunk)

    def abort(self, name: str, reason: str) -> None:
        """Give an open publication up."""
        _named(self._open, name, "publication").publication.abort(reason)

    def abort_ticket(self, ticket: Ticket, reason: str) -> None:
        """Give a payload of this side up."""
        self._running().abort(ticket, reason)

    # -- consuming --------------------------------------------------------------------------------------------------

    def receive(self, ticket: Ticket, timeout_s: float, name: str | None = None) -> dict[str, Any]:
        """Take a payload over whole; keep the tree where a name is given."""
        side = self._running()
        tree = side.receive(ticket, timeout_s=timeout_s)
        answer = {"digest": _digest(tree), "metadata": side.metadata(ticket)}
        if name is not None:
            self._trees[name] = tree
        return answer

    def claim(self, ticket: Ticket, name: str, timeout_s: float) -> None:
        """Claim a payload."""
        self._claims[name] = self._running().claim(ticket, timeout_s=timeout_s)

    def read(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Read what was claimed; keep the tree under the claim's name."""
        claim = _named(self._claims, name, "claim")
        tree = claim.read(timeout_s=timeout_s)
        self._trees[name] = tree
        return {"digest": _digest(tree), "metadata": claim.metadata()}

    def next_chunk(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Return the digest of the next chunk of what was claimed, or ``{"end": true}``."""
        if name not in self._chunks:
            self._chunks[name] = iter(_named(self._claims, name, "claim").chunks(timeout_s=timeout_s))
            self._indices[name] = 0
        try:
            chunk = next(self._chunks[name])
        except StopIteration:
            return {"end": True}
        index = self._indices[name]
        self._indices[name] += 1
        return {"index": index, "digest": _digest(chunk)}

    def ack(self, name: str, timeout_s: float) -> None:
        """Acknowledge what was claimed."""
        _named(self._claims, name, "claim").ack(timeout_s=timeout_s)

    def nack(self, name: str) -> None:
        """Give back what was claimed."""
        _closed(self._chunks.pop(name, None))
        _named(self._claims, name, "claim").nack()

    def release(self, ticket: Ticket, timeout_s: float) -> None:
        """Drop a payload."""
        self._running().release(ticket, timeout_s=timeout_s)

    def status(self, ticket: Ticket, timeout_s: float) -> str:
        """Return how a payload stands."""
        return self._running().status(ticket, timeout_s=timeout_s)

    # -- what was received ------------------------------------------------------------------------------------------

    def recheck(self, name: str) -> dict[str, Any]:
        """Return the digest of a tree that was kept, as it is now."""
        return {"digest": _digest(_named(self._trees, name, "tree"))}

    def edit(self, name: str) -> None:
        """Write into every tensor of a tree that was kept."""
        for tensor in _tensors(_named(self._trees, name, "tree")):
            _flip(tensor)

    def drop(self, name: str) -> None:
        """Let go of everything that has this name."""
        _closed(self._chunks.pop(name, None))
        self._indices.pop(name, None)
        self._trees.pop(name, None)
        self._claims.pop(name, None)
        self._open.pop(name, None)

    # -- what a host keeps --------------------------------------------------------------------------------------------

    def encode(self, prompt: str, negative: str, cached: bool) -> dict[str, Any]:
        """Have two prompts encoded; return digests of what the host hands on, and how often its encoder computed."""
        made = self._running().encode(prompt, negative, cached=cached)
        return {"positive": _digest(made.positive), "negative": _digest(made.negative), "computed": made.computed}

    def denoise(self, request_id: str, seed: int, steps: int, stop_after: int | None) -> dict[str, Any]:
        """Run the denoising loop; return the digest of its result, and what it computed."""
        made = self._running().denoise(request_id, seed=seed, steps=steps, stop_after=stop_after)
        return {"result": _digest(made.result), "first_step": made.first_step, "computed": made.computed}

    # -- what is seen -----------------------------------------------------------------------------------------------

    def in_use(self) -> dict[str, int]:
        """Return what the side still holds, as its host tells."""
        return dict(self._running().in_use())

    def counters(self) -> dict[str, int]:
        """Return the host's counts."""
        return dict(self._running().counters())

    def collect(self) -> None:
        """Collect garbage."""
        gc.collect()

    def threads(self) -> dict[str, str]:
        """Return the names of Python's threads by their kernel's id."""
        return {str(thread.native_id): thread.name for thread in threading.enumerate() if thread.native_id}

    def _running(self) -> AdapterSide:
        if self._side is None:
            message = "no side runs in this process; start one first"
            raise ConfigError(message, field="side")
        return self._side


OPERATIONS: Final = frozenset(name for name in vars(Runner) if not name.startswith("_"))


class _Opened:
    """A payload whose chunks follow: its true bytes, and the memory that is published."""

    publication: SidePublication

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self.chunks = _split(outgoing)
        self._targets: list[Any] | None = None

    def blank(self) -> Outgoing:
        """Return what to publish: zeros, where the memory is plain enough and the host does not copy it at once."""
        import torch

        tree = self._outgoing.tree
        plain = isinstance(tree, torch.Tensor) and tree.is_contiguous() and not (tree.is_conj() or tree.is_neg())
        if not plain or self._outgoing.registered or self._outgoing.chunk_dim is None:
            return self._outgoing
        blank = msgspec.structs.replace(self._outgoing, tree=torch.zeros_like(tree))
        self._targets = _split(blank)
        return blank

    def fill(self, chunk: int) -> None:
        """Write a chunk's bytes; a number that is none is the host's to refuse."""
        if self._targets is not None and isinstance(chunk, int) and 0 <= chunk < len(self._targets):
            import torch

            with torch.no_grad():
                self._targets[chunk].copy_(self.chunks[chunk])


def _split(outgoing: Outgoing) -> list[Any]:
    """Return the chunks as views, cut as ``torch.tensor_split`` does."""
    import torch

    if not isinstance(outgoing.tree, torch.Tensor) or outgoing.chunk_dim is None:
        return [outgoing.tree]
    return list(torch.tensor_split(outgoing.tree, outgoing.num_chunks, dim=outgoing.chunk_dim))


def _tensors(tree: Any) -> Iterator[Any]:
    import torch

    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors(key)
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple, set, frozenset)):
        for value in tree:
            yield from _tensors(value)


def _flip(tensor: Any) -> None:
    """Change every byte of a tensor in place, whatever its dtype."""
    import torch

    if tensor.numel():
        raw = tensor.detach()
        if raw.is_contiguous():
            raw.view(-1).view(torch.uint8).bitwise_xor_(0x5A)
        else:
            raw.zero_()


def _outgoing(fields: dict[str, Any], tree: Any) -> Outgoing:
    out = msgspec.convert({**fields, "tree": None}, Outgoing)
    return msgspec.structs.replace(out, tree=tree)


def _build(description: Any) -> Any:
    from moonrelay_conformance.corpus import trees

    return trees.build(description)


def _arriving(description: Any) -> str:
    """Return the digest of what must arrive; detached, where the description asks for gradients."""
    from moonrelay_conformance.corpus import trees

    return trees.digest(trees.build(description, received=True))


def _digest(tree: Any) -> str:
    from moonrelay_conformance.corpus import trees

    return trees.digest(tree)


def _closed(chunks: Iterator[Any] | None) -> None:
    close = getattr(chunks, "close", None)
    if close is not None:
        close()


def _named(things: dict[str, Any], name: str, kind: str) -> Any:
    if name not in things:
        message = f"there is no {kind} {name!r} in this side"
        raise ConfigError(message, field="name")
    return things[name]


def side_class(side: str) -> type[AdapterSide]:
    """Import ``module:Class``.

    Raises:
        ConfigError: It is no `AdapterSide`.
    """
    module, _, name = side.partition(":")
    found: Any = importlib.import_module(module)
    for step in name.split("."):
        found = getattr(found, step)
    if not (isinstance(found, type) and issubclass(found, AdapterSide)):
        message = f"side={side!r} is no AdapterSide; name one as module:Class"
        raise ConfigError(message, field="side")
    return found


def _answer(runner: Runner, order: dict[str, Any]) -> dict[str, Any]:
    number = order.pop("n")
    op = order.pop("do")
    try:
        if op not in OPERATIONS:
            message = f"op={op!r} is no operation; use one of {', '.join(sorted(OPERATIONS))}"
            raise ConfigError(message, field="op")
        return {"n": number, "ok": getattr(runner, op)(**order)}
    except MoonrelayError as exc:
        context = {
            key: value if isinstance(value, (str, int, float, bool)) else repr(value)[:200]
            for key, value in exc.context.items()
        }
        error = {"code": exc.code, "retryable": bool(exc.retryable), "message": exc.message, "context": context}
        return {"n": number, "error": error}
    except Exception as exc:  # noqa: BLE001 - the outermost frame of an order: the suite must hear of it
        trace = "".join(traceback.format_exception(exc)).splitlines()[-_TRACE_LINES:]
        failed = {"type": type(exc).__name__, "text": str(exc)[:500], "trace": "\n".join(trace)}
        return {"n": number, "failed": failed}


def main(arguments: list[str]) -> int:
    """Execute orders until the wire ends.

    Args:
        arguments: The process id of the suite.
    """
    if not die_with(int(arguments[0])):
        return 1
    orders, answers = private_wire()
    runner = Runner()
    for line in orders:
        answer = _answer(runner, msgspec.json.decode(line))
        answers.write(msgspec.json.encode(answer) + b"\n")
    runner.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
