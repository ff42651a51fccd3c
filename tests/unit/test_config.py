"""Settings: precedence, and sentences for what is wrong."""

from __future__ import annotations

import pytest

from moonrelay.config import ControlConfig, StoreConfig, TransferConfig, build, default_environment, from_environment
from moonrelay.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("MOONRELAY_"):
            monkeypatch.delenv(name)


def test_defaults_stand_when_nothing_is_given() -> None:
    assert build(TransferConfig, None, env_prefix="TE") == TransferConfig()
    assert build(StoreConfig, {}, env_prefix="STORE") == StoreConfig()


def test_an_instance_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_TE_WINDOW", "3")
    mine = TransferConfig(window=5)
    assert build(TransferConfig, mine, env_prefix="TE") is mine


def test_an_argument_beats_the_environment_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_TE_WINDOW", "3")
    monkeypatch.setenv("MOONRELAY_TE_ENGINE", "shm")
    monkeypatch.setenv("MOONRELAY_TE_PROGRESS_TIMEOUT_S", "2.5")
    built = build(TransferConfig, {"window": 7}, env_prefix="TE")
    assert (built.window, built.engine, built.progress_timeout_s) == (7, "shm", 2.5)


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'pool_byte'; did you mean 'pool_bytes'") as caught:
        build(TransferConfig, {"pool_byte": 1}, env_prefix="TE")
    assert caught.value.context["field"] == "pool_byte"


def test_an_unknown_key_like_nothing_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"valid: .*capacity_bytes"):
        build(StoreConfig, {"zzz": 1}, env_prefix="STORE")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"window": 0}, "window"),
        ({"window": -1}, "window"),
        ({"window": "8"}, "window"),
        ({"window": 2.5}, "window"),
        ({"window": True}, "window"),
        ({"window": None}, "window"),
        ({"protocol": "udp"}, "protocol"),
        ({"engine": 3}, "engine"),
        ({"progress_timeout_s": float("nan")}, "progress_timeout_s"),
    ],
)
def test_a_wrong_value_is_refused_by_field(values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(TransferConfig, values, env_prefix="TE")
    assert caught.value.context["field"] == field
    assert field in caught.value.message


def test_an_int_will_do_for_a_float_and_none_where_it_may_be() -> None:
    assert build(ControlConfig, {"renew_s": 2}, env_prefix="CONTROL").renew_s == 2
    assert build(StoreConfig, {"url": None}, env_prefix="STORE").url is None


def test_a_wrong_value_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_TE_WINDOW", "many")
    with pytest.raises(ConfigError, match="MOONRELAY_TE_WINDOW='many' is not a int"):
        build(TransferConfig, None, env_prefix="TE")


def test_something_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a mapping or a TransferConfig, not list"):
        build(TransferConfig, ["engine"], env_prefix="TE")  # type: ignore[arg-type]


def test_reading_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment("AUTH_KEY") is None
    monkeypatch.setenv("MOONRELAY_AUTH_KEY", "")
    assert from_environment("AUTH_KEY") is None
    monkeypatch.setenv("MOONRELAY_AUTH_KEY", "k")
    assert from_environment("AUTH_KEY") == "k"


def test_a_default_for_a_library_does_not_replace_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("MOONRELAY_TEST_A", "mine")
    monkeypatch.setenv("MOONRELAY_TEST_B", "gone")
    monkeypatch.delenv("MOONRELAY_TEST_B")
    default_environment({"MOONRELAY_TEST_A": "theirs", "MOONRELAY_TEST_B": "theirs"})
    assert (os.environ["MOONRELAY_TEST_A"], os.environ["MOONRELAY_TEST_B"]) == ("mine", "theirs")
    monkeypatch.delenv("MOONRELAY_TEST_B")
