"""Encode, denoise and decode as programs of the worker loop.

Owns how a diffusers stage reads its task and input, and what it hands on. The computing is the runners'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from moonrelay.cache.checkpoint import Checkpointer
from moonrelay.cache.checkpoint_identity import check_override
from moonrelay.config import unknown_key
from moonrelay.errors import Cancelled, ClosedError, ConfigError, DeadlineExceeded, LeaseLost, MoonrelayError, WireError
from moonrelay.orchestrator.program import Outcome, StageProgram, Work
from moonrelay.orchestrator.trace import KEY, StageTrace
from moonrelay.payload import StagePayload
from moonrelay.queueing.task import Plain, StageTask
from moonrelay_diffusers.caching import encode_with, kept_conditioning
from moonrelay_diffusers.families.base import DecodeRunner, DenoiseRunner, EncodeRunner, Stage, Text
from moonrelay_diffusers.frames import frames_digest
from moonrelay_diffusers.loop import RunCheckpoints
from moonrelay_diffusers.output import FORMATS, write_frames
from moonrelay_diffusers.request import GenerationRequest
from moonrelay_diffusers.stages import DTypes, load_stage

if TYPE_CHECKING:
    import torch

    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.cache.features import FeatureCache, FeatureRun

#: Chunks into which latents with a time dimension are cut, at most.
LATENT_CHUNKS = 8

#: What a task's payload may say under ``"checkpoints"``: from which request's checkpoint, and after which step, to go
#: on; in which fields this request differs from that one; whether, and how many of, its own are left to others.
CHECKPOINTS = "checkpoints"
_WISHES = ("from", "step", "override", "retain", "keep")


class EncodeProgram:
    """Turns the request in the task's payload into conditioning.

    Args:
        runner: The loaded encode stage.
    """

    stage = "encode"

    def __init__(self, runner: EncodeRunner) -> None:
        self._runner = runner
        self._cache: EmbeddingCache | None = None

    def use_embeddings(self, cache: EmbeddingCache) -> None:
        """Take embeddings that are kept, and keep what is encoded; see `CachesEmbeddings`."""
        self._cache = cache
        self._runner.key(Text(role="positive", text="", max_length=1))  # reads files now rather than within a job

    def process(self, work: Work) -> Outcome:
        """Encode the prompts and publish the conditioning."""
        trace = StageTrace(work)
        request = GenerationRequest.from_payload(_mapping(work.payload, "request"))
        cache = self._cache
        tree = self._runner.run(request) if cache is None else encode_with(self._runner, request, cache, work, trace)
        handle = work.connector.publish(
            StagePayload(
                request_id=work.job.request_id,
                kind="embedding",
                data=tree,
                attempt=work.job.attempt,
                schema=self._runner.output_schema,
            )
        )
        payload: dict[str, Plain] = {**work.payload, KEY: trace.finish(work.payload, output_bytes=handle.nbytes)}
        return Outcome(next_task=StageTask(stage="denoise", handle=handle, payload=payload))


class DenoiseProgram:
    """Turns conditioning into latents, in registered memory.

    Args:
        runner: The loaded denoise stage.
        chunks: Chunks into which the latents are cut for decode, at most.
        checkpointer: Keeps the loop's state as it goes, so that another worker goes on where this one was.
    """

    stage = "denoise"

    def __init__(
        self, runner: DenoiseRunner, *, chunks: int = LATENT_CHUNKS, checkpointer: Checkpointer | None = None
    ) -> None:
        self._runner = runner
        self._chunks = chunks
        self._checkpointer = checkpointer
        self._cache: EmbeddingCache | None = None
        self._features: FeatureCache | None = None

    def use_features(self, cache: FeatureCache) -> None:
        """Keep features of prompts there; see `CachesFeatures`."""
        self._runner.check_features()
        self._features = cache

    def use_embeddings(self, cache: EmbeddingCache) -> None:
        """Read the embeddings of tasks that went past encode from there; see `CachesEmbeddings`."""
        self._cache = cache

    def process(self, work: Work) -> Outcome:
        """Read the conditioning, denoise from the seed's noise, and publish the latents chunk by chunk."""
        trace = StageTrace(work)
        tree = self._conditioning(work, trace)
        wanted = _checkpoints(work, self._checkpointer)
        used = None if self._features is None else self._features.run(work.job.request_id)
        try:
            with used or nullcontext():
                latents = self._runner.run(
                    tree,
                    on_step=lambda done, total: work.report(done, total, f"step {done}/{total}"),
                    out=lambda shape, dtype: _registered(work, shape, dtype),
                    cancelled=work.stopped,
                    checkpoints=wanted,
                    features=used,
                )
        except MoonrelayError as exc:
            if wanted is not None and _is_the_end(work, exc):
                wanted.finish()
            raise
        dim = self._runner.chunk_dim
        handle = work.connector.publish(
            StagePayload(
                request_id=work.job.request_id,
                kind="latent",
                tensor=latents,
                chunk_dim=dim,
                num_chunks=1 if dim is None else max(1, min(self._chunks, latents.shape[dim])),
                attempt=work.job.attempt,
                schema=self._runner.output_schema,
            )
        )
        payload: dict[str, Plain] = {
            **work.payload,
            "params": _mapping(tree, "params"),
            KEY: trace.finish(
                work.payload, output_bytes=handle.nbytes, **_steps(work, tree, wanted), **_features(used)
            ),
        }
        return Outcome(
            next_task=StageTask(stage="decode", handle=handle, payload=payload),
            afterwards=None if wanted is None else wanted.finish,
        )

    def _conditioning(self, work: Work, trace: StageTrace) -> Mapping[str, object]:
        if work.claim is None:
            return kept_conditioning(self._runner, self._cache, work, trace)
        _check_schema(work, self._runner.input_schema)
        began = trace.now()
        tree = work.input.read()
        if not isinstance(tree, dict):
            message = f"conditioning is a {type(tree).__name__}, a mapping is needed"
            raise WireError(message, request_id=work.job.request_id)
        trace.input_read(work.input.handle.nbytes, work.input.path, trace.now() - began)
        return tree


