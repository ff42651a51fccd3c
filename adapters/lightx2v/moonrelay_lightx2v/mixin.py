"""The class that takes the place of the host's ``DisaggMixin``: native code, or ours where the config says so.

Owns which of the host's calls begin and end a request, and what its runners read beside them. Decides once per runner,
in ``init_disagg``, by ``disagg_config.connector``; until then, and for every other connector, the host's own methods
run unchanged. What we keep on a runner hangs on two attributes with our name.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from moonrelay.errors import ConfigError
from moonrelay_lightx2v import config as settings
from moonrelay_lightx2v import fields, given_up, pairing
from moonrelay_lightx2v.embeddings import TextSeam
from moonrelay_lightx2v.link import StageLink
from moonrelay_lightx2v.ranks import RankedLink, world_size

logger = logging.getLogger(__name__)

#: Where our end hangs on a runner.
ATTRIBUTE: Final = "_moonrelay"
#: What marks a class that dispatches, and a method that was wrapped.
MARK: Final = "_moonrelay_dispatches"
_WRAPPED: Final = "_moonrelay_wrapped"

_LATENT_SHAPE: Final = "latent_shape"
_LATENTS: Final = "latents"
#: In our metadata: digests of what a payload was made for, by field.
_ASKED: Final = "asked"
#: Of the host's ``input_info``: where its Qwen runner puts what it received.
_IMAGES: Final = "image_encoder_output"
#: Of the host's ``input_info``: what a decoder must know of an image, which its latents do not tell.
_SIZES: Final = ("auto_height", "auto_width")
#: Of ``disagg_config``: what the host's Qwen runner overwrites by what a request says.
_OVERRIDDEN: Final = ("bootstrap_room", "decoder_bootstrap_room", "receiver_engine_rank")


Link = StageLink | RankedLink


@dataclass(slots=True)
class RunnerEnd:
    """What we keep on a runner that is ours.

    Attributes:
        link: The role's end of the hand-over.
        request: What the server asked last, as it handed it to the runner; ``None`` where it has not asked since.
        depth: How deep the runner is in ``run_pipeline``: one that calls its parent's is one request.
        asked: Digests of what the request that it works on asks for, by field.
        rooms: What ``disagg_config`` says of rooms and ranks, before any request overwrites it.
        texts: Puts a cache before the runner's text encoder; ``None`` where none was chosen.
    """

    link: Link
    rooms: Mapping[str, Any] = field(default_factory=dict)
    request: dict[str, Any] | None = None
    depth: int = 0
    asked: Mapping[str, str] = field(default_factory=dict)
    texts: TextSeam | None = None


def dispatching(native: type, *, device: Callable[[], Any] | None = None) -> type:
    """Return a subclass of the host's ``DisaggMixin`` that chooses between its methods and ours.

    Args:
        native: The host's class.
        device: Tells where received tensors are to be; the device of the host's platform by default.

    Threads: any; its methods are called by the runner's thread.
    """

    where = device or _device

    class DisaggMixin(native):  # type: ignore[misc]
        """The host's mixin; see `moonrelay_lightx2v.mixin`."""

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            run = cls.__dict__.get("run_pipeline")
            if run is not None and not getattr(run, _WRAPPED, False):
                cls.run_pipeline = _bracketed(run)
            load = cls.__dict__.get("load_text_encoder")
            if load is not None and not getattr(load, _WRAPPED, False):
                cls.load_text_encoder = _remembering(load, cls)

        def init_disagg(self, config: Any) -> None:
            chosen = settings.is_chosen(config)
            before = _end_of(self)
            if before is not None:
                _release(before)
                delattr(self, ATTRIBUTE)
            if not chosen:
                super().init_disagg(config)
                return
            _init(self, config)

        def set_config(self, config_modify: Any) -> None:
            end = _end_of(self)
            if end is not None and isinstance(config_modify, Mapping):
                end.request = dict(config_modify)
            super().set_config(config_modify)

        def send_encoder_outputs(self, inputs: Any, latent_shape: Any) -> None:
            end = _end_of(self)
            if end is None:
                super().send_encoder_outputs(inputs, latent_shape)
                return
            end.link.send({**inputs, _LATENT_SHAPE: latent_shape}, metadata={_ASKED: dict(end.asked)})
            logger.info("[moonrelay] encoder outputs offered")

        def receive_encoder_outputs(self) -> Any:
            end = _end_of(self)
            if end is None:
                return super().receive_encoder_outputs()
            data, metadata = end.link.receive()
            _check_asked(end, metadata)
            return fields.on_device(data, where())

        def send_transformer_outputs(self, latents: Any) -> None:
            end = _end_of(self)
            if end is None:
                super().send_transformer_outputs(latents)
                return
            asked = getattr(self, "input_info", None)
            sizes = {name: _plain(getattr(asked, name, None)) for name in _SIZES}
            end.link.send({_LATENTS: latents.detach()}, metadata={**sizes, _ASKED: dict(end.asked)})
            logger.info("[moonrelay] latents offered")

        def receive_transformer_outputs(self) -> Any:
            end = _end_of(self)
            if end is None:
                return super().receive_transformer_outputs()
            data, metadata = end.link.receive()
            _check_asked(end, metadata)
            latents = fields.on_device(data[_LATENTS], where())
            # The runner reads sizes here that packed latents do not tell.
            self._p2_receive_meta = {
                "version": 1,
                "latents_shape": list(latents.shape),
                "latents_dtype": str(latents.dtype),
                **{name: metadata.get(name) for name in _SIZES},
            }
            return latents

        def release_disagg(self) -> None:
            end = _end_of(self)
            if end is None:
                super().release_disagg()
                return
            _release(end)  # it stays, closed: a released runner must not run the host's own code

    DisaggMixin.__module__ = native.__module__
    DisaggMixin.__qualname__ = native.__qualname__
    DisaggMixin.__doc__ = native.__doc__
    setattr(DisaggMixin, MARK, True)
    return DisaggMixin


