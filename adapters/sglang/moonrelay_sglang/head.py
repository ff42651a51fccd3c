"""The head of a deployment whose roles are ours: the host's sockets and objects to `HeadScheduler` and back.

Owns the translation alone. Which instance gets what, and what a failure leads to, is `moonrelay_sglang.scheduling`;
what messages look like is `moonrelay_sglang.protocol`. The functions before the class are hooks on the host's
``DiffusionServer``: each looks whether this head is ours and leaves the host's own behaviour alone where it is not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import zmq

from moonrelay.errors import ConfigError, MoonrelayError, PeerLost, QueueFull, WireError
from moonrelay.queueing.task import PRIORITIES, check_affinity
from moonrelay_sglang import config as settings
from moonrelay_sglang import host_server, protocol
from moonrelay_sglang.actions import Action, Dispatch, Failed, Limits, Release, StageInput
from moonrelay_sglang.config import SglangConfig
from moonrelay_sglang.host_server import HostServer
from moonrelay_sglang.scheduling import HeadScheduler

logger = logging.getLogger(__name__)

#: The argument by which the host's server is told its policy.
_POLICY: Final = "dispatch_policy_name"
#: Where a head of ours hangs on the host's server object.
_HEAD: Final = "_moonrelay_head"
#: Where a client says what it wants of us: ``diffusers_kwargs: {"moonrelay": {"priority": …, "affinity": {…}}}``. It is
#: the one field of the host's HTTP schemas that reaches a request whole.
_KWARGS: Final = "diffusers_kwargs"
_OPTIONS: Final = ("priority", "affinity")
#: How many messages of a role are taken before the other sockets are looked at again.
_MESSAGES_A_TURN: Final = 64


def around_init(original: Callable[..., None], server: Any, *args: Any, **kwargs: Any) -> None:
    """Give a head of ours to a server whose backend is ours; on ``DiffusionServer.__init__``."""
    server_args = kwargs.get("server_args")
    policy = kwargs.get(_POLICY)
    if server_args is None or not settings.is_chosen(server_args):
        if policy in settings.OUR_POLICIES:
            message = f"--disagg-dispatch-policy {policy} needs --disagg-transfer-backend {settings.BACKEND}"
            raise ConfigError(message, field="disagg_dispatch_policy")
        original(server, *args, **kwargs)
        return
    from moonrelay_sglang import plugin

    plugin.verify()
    if policy in settings.OUR_POLICIES:
        # The host makes policies of its own, by name; nobody asks them.
        kwargs[_POLICY] = settings.STOCK_POLICIES[0]
    original(server, *args, **kwargs)
    setattr(server, _HEAD, Head(server, settings.from_server_args(server_args), supported=plugin.SUPPORTED))


def around_client_request(original: Callable[..., None], server: Any, frontend: Any) -> None:
    """Take a client's request; on ``DiffusionServer._handle_client_request``."""
    head = head_of(server)
    if head is None:
        original(server, frontend)
    else:
        head.client_request(original, frontend)


def around_role_result(original: Callable[..., None], server: Any, result_pull: Any, role: Any) -> None:
    """Take what a role sent; on ``DiffusionServer._handle_role_result``."""
    head = head_of(server)
    if head is None:
        original(server, result_pull, role)
    else:
        head.role_result(result_pull, role)


def around_drain(original: Callable[..., None], server: Any) -> None:
    """Do what is due; on ``DiffusionServer._drain_all_queues``, which the loop calls in every turn."""
    head = head_of(server)
    if head is None:
        original(server)
    else:
        head.turn()


def around_timeouts(original: Callable[..., None], server: Any) -> None:
    """Leave timeouts to the scheduler; on ``DiffusionServer._handle_timeouts``."""
    if head_of(server) is None:
        original(server)


def around_stats(original: Callable[..., dict[str, Any]], server: Any) -> dict[str, Any]:
    """Tell what there is; on ``DiffusionServer.get_stats``."""
    stats = original(server)
    head = head_of(server)
    return stats if head is None else {**stats, protocol.KEY: head.stats()}


