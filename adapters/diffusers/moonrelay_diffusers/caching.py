"""The embedding cache in this host's programs: encode asks it text by text, denoise reads what a task names.

Owns what the programs do with a cache, and what they note of it in a request's trace. The cache is the worker's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonrelay.errors import ConfigError
from moonrelay.orchestrator.program import Work
from moonrelay.orchestrator.shortcut import read_kept
from moonrelay.orchestrator.trace import StageTrace
from moonrelay_diffusers.embeddings import conditioning_asked
from moonrelay_diffusers.families import family_named
from moonrelay_diffusers.families.base import Conditioning, DenoiseRunner, Embeds, EncodeRunner, Text
from moonrelay_diffusers.request import GenerationRequest, StageParams

if TYPE_CHECKING:
    from moonrelay.cache.embeddings import EmbeddingCache


def encode_with(
    runner: EncodeRunner, request: GenerationRequest, cache: EmbeddingCache, work: Work, trace: StageTrace
) -> Conditioning:
    """Return what the runner makes of a request, with every text that is kept taken from the cache.

    Blocks: while texts are encoded, here or in another process. Raises what the runner raises.
    """

    def embed(text: Text) -> Embeds:
        before = cache.counters()
        key = runner.key(text)
        tree = cache.get_or_encode(
            key,
            lambda: runner.embed(text.text, max_sequence_length=text.max_length),
            request_id=work.job.request_id,
        )
        after = cache.counters()
        found = "memory" if after.hits_memory > before.hits_memory else "store"
        if found == "memory" and cache.shares and not cache.holds([key]):
            cache.put(key, tree)  # forgotten there, and still asked for: others, and requests past encode, need it
        trace.embedding(text.role, "encoded" if after.encodes > before.encodes else found)
        return tree  # type: ignore[return-value]  # what `embed` of the runner gave, here or elsewhere

    return runner.run(request, embed=embed)


def kept_conditioning(
    runner: DenoiseRunner, cache: EmbeddingCache | None, work: Work, trace: StageTrace
) -> Conditioning:
    """Return what encode would have handed over to a task that went past it.

    Blocks: for one read of the store per text.

    Raises:
        InputLost: Embeddings are not there any more.
        ConfigError, WireError: The task names none, or those of another family.
    """
    asked = conditioning_asked(work.payload)
    if asked is None:
        message = f"a task of stage {work.job.stage!r} needs a handle, or names embeddings that are kept"
        raise ConfigError(message, field="handle", request_id=work.job.request_id)
    schema, params = asked
    if schema != runner.input_schema:
        message = f"the embeddings' schema is {schema!r}, this stage reads {runner.input_schema!r}; use one model"
        raise ConfigError(message, field="schema", request_id=work.job.request_id)
    began = trace.now()
    embeds = read_kept(work.payload, cache, request_id=work.job.request_id)
    tree = family_named(runner.family).conditioning(StageParams.from_payload(params), embeds)  # type: ignore[arg-type]
    for role in embeds:
        trace.embedding(role, "kept")
    nbytes = sum(getattr(tensor, "nbytes", 0) for tensor in tree.values())
    trace.input_read(nbytes, "cache", trace.now() - began)
    return tree
