"""How the host's worker functions are led to our `RoleWorker`.

Owns what we know of the host's ``SchedulerDisaggMixin``: which attributes it sets where, and what its loop takes from
its queue. Each function is a hook (see `moonrelay_sglang.plugin`), and leaves the host's own behaviour alone where
another backend was chosen, on ranks that transfer nothing, and in the mode in which GLM-Image's head encodes by itself.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from moonrelay_sglang import conditioning, fields
from moonrelay_sglang import config as settings
from moonrelay_sglang.manager import manager_class
from moonrelay_sglang.sockets import ResultSocket
from moonrelay_sglang.worker import Held, RoleWorker

if TYPE_CHECKING:
    from moonrelay_sglang.manager import Loaded

logger = logging.getLogger(__name__)

#: Where our worker hangs on the host's scheduler, and what is held for a request on its ``Req``.
_WORKER: Final = "_moonrelay_worker"
_HELD: Final = "_moonrelay_held"
#: Names of the fields of a ``Req`` that landed in our memory.
_LANDED: Final = "_moonrelay_landed"
#: Roles that have no transfer.
_ALONE: Final = ("monolithic", "server")


def worker_of(scheduler: object) -> RoleWorker | None:
    """Return the worker of ours that a host's scheduler has, ``None`` where it goes its own way."""
    return getattr(scheduler, _WORKER, None)


