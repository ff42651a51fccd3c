"""Lease policies become terms; what makes no sense is refused by field, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from moonrelay.errors import ConfigError
from moonrelay.handle import LeaseTerms
from moonrelay.lease import DeleteOnConsume, Pinned, Shared, Ttl, terms


@dataclass(frozen=True)
class Weekly:
    """A plugin's policy."""

    readers: int = 3

    def terms(self, default_ttl_s: float | None) -> LeaseTerms:
        return LeaseTerms(policy="weekly", readers=self.readers, ttl_s=604800.0)


@pytest.mark.parametrize(
    ("policy", "readers", "ttl_s"),
    [
        ("delete_on_consume", 1, 600.0),
        (DeleteOnConsume(), 1, 600.0),
        (DeleteOnConsume(5), 1, 5.0),
        (Shared(4), 4, 600.0),
        (Shared(readers=2, ttl_s=7), 2, 7.0),
        (Ttl(30), 0, 30.0),
        ("pinned", 0, None),
        (Pinned(), 0, None),
    ],
)
def test_policy_gives_terms(policy: object, readers: int, ttl_s: float | None) -> None:
    made = terms(policy, 600.0)  # type: ignore[arg-type]
    assert (made.readers, made.ttl_s) == (readers, ttl_s)


def test_no_default_means_without_end() -> None:
    assert terms("delete_on_consume", None).ttl_s is None


@pytest.mark.parametrize(
    ("policy", "field", "said"),
    [
        (Shared(0), "readers", "Shared.readers=0"),
        (Shared(True), "readers", "True"),
        (Shared(1.5), "readers", "1.5"),  # type: ignore[arg-type]
        (DeleteOnConsume(0), "ttl_s", "DeleteOnConsume.ttl_s=0"),
        (DeleteOnConsume(-1), "ttl_s", "-1"),
        (Ttl(math.nan), "ttl_s", "nan"),
        (Ttl(math.inf), "ttl_s", "inf"),
        (Ttl("5"), "ttl_s", "'5'"),  # type: ignore[arg-type]
        (Ttl(None), "ttl_s", "Pinned()"),  # type: ignore[arg-type]
        ("delete_on_consum", "lease", "did you mean 'delete_on_consume'?"),
        ("shared", "lease", "Shared(…)"),
        ("ttl", "lease", "Ttl(…)"),
        (Shared, "lease", "pass an instance"),
        (7, "lease", "7"),
        (Weekly(readers=-1), "readers", "-1"),
    ],
)
def test_bad_policy_is_refused_by_name(policy: object, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        terms(policy, 600.0)  # type: ignore[arg-type]
    assert caught.value.context["field"] == field
    assert said in caught.value.message


@pytest.mark.parametrize("resolve", [{"weekly": Weekly}, {"weekly": Weekly}.__getitem__])
def test_plugin_policy_is_found_by_name(resolve: object) -> None:
    assert terms("weekly", 600.0, resolve=resolve) == LeaseTerms(policy="weekly", readers=3, ttl_s=604800.0)  # type: ignore[arg-type]


def test_built_in_names_need_no_lookup() -> None:
    def refuse(name: str) -> Callable[..., object]:
        raise AssertionError(name)

    assert terms("pinned", None, resolve=refuse).policy == "pinned"


@pytest.mark.parametrize("made", [object, dict])
def test_plugin_that_is_no_policy_is_refused(made: type) -> None:
    with pytest.raises(ConfigError, match="no terms"):
        terms("odd", None, resolve={"odd": made})


def test_plugin_that_gives_no_terms_is_refused() -> None:
    class Odd:
        def terms(self, default_ttl_s: float | None) -> LeaseTerms:
            return 5  # type: ignore[return-value]

    with pytest.raises(ConfigError, match="gave int"):
        terms(Odd(), None)