def end_of(runner: object) -> RunnerEnd | None:
    """Return our end of a runner, ``None`` where it runs the host's own code."""
    return _end_of(runner)


# -- inside -----------------------------------------------------------------------------------------------------------


def _end_of(runner: object) -> RunnerEnd | None:
    found: RunnerEnd | None = vars(runner).get(ATTRIBUTE)
    return found


def _init(runner: Any, config: Mapping[str, Any]) -> None:
    """Make a runner ours: what the host's own ``init_disagg`` does, with our link."""
    parsed = settings.parse(config)
    # All ranks of a role call this, each with its own runner; the host's own code cannot have more than one.
    link: Link = RankedLink(parsed) if world_size() > 1 else StageLink(parsed)
    link.start()
    section = config.get("disagg_config", {})
    rooms = {name: section.get(name) for name in _OVERRIDDEN}
    setattr(runner, ATTRIBUTE, RunnerEnd(link, rooms, texts=_texts_of(link)))
    # What runners and their parents read of the native code.
    runner._disagg_mode = parsed.role
    runner._disagg_cfg = section
    runner._disagg_decentralized = False
    runner._disagg_sender = runner._disagg_receiver = runner._disagg_data_mgr = None
    runner._disagg_p2_data_mgr = runner._disagg_p2_receiver = None
    runner._disagg_rdma_buffers = []
    runner._disagg_p2_rdma_buffers = []
    # Not None where latents go to a decoder: the runner decodes them itself otherwise.
    runner._disagg_p2_sender = link if parsed.role == settings.TRANSFORMER and parsed.listens is not None else None
    runner._p2_receive_meta = {}
    # Held until then: a one-shot `lightx2v.infer` drops its runner before what it sent was taken.
    atexit.register(link.at_exit)
    weakref.finalize(runner, _retire, link).atexit = False
    where = f", offers {parsed.sends} at {_address(link.address)}" if link.address is not None else ""
    dials = f", takes {parsed.receives} from {', '.join(map(_address, parsed.dials))}" if parsed.dials else ""
    logger.info("[moonrelay] disagg_mode=%s: %s%s%s", parsed.role, link, where, dials)


def _texts_of(link: Link) -> TextSeam | None:
    """Return what puts an encoder's cache before its text encoder."""
    if isinstance(link, RankedLink):
        if link.config.embedding_cache is not None and link.config.role == settings.ENCODER:
            logger.warning("[moonrelay] no embedding cache for a role of several ranks: they must encode in step")
        return None
    return None if link.embeddings is None else TextSeam(link.embeddings, link.config.encoder_revision)


def _retire(link: Link) -> None:
    """End the link of a runner that is no more, once what it sent is taken."""
    link.close_when_taken(then=lambda: atexit.unregister(link.at_exit))