def around_launch_role(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """End a role's processes before their launcher, which they would not survive; on ``launch_disagg_role``.

    SIGTERM ends the launcher at once by default, and the system then kills its children, shared memory and all.
    """
    if not settings.is_chosen(server_args):
        return original(server_args, *args, **kwargs)
    with _terminable():
        return original(server_args, *args, **kwargs)


def around_init_state(original: Callable[..., None], scheduler: Any, server_args: Any, local_rank: int) -> None:
    """Refuse a role without all our hooks, or with wrong settings; on ``_init_disagg_state``."""
    if settings.is_chosen(server_args) and settings.role_of(server_args) not in _ALONE:
        from moonrelay_sglang import plugin

        plugin.verify()
        hook = settings.from_server_args(server_args).condition_hook
        if hook is not None:
            conditioning.named(hook)
    original(scheduler, server_args, local_rank)


def around_init_transfer(original: Callable[..., None], scheduler: Any) -> None:
    """Make our manager and worker instead of the host's pool; on ``_init_disagg_transfer_manager``."""
    server_args = scheduler.server_args
    if not settings.is_chosen(server_args) or scheduler.gpu_id != 0:
        original(scheduler)
        return
    if scheduler._is_glm_distributed_mode():
        logger.info("GLM-Image's distributed mode moves nothing between roles: it stays the host's")
        original(scheduler)
        return
    from moonrelay_sglang import plugin

    plugin.verify()
    _start_worker(scheduler, server_args)


def around_event_loop(original: Callable[..., None], scheduler: Any) -> None:
    """Clean up however the role's loop ends; on ``_disagg_event_loop``."""
    worker = worker_of(scheduler)
    if worker is None:
        original(scheduler)
        return
    with _terminable():
        try:
            original(scheduler)
        finally:
            # The host cleans up only where its loop ends by itself, which it never does.
            if not worker.closed:
                scheduler._cleanup_disagg()


def around_cleanup(original: Callable[..., None], scheduler: Any) -> None:
    """End our threads before the host closes the sockets, and our own after; on ``_cleanup_disagg``."""
    worker = worker_of(scheduler)
    if worker is None:
        original(scheduler)
        return
    worker.stop()
    try:
        original(scheduler)
    finally:
        worker.close()


def around_encoder_step(original: Callable[..., None], scheduler: Any, send_tensors: Any, frames: Any = None) -> None:
    """Work on a request in an input encoder; on ``_disagg_encoder_step``."""
    worker = worker_of(scheduler)
    if worker is None or frames is None:
        original(scheduler, send_tensors, frames=frames)
        return
    request_id = bytes(frames[0]).decode()
    with worker.working(request_id, worker.taken(), in_step=scheduler._is_multi_rank()) as wanted:
        if wanted:
            original(scheduler, send_tensors, frames=frames)


def around_forward_and_stage(original: Callable[..., None], scheduler: Any, req: Any, request_id: str) -> None:
    """Work on a request in a denoiser or image encoder; on ``_disagg_forward_and_stage``."""
    worker = worker_of(scheduler)
    if worker is None:
        original(scheduler, req, request_id)
        return
    try:
        held = getattr(req, _HELD, None)
        with worker.working(request_id, held, in_step=scheduler._is_multi_rank()) as wanted:
            if wanted:
                original(scheduler, req, request_id)
    finally:
        # The host's loop keeps the request until the next one comes, and with it the pool's memory.
        for name in getattr(req, _LANDED, ()):
            object.__setattr__(req, name, None)


def around_decoder_compute(original: Callable[..., None], scheduler: Any, req: Any, request_id: str) -> None:
    """Work on a request in a decoder; on ``_disagg_decoder_compute``."""
    around_forward_and_stage(original, scheduler, req, request_id)


def around_init_request_scheduler(original: Callable[..., None], scheduler: Any, req: Any) -> None:
    """Keep what fails here from ending the loop without a word; on ``_init_disagg_request_scheduler``."""
    held: Held | None = getattr(req, _HELD, None)
    if worker_of(scheduler) is None or held is None:
        original(scheduler, req)
        return
    try:
        original(scheduler, req)
    except Exception as exc:  # noqa: BLE001  said when the request's turn comes, which is next
        held.failure = exc


def around_transfer_message(original: Callable[..., None], scheduler: Any, frames: list[Any]) -> None:
    """Take a message that the host's main thread was given; on ``_handle_transfer_msg``."""
    worker = worker_of(scheduler)
    if worker is None:
        original(scheduler, frames)
        return
    from moonrelay_sglang import protocol

    if not worker.control(protocol.decode(frames)):
        logger.warning("a message of the head is of no known kind")


def around_extract(original: Callable[..., Any], req: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take out of a request what the next role, or this one's other ranks, need; on ``extract_transfer_fields``."""
    if not _chosen_here():
        extracted: tuple[dict[str, Any], dict[str, Any]] = original(req)
        return extracted
    from sglang.multimodal_gen.runtime.disaggregation import scheduler_mixin as host

    return fields.extract(
        req,
        left=host._EXCLUDE_FIELDS,
        left_of_sampling=host._SAMPLING_PARAMS_EXCLUDE_FIELDS,
        trees=host.extract_extra_tensors,
    )


# -- inside ---------------------------------------------------------------------------------------------------------


def _chosen_here() -> bool:
    from sglang.multimodal_gen.runtime.server_args import get_global_server_args

    try:
        return settings.is_chosen(get_global_server_args())
    except ValueError:  # none are set: no role runs in this process
        return False


def _start_worker(scheduler: Any, server_args: Any) -> None:
    """Do what the host's ``_init_disagg_transfer_manager`` does, with ours."""
    from sglang.multimodal_gen.runtime.disaggregation import scheduler_mixin as host
    from sglang.multimodal_gen.runtime.platforms import current_platform

    config = settings.from_server_args(server_args)
    worker = RoleWorker(
        config,
        role=config.role,
        work_endpoint=host._advertised_pool_work_endpoint(server_args),
        context=scheduler.context,
        result_endpoint=server_args.pool_result_endpoint,
    )
    manager = manager_class()(
        config,
        epoch=worker.epoch,
        pipeline=str(getattr(scheduler.worker.pipeline, "pipeline_name", "")),
        attempt_of=worker.attempt_of,
        on_stage=worker.staging,
    )
    worker.attach(manager)
    manager.start()
    if manager.embeddings is not None:
        conditioning.lend(scheduler.worker.pipeline.stages, manager.embeddings)
    setattr(scheduler, _WORKER, worker)
    scheduler._transfer_manager = manager
    scheduler._preallocated_slots = {}
    scheduler._pool_result_push = ResultSocket(scheduler._pool_result_push, worker)
    if scheduler._disagg_role.is_transfer_receiver:
        device = f"{current_platform.device_type}:{scheduler.worker.local_rank}"
        scheduler._compute_ready_queue = worker.ready
        scheduler._recv_prefetch_thread = worker.take_payloads_from(
            scheduler._pool_work_pull,
            lambda scalars, loaded, held: _entry(scheduler, scalars, loaded, held),
            device,
            scheduler._transfer_stream,
        )
    else:
        scheduler._pool_work_pull = worker.take_requests_from(scheduler._pool_work_pull)
    worker.start()
    logger.info(
        "%s takes and offers payloads by Moonrelay (%s, %s)",
        config.instance,
        config.transfer.engine,
        config.transfer_mode,
    )


def _entry(scheduler: Any, scalars: dict[str, Any], loaded: Loaded, held: Held) -> tuple[Any, Any, str, None]:
    """Return what the host's loop takes for one request."""
    request_id = loaded.claim.handle.request_id
    if scheduler._disagg_metrics:
        scheduler._disagg_metrics.record_request_start(request_id)
    req = scheduler._build_disagg_req(scalars, loaded.tensors)
    object.__setattr__(req, _HELD, held)
    object.__setattr__(
        req, _LANDED, ("extra", *(name for name in (*loaded.tensors, *loaded.values) if name in vars(req)))
    )
    return req, loaded.event, request_id, None


class _Terminated(SystemExit):
    """SIGTERM came."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the children and unwind the main thread, so that it cleans up, before it ends the process.

    Python's own way is to die at once, which leaves shared memory behind. Of no effect where somebody else has a
    handler, and in other threads than the main one.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def unwind(number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not break the cleaning up
        for child in multiprocessing.active_children():
            child.terminate()
        raise _Terminated(128 + number)

    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    except _Terminated:
        _die_by(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die_by(number: int) -> None:
    """End the process as the signal does without us: the host's own way out may take longer than anybody waits."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
