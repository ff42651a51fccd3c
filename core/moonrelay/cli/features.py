"""A worker's feature cache: from the options to the cache, for programs that can use one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from moonrelay.cli.sizes import parse_size
from moonrelay.errors import ConfigError

if TYPE_CHECKING:
    from moonrelay.cache.features import FeatureCache
    from moonrelay.connector import DiffusionConnector
    from moonrelay.orchestrator import StageProgram

OFF = "off"


def feature_bytes(asked: str | None, approximate: list[str] | None) -> int | None:
    """Return the bound that was asked for; ``None`` for no cache.

    Raises:
        ConfigError: It is no size and not ``off``, an approximation is not known, or asked for without a cache.
    """
    from moonrelay.cache.features import check_approximations

    bound = None if asked is None or asked == OFF else parse_size(asked, "feature_cache")
    if check_approximations(approximate or ()) and bound is None:
        message = f"--approximate {approximate[0] if approximate else ''} needs --feature-cache, e.g. 2GiB"
        raise ConfigError(message, field="approximate")
    return bound


def give_features(
    program: StageProgram,
    connector: DiffusionConnector,
    capacity_bytes: int | None,
    approximate: list[str] | None,
    stack: ExitStack,
) -> FeatureCache | None:
    """Make a feature cache, where one was asked for, and give it to the program.

    Args:
        program: The program.
        connector: Who is told.
        capacity_bytes: The bound; ``None`` for no cache.
        approximate: Names of approximations.
        stack: Closes the cache.

    Returns:
        The cache, if there is one.

    Raises:
        ConfigError: The program keeps no features, or cannot with this model.

    Blocks: while the model is looked at.
    """
    from moonrelay.cache.features import FeatureCache
    from moonrelay.orchestrator import CachesFeatures

    if capacity_bytes is None:
        return None
    if not isinstance(program, CachesFeatures):
        message = f"--feature-cache: stage {program.stage!r} of this adapter keeps no features; leave it out"
        raise ConfigError(message, field="feature_cache")
    cache = stack.enter_context(FeatureCache(connector, capacity_bytes, approximate=approximate or ()))
    program.use_features(cache)
    return cache