def _bracketed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run_pipeline`` with a request's begin and end round it, where the runner is ours."""

    @functools.wraps(run)
    def run_pipeline(self: Any, *args: Any, **kwargs: Any) -> Any:
        end = _end_of(self)
        if end is None or end.depth:
            return run(self, *args, **kwargs)
        asked = args[0] if args else kwargs.get("input_info")
        request, end.request = end.request, None
        end.depth += 1
        try:
            end.asked = pairing.asked_of(request, asked)
            names = pairing.names_of(request, asked, by_content=_pairs_by_content(self, end))
            end.link.begin(names, cancelled=given_up.watch(request))
            result = run(self, *args, **kwargs)
        except BaseException as exc:
            end.link.end(exc)
            _after_failure(self)
            raise
        else:
            end.link.end()
            return result
        finally:
            end.depth -= 1
            _let_go(asked)
            _forget_ids(self, end)

    setattr(run_pipeline, _WRAPPED, True)
    return run_pipeline


def _remembering(load: Callable[..., Any], owner: type) -> Callable[..., Any]:
    """Return ``load_text_encoder`` with the role's cache before what it gives, where one was chosen."""

    @functools.wraps(load)
    def load_text_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        end = _end_of(self)
        if end is None or end.texts is None:
            return load(self, *args, **kwargs)
        # Not under another class's method, which may change what it is given.
        outermost = type(self).load_text_encoder is load_text_encoder
        return end.texts.load(owner if outermost else type(self), self.config, lambda: load(self, *args, **kwargs))

    setattr(load_text_encoder, _WRAPPED, True)
    return load_text_encoder


def _check_asked(end: RunnerEnd, metadata: Mapping[str, object]) -> None:
    theirs = metadata.get(_ASKED)
    if not isinstance(theirs, Mapping):
        return
    other = [name for name, digest in end.asked.items() if theirs.get(name, digest) != digest]
    if other:
        message = (
            f"what the role before made under this request's id is for another {' and '.join(other)} "
            f"({end.link.config.receives}): two requests go by one id, or the roles were asked for different things; "
            "give each request a task_id or data_bootstrap_room of its own, and all roles the same body"
        )
        raise ConfigError(message, field="data_bootstrap_room")


def _pairs_by_content(runner: Any, end: RunnerEnd) -> bool:
    """Tell whether what a request asks for may be its name.

    Not where a server takes LoRAs by request: it does not tell the runner which.
    """
    return end.link.config.pairing == "auto" and not getattr(runner, "config", {}).get("lora_dir")


def _let_go(asked: Any) -> None:
    """Take what was received out of the host's ``input_info``, which a server keeps: it holds memory of the pool."""
    if getattr(asked, _IMAGES, None) is not None:
        setattr(asked, _IMAGES, None)


def _after_failure(runner: Any) -> None:
    """Leave nothing of a failed request to the next one.

    The host's schedulers keep their generator where a request failed, and the next one's noise would go on from there;
    the runner keeps its inputs, and with them memory of the pool.
    """
    vars(runner).pop("inputs", None)
    model = getattr(runner, "model", None)
    schedulers: list[Any] = [getattr(runner, "scheduler", None), getattr(model, "scheduler", None)]
    for scheduler in schedulers:
        if getattr(scheduler, "generator", None) is not None:
            scheduler.generator = None


def _forget_ids(runner: Any, end: RunnerEnd) -> None:
    """Take a request's ids out of the host's config, where they would stay for the next one."""
    config = getattr(runner, "config", None)
    if not isinstance(config, dict):
        return
    given = config.get("disagg_config")
    section = given if isinstance(given, dict) else {}
    ids = [name for name in pairing.IDS if name in config]
    rooms = {name: value for name, value in end.rooms.items() if section.get(name) != value}
    if not ids and not rooms:
        return
    unlocked = getattr(config, "temporarily_unlocked", contextlib.nullcontext)
    with unlocked():
        for name in ids:
            del config[name]
        for name, value in rooms.items():
            if value is None:
                del section[name]
            else:
                section[name] = value


def _release(end: RunnerEnd) -> None:
    atexit.unregister(end.link.at_exit)
    end.link.close()


def _device() -> Any:
    """Return the device of the host's platform."""
    from lightx2v_platform.base.global_var import AI_DEVICE

    return AI_DEVICE


def _plain(value: Any) -> Any:
    return fields.plain(value)


def _address(address: tuple[str, int] | None) -> str:
    if address is None:
        return "nowhere"
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


__all__ = ["ATTRIBUTE", "MARK", "RunnerEnd", "dispatching", "end_of"]