class DecodeProgram:
    """Turns latents into frames, chunk by chunk as they land, and writes them to a file.

    Args:
        runner: The loaded decode stage.
        output: Folder for results; made when missing.
        file_format: One of `moonrelay_diffusers.output.FORMATS`.
    """

    stage = "decode"

    def __init__(self, runner: DecodeRunner, *, output: Path, file_format: str = "mp4") -> None:
        if file_format not in FORMATS:
            message = f"file_format={file_format!r} is not known; use one of {', '.join(FORMATS)}"
            raise ConfigError(message, field="file_format")
        self._runner = runner
        self._output = output
        self._format = file_format

    def process(self, work: Work) -> Outcome:
        """Decode while chunks land, and give the file's name, the frames' digest and the trace as the result."""
        trace = StageTrace(work)
        _check_schema(work, self._runner.input_schema)
        claim = work.input
        waited = [0.0]
        frames = self._runner.run_chunks(
            _timed(claim.chunks(), waited, trace),
            _mapping(work.payload, "params"),
            on_frames=lambda done, total: work.report(done, total, f"frame {done}/{total}"),
            cancelled=work.stopped,
        )
        trace.input_read(claim.handle.nbytes, claim.path, waited[0])
        digest = frames_digest(frames)
        # The token is part of the name: a late attempt of a worker that lost its job overwrites nothing.
        file = write_frames(frames, self._output, f"{work.job.request_id}-{work.job.token}", self._format)
        result: dict[str, Plain] = {
            "file": str(file),
            "digest": digest,
            "frames": list(frames.shape),
            KEY: trace.finish(work.payload, output_bytes=int(frames.nbytes)),
        }
        return Outcome(result=result)


def load_program(
    model: str,
    stage: Stage,
    *,
    output: Path,
    device: str = "cpu",
    dtype: DTypes = None,
    file_format: str = "mp4",
    chunks: int = LATENT_CHUNKS,
    checkpointer: Checkpointer | None = None,
) -> StageProgram:
    """Load one stage of a model as a program of the worker loop. Blocks: while the model is loaded.

    ``checkpointer`` is for denoise; the other stages have no state worth keeping.

    Raises:
        ConfigError: No such model, stage or family.
    """
    runner = load_stage(model, stage, device=device, dtype=dtype)
    if stage == "encode":
        return EncodeProgram(runner)  # type: ignore[arg-type]  # the stage's name decides the runner's kind
    if stage == "denoise":
        return DenoiseProgram(runner, chunks=chunks, checkpointer=checkpointer)  # type: ignore[arg-type]
    return DecodeProgram(runner, output=output, file_format=file_format)  # type: ignore[arg-type]