def around_stop(original: Callable[..., None], server: Any) -> None:
    """End the scheduler with its server; on ``DiffusionServer.stop``."""
    original(server)
    head = head_of(server)
    if head is not None:
        head.close()


def after_create_app(app: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Have ``/health`` say when no instance of a role is alive; after the host's ``create_app``."""
    server = getattr(app.state, "disagg_server", None)
    head = None if server is None else head_of(server)
    if head is None:
        return app
    from fastapi.responses import JSONResponse

    async def tell_the_truth(request: Any, call_next: Callable[[Any], Any]) -> Any:
        problems = head.problems() if request.url.path == "/health" else []
        if problems:
            return JSONResponse({"status": "unhealthy", "error": "; ".join(problems)}, status_code=503)
        return await call_next(request)

    app.middleware("http")(tell_the_truth)
    return app


def head_of(server: object) -> Head | None:
    """Return the head of ours that a host's server has, ``None`` for a stock one."""
    return getattr(server, _HEAD, None)


class Head:
    """Our side of one ``DiffusionServer``.

    Args:
        server: The host's server, whose sockets and client bookkeeping are used.
        config: Our settings of this process.
        supported: Supported host versions, for a refusal.

    Raises:
        PluginError: The host's server lacks what we need.
        ConfigError: It is a head that moves nothing between roles.

    Threads: `client_request`, `role_result` and `turn` belong to the server's loop; `stats` and `problems` may be
    called from any thread.
    """

    def __init__(self, server: Any, config: SglangConfig, *, supported: str) -> None:
        self._server = server
        self._host = HostServer(server, supported)
        if self._host.has_own_encoder:
            message = "the distributed mode for GLM-Image moves nothing between roles; start it with another backend"
            raise ConfigError(message, field="--disagg-transfer-backend")
        self._roles = self._host.roles
        self._names = {role.value: role for role in self._roles}
        self._scheduler = HeadScheduler(
            {role.value: self._host.endpoints(role) for role in self._roles},
            policy=config.policy,
            limits=Limits(
                request_s=config.timeout_s,
                queued_s=config.queue_timeout_s,
                dead_after_s=config.dead_after_s,
                attempts=config.max_attempts,
            ),
        )
        # Work for the first stage, kept until the request ends: an encoder may have to do it again.
        self._work: dict[str, bytes] = {}
        # Endpoints whose registration was refused, each with the reason.
        self._refused: dict[str, str] = {}
        # By instance, the session of an earlier process that was heard after its successor.
        self._rivals: dict[tuple[str, int], str] = {}
        # By instance, each with the session that made it.
        self._reports: dict[tuple[str, int], tuple[str, Mapping[str, Any]]] = {}
        # The scheduler has no lock; displays are asked for from the HTTP thread.
        self._lock = threading.Lock()

    # -- clients ----------------------------------------------------------------------------------------------------

    def client_request(self, original: Callable[..., None], frontend: Any) -> None:
        """Take a request from the HTTP side: the host checks and books it, we queue it."""
        try:
            parts = frontend.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(parts) < 3:
            return
        asked = host_server.unpacked(parts[-1])
        try:
            if type(asked).__name__ == "GetDisaggStatsReq":
                self._answer(frontend, parts[0], output=self._server.get_stats())
                return
            options, payload = _options(asked, parts[-1])
        except ConfigError as exc:
            self._answer(frontend, parts[0], error=str(exc))
            return
        except Exception as exc:
            logger.exception("a client's message could not be dealt with")
            self._answer(frontend, parts[0], error=f"the head cannot deal with this message: {exc}")
            return
        original(self._server, _Peeked(frontend, [*parts[:-1], payload]))
        for request_id, work in self._host.take_accepted():
            self._submit(request_id, work, options)

    def _submit(self, request_id: str, work: bytes, options: Mapping[str, Any]) -> None:
        try:
            with self._lock:
                self._scheduler.submit(request_id, **options)
        except (ConfigError, QueueFull) as exc:
            self._host.fail(request_id, str(exc))
            return
        self._work[request_id] = work

    @staticmethod
    def _answer(frontend: Any, client: bytes, *, output: Any = None, error: str | None = None) -> None:
        answer = host_server.packed(host_server.output_batch(output=output, error=error))
        try:
            frontend.send_multipart([client, b"", answer], zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            logger.warning("a client could not be answered: %s", exc)

    # -- roles ------------------------------------------------------------------------------------------------------

    def role_result(self, result_pull: Any, role: Any) -> None:
        """Take what a role has sent so far; a damaged message is logged and fails nothing but itself."""
        for _ in range(_MESSAGES_A_TURN):
            try:
                frames = result_pull.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            self._take(frames, role)

    def _take(self, frames: list[Any], role: Any) -> None:
        try:
            if protocol.is_message(frames):
                self._message(protocol.parse_any(protocol.decode(frames)), role)
            else:
                self._result(frames, role)
        except MoonrelayError as exc:
            logger.warning("a message of a %s is not understood and dropped: %s", role.value, exc)
        except Exception:
            # The host's loop ends with what is raised in it, and with the loop every request.
            logger.exception("a message of a %s could not be dealt with", role.value)

    def _message(self, message: object, role: Any) -> None:
        match message:
            case protocol.Register():
                self._register(message)
            case protocol.Beat():
                self._beat(message)
            case protocol.Staged() | protocol.Done(error=None):
                self._staged(message, role)
            case protocol.Done(request_id=request_id, error=error, moonrelay=stamp):
                # Found by the host in the computation itself: the same input would fail again.
                self._fail(request_id, self._attempt(stamp, request_id, role), MoonrelayError(str(error)))
            case protocol.Failed():
                self._fail(message.request_id, message.attempt, message.error.error(), lost_input=message.lost_input)
            case protocol.Finished():
                with self._lock:
                    self._scheduler.sent(message.request_id, message.attempt)
            case _:  # what a stock role sends for its slots
                pass

    def _register(self, message: protocol.Register) -> None:
        place = self._place(message.role, message.work_endpoint)
        if place is None:
            return
        ours = message.moonrelay
        if ours is None:
            self._refuse(
                message.work_endpoint,
                f"{message.role} at {message.work_endpoint} is a stock one; "
                "start it with --disagg-transfer-backend moonrelay",
            )
            return
        stage, index = place
        with self._lock:
            told = self._scheduler.register(
                stage, index, epoch=ours.epoch, slots=ours.slots, labels=ours.labels, name=ours.instance
            )
            if told:
                self._refused.pop(message.work_endpoint, None)
        if not told:
            known, self._rivals[stage, index] = self._rivals.get((stage, index)), ours.epoch
            if known != ours.epoch:  # it comes again with every beat
                logger.warning(
                    "an earlier process of %s at %s still speaks and is ignored; where it goes on, two have that URL",
                    message.role,
                    message.work_endpoint,
                )
            return
        self._host.note_peer(
            self._names[stage],
            index,
            {
                "session_id": message.session_id,
                "pool_ptr": message.pool_ptr,
                "pool_size": message.pool_size,
                "work_endpoint": message.work_endpoint,
            },
        )

    def _beat(self, message: protocol.Beat) -> None:
        self._register(message.registration)  # of no effect where it is known
        place = self._place(message.role, message.work_endpoint)
        if place is None:
            return
        stage, index = place
        with self._lock:
            if self._scheduler.index_of(stage, message.epoch) != index:
                return  # refused, or another process answers there now
        report = {
            "in_use": msgspec.to_builtins(message.in_use),
            "counters": msgspec.to_builtins(message.counters),
        }
        with self._lock:
            self._reports[stage, index] = (message.epoch, report)
            actions = self._scheduler.beat(
                stage, index, epoch=message.epoch, holding=message.holding, offered=message.offered
            )
        self._carry_out(actions)

    def _place(self, role: str, endpoint: str) -> tuple[str, int] | None:
        """Return which instance of which stage answers at an endpoint; tell where it is none of this deployment."""
        known = self._names.get(role)
        endpoints = [] if known is None else self._host.endpoints(known)
        if endpoint in endpoints:
            return role, endpoints.index(endpoint)
        urls = ", ".join(endpoints) or "none of that role"
        self._refuse(endpoint, f"{role} at {endpoint!r} is not among this head's URLs ({urls})")
        return None

    def _refuse(self, endpoint: str, reason: str) -> None:
        with self._lock:
            known = self._refused.get(endpoint)
            self._refused[endpoint] = reason
        if known != reason:  # it comes again with every beat
            logger.error("%s; its registration is refused", reason)

    def _staged(self, message: protocol.Staged | protocol.Done, role: Any) -> None:
        stamp = message.moonrelay
        if stamp is None or protocol.located(message.manifest) is None:
            text = f"{role.value} does not say where its result is, or under which attempt it was made"
            raise WireError(text, field="moonrelay", request_id=message.request_id)
        given = StageInput(manifest=message.manifest, scalar_fields=message.scalar_fields)
        follows = self._follows(role, message.scalar_fields)
        with self._lock:
            index = self._scheduler.index_of(role.value, stamp.epoch)
            if index is None:
                return  # of a process that is gone, and its payload with it
            actions = self._scheduler.staged(
                role.value, index, message.request_id, stamp.attempt, given, next_stage=follows.value
            )
        if not actions:
            self._host.staged(message.request_id, role, follows)
        self._carry_out(actions)

    def _follows(self, role: Any, scalar_fields: Mapping[str, Any]) -> Any:
        """Return which role comes after this one; a prompt without an image needs no image encoder."""
        if role == self._roles[-1]:
            message = f"{role.value} says that it made input for another role; it is the last one"
            raise WireError(message, field="role")
        following = self._roles[self._roles.index(role) + 1]
        if following.value == "image_encoder" and not scalar_fields.get("image_path"):
            following = self._roles[self._roles.index(following) + 1]
        return following

    def _result(self, frames: list[Any], role: Any) -> None:
        """Take codec frames: a decoder's output, or an error that the host found in a role's computation."""
        stamp = protocol.stamp_of(frames)
        try:
            tensors, scalars = host_server.unpacked_result(frames)
        except Exception as exc:  # noqa: BLE001  whatever the host's codec may raise
            unreadable = f"the result cannot be read: {exc}"
            tensors, scalars = {}, {"error": unreadable, "request_id": self._host.request_id_of(frames)}
        request_id = scalars.get("request_id")
        if not isinstance(request_id, str) or not request_id:
            message = "a result without the request's id"
            raise WireError(message, field="request_id")
        error = scalars.get("error") or scalars.get("_disagg_error")
        if error or role != self._roles[-1]:
            text = str(error or f"{role.value} sent a result where none is expected")
            self._fail(request_id, self._attempt(stamp, request_id, role), MoonrelayError(text))
            return
        with self._lock:
            actions = self._scheduler.finished(request_id)
        if self._work.pop(request_id, None) is not None:  # else it had ended before
            self._host.deliver(tensors, scalars)
        self._carry_out(actions)

    def _attempt(self, stamp: protocol.Stamp | None, request_id: str, role: Any) -> int:
        if stamp is not None:
            return stamp.attempt
        with self._lock:
            return self._scheduler.attempt_of(request_id, role.value) or 0

    def _fail(self, request_id: str, attempt: int, error: MoonrelayError, *, lost_input: bool = False) -> None:
        with self._lock:
            actions = self._scheduler.failed(request_id, attempt, error, lost_input=lost_input)
        self._carry_out(actions)

    # -- turns ------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Do what is due."""
        try:
            with self._lock:
                actions = self._scheduler.poll()
        except Exception:
            logger.exception("the scheduler could not do what is due")
            return
        self._carry_out(actions)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            try:
                self._do(action)
            except Exception as exc:
                logger.exception("%s could not be carried out", type(action).__name__)
                if isinstance(action, Dispatch):
                    error = MoonrelayError(f"the head cannot hand it to a {action.stage}: {exc}")
                    self._fail(action.request_id, action.attempt, error)

    def _do(self, action: Action) -> None:
        match action:
            case Dispatch():
                self._dispatch(action)
            case Release():
                self._release(action)
            case Failed():
                self._work.pop(action.request_id, None)
                self._host.fail(action.request_id, action.error)

    def _dispatch(self, action: Dispatch) -> None:
        role = self._names[action.stage]
        given = action.given
        if given is None:
            work = self._work[action.request_id]
            frames = protocol.encoder_frames(action.request_id, action.attempt, work, to=action.epoch)
        else:
            manifest = protocol.for_attempt(given.manifest, action.attempt, to=action.epoch)
            ready = protocol.Ready(
                request_id=action.request_id, manifest=manifest, scalar_fields=dict(given.scalar_fields)
            )
            frames = protocol.encode(ready)
        self._host.dispatched(action.request_id, role, action.index)
        try:
            self._host.send(role, action.index, frames)
        except zmq.ZMQError as exc:
            lost = PeerLost(f"{action.stage}[{action.index}] takes no messages: {exc}")
            self._fail(action.request_id, action.attempt, lost)

    def _release(self, action: Release) -> None:
        message = protocol.Release(moonrelay=protocol.VERSION, request_id=action.request_id, attempt=action.attempt)
        try:
            self._host.send(self._names[action.stage], action.index, protocol.encode(message))
        except zmq.ZMQError as exc:
            # It names what it holds with its next beat, and is told again.
            logger.warning("%s[%d] was not told to drop %s: %s", action.stage, action.index, action.request_id, exc)

    # -- displays ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the scheduler's state and what the instances reported last, as plain values."""
        with self._lock:
            refused = list(self._refused.values())
            reports = {
                f"{stage}[{index}]": report
                for (stage, index), (epoch, report) in self._reports.items()
                if self._scheduler.lives(stage, index, epoch)  # what a dead process held is gone with it
            }
            return {**self._scheduler.snapshot(), "reports": reports, "refused": refused}

    def problems(self) -> list[str]:
        """Return what keeps requests from being served; empty while all roles are alive."""
        with self._lock:
            return self._scheduler.problems()

    def close(self) -> None:
        """End the scheduler. Idempotent."""
        with self._lock:
            self._scheduler.close()


def _options(asked: Any, payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Return what a request wants of us, and its payload without that, which no pipeline would understand.

    Raises:
        ConfigError: It wants what there is not.
    """
    requests = asked if isinstance(asked, list) else [asked]
    extra = getattr(requests[0], "extra", None) if len(requests) == 1 else None
    kwargs = extra.get(_KWARGS) if isinstance(extra, dict) else None
    if not isinstance(extra, dict) or not isinstance(kwargs, dict) or protocol.KEY not in kwargs:
        return {}, payload
    wanted = kwargs.pop(protocol.KEY)
    place = f"{_KWARGS}.{protocol.KEY}"
    if not isinstance(wanted, dict) or set(wanted) - set(_OPTIONS):
        message = f"{place}={wanted!r} must be an object with {' and '.join(_OPTIONS)}"
        raise ConfigError(message, field=place)
    if wanted.get("priority") not in (None, *PRIORITIES):
        message = f"{place}.priority={wanted['priority']!r} is not known; use one of {', '.join(PRIORITIES)}"
        raise ConfigError(message, field=f"{place}.priority")
    check_affinity(wanted.get("affinity"))
    if not kwargs:
        del extra[_KWARGS]
    return {name: wanted.get(name) for name in _OPTIONS}, host_server.packed(requests)


class _Peeked:
    """A socket whose next message was taken already."""

    def __init__(self, socket: Any, parts: list[bytes]) -> None:
        self._socket = socket
        self._parts: list[bytes] | None = parts

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        parts, self._parts = self._parts, None
        taken: list[bytes] = self._socket.recv_multipart(flags) if parts is None else parts
        return taken

    def send_multipart(self, parts: list[bytes], flags: int = 0) -> Any:
        return self._socket.send_multipart(parts, flags)