def _checkpoints(work: Work, checkpointer: Checkpointer | None) -> RunCheckpoints | None:
    """Read what the task wants of checkpoints.

    Raises:
        ConfigError: A wish is unknown or of the wrong type, or this worker takes no checkpoints.
    """
    wishes = work.payload.get(CHECKPOINTS)
    if checkpointer is None:
        if wishes is not None:
            message = "the task speaks of checkpoints and this worker takes none; start it with --checkpoint-every"
            raise ConfigError(message, field=CHECKPOINTS, request_id=work.job.request_id)
        return None
    wanted = RunCheckpoints(checkpointer=checkpointer, request_id=work.job.request_id, leaving=work.leaving)
    if wishes is None:
        return wanted
    if not isinstance(wishes, dict):
        raise _wrong_wish(work, CHECKPOINTS, wishes, "a mapping")
    for name in wishes:
        if name not in _WISHES:
            raise ConfigError(unknown_key(name, _WISHES, CHECKPOINTS), field=f"{CHECKPOINTS}.{name}")
    source, step, keep = wishes.get("from"), wishes.get("step"), wishes.get("keep")
    override, retain = wishes.get("override", []), wishes.get("retain", False)
    if source is not None and (not isinstance(source, str) or not source):
        raise _wrong_wish(work, "from", source, "a request's id")
    for name, number in (("step", step), ("keep", keep)):
        if number is not None and (type(number) is not int or number < 1):
            raise _wrong_wish(work, name, number, "a whole number above 0")
    if not isinstance(override, list) or not all(isinstance(name, str) for name in override):
        raise _wrong_wish(work, "override", override, "a list of fields")
    if not isinstance(retain, bool):
        raise _wrong_wish(work, "retain", retain, "true or false")
    wanted.of, wanted.retain = source, retain
    wanted.step = step if isinstance(step, int) else None
    wanted.keep = keep if isinstance(keep, int) else None
    wanted.override = tuple(sorted(check_override([str(name) for name in override])))
    return wanted


def _wrong_wish(work: Work, name: str, value: object, wanted: str) -> ConfigError:
    field = name if name == CHECKPOINTS else f"{CHECKPOINTS}.{name}"
    return ConfigError(f"{field}={value!r} must be {wanted}", field=field, request_id=work.job.request_id)


def _is_the_end(work: Work, error: MoonrelayError) -> bool:
    """Say whether the request ends by this error, as far as is known here; where not, somebody may go on."""
    why = work.job.lost or error
    if isinstance(why, (LeaseLost, ClosedError)):  # the job is another worker's, or will be: it is we who end
        return False
    return isinstance(why, (Cancelled, DeadlineExceeded)) or not why.retryable


def _steps(work: Work, tree: Mapping[str, object], wanted: RunCheckpoints | None) -> dict[str, Plain]:
    """Return how many steps there were, were not needed, and were done a second time."""
    total = _mapping(tree, "params").get("num_inference_steps")
    steps = total if isinstance(total, int) else 0
    resumed = 0 if wanted is None else wanted.resumed_step
    done_before = round(work.job.reached * steps)
    return {"steps": steps, "resumed_step": resumed, "steps_redone": max(0, done_before - resumed)}


def _features(used: FeatureRun | None) -> dict[str, Plain]:
    """Return how many features were kept, computed and, being approximate, taken from another request."""
    if used is None:
        return {}
    counters = used.counters()
    return {"features": {"kept": counters.hits, "computed": counters.misses, "approximated": counters.reused}}


def _registered(work: Work, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Give the latents a place from which they can be read without a copy; any memory where there is no pool."""
    import torch

    from moonrelay.errors import CapacityError

    if not work.connector.settings.serves_directly:
        return torch.empty(shape, dtype=dtype)
    try:
        return work.connector.empty(shape, dtype=dtype)
    except CapacityError:
        return torch.empty(shape, dtype=dtype)


def _timed(chunks: Iterator[torch.Tensor], waited: list[float], trace: StageTrace) -> Iterator[torch.Tensor]:
    """Pass chunks on, adding up the seconds spent waiting for them."""
    while True:
        began = trace.now()
        chunk = next(chunks, None)
        waited[0] += trace.now() - began
        if chunk is None:
            return
        yield chunk


def _mapping(tree: Mapping[str, object], key: str) -> dict[str, Plain]:
    value = tree.get(key)
    if not isinstance(value, dict):
        message = f"{key!r} is missing or no mapping; submit it as the encode task's payload"
        raise ConfigError(message, field=key)
    return value


def _check_schema(work: Work, wanted: str) -> None:
    schema = work.input.handle.schema
    if schema != wanted:
        message = f"the payload's schema is {schema!r}, this stage reads {wanted!r}; use one model for all stages"
        raise ConfigError(message, field="schema", request_id=work.job.request_id)
