"""Objects: they come back whole however they are cut, once written they stay, and absent is absent."""

from __future__ import annotations

import threading

import pytest

from moonrelay.errors import ConfigError, IntegrityError
from moonrelay.handle import Extent
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.part_footprint import Memory, differs
from moonrelay_conformance.suites.part_process import pattern
from moonrelay_conformance.suites.part_shared import in_threads
from moonrelay_conformance.suites.relay_bench import Quiet, RelayBench, RelaySuite, cut, soon

MIB = 1 << 20


class RelayObjects(RelaySuite):
    """Put, get, remove, list."""

    @pytest.mark.parametrize("nbytes", [1, 2, 4095, 4096, 4097, MIB + 3, 5 * MIB])
    @promise(Level.L1, "An object comes back, every byte of it")
    def test_an_object_comes_back(self, bench: RelayBench, nbytes: int) -> None:
        key, content = bench.key("object"), pattern(nbytes, nbytes)
        bench.put(key, content)
        found = bench.get(key, nbytes)
        assert found is not None, "what was just stored is not there"
        assert not differs(found, content), differs(found, content)

    @promise(Level.L1, "An object comes back however its memory is cut when it is put and got")
    def test_an_object_comes_back_however_it_is_cut(self, bench: RelayBench) -> None:
        nbytes = 3_000_001
        content = pattern(1, nbytes)
        for number, (put_at, get_at) in enumerate(
            [((128, 128, 1_000_000), (1, 999_999, 1_500_000)), ((0, nbytes), (nbytes - 1,)), ((4096,), (4095, 4097))]
        ):
            key, source, target = bench.key(f"cut/{number}"), Memory(content), Memory(bytes(nbytes))
            bench.relay.put(key, cut(source, *put_at), soon())
            assert bench.relay.get(key, cut(target, *get_at), soon()), "what was just stored is not there"
            wrong = differs(target.read(), content)
            assert not wrong, f"put in parts at {put_at}, got in parts at {get_at}: {wrong}"
            assert source.read() == content, "put wrote the memory that it stores"

    @promise(Level.L1, "Thousands of small parts are one object")
    def test_thousands_of_small_parts_are_one_object(self, bench: RelayBench) -> None:
        nbytes = 3 * MIB
        key, content = bench.key("strips"), pattern(2, nbytes)
        strips = range(1000, nbytes, 1500)
        source, target = Memory(content), Memory(bytes(nbytes))
        bench.relay.put(key, cut(source, *strips), soon())
        assert bench.relay.get(key, cut(target, *strips), soon()), "what was just stored is not there"
        assert not differs(target.read(), content), differs(target.read(), content)

    @promise(Level.L1, "Objects are told apart by their whole key")
    def test_objects_of_similar_keys_are_told_apart(self, bench: RelayBench) -> None:
        names = ["a", "A", "a/", "a/b", "a.b", "a-b", "a_b", "ab", "x" * 120, "x" * 121]
        keys = {name: bench.key(f"like/{name}") for name in names}
        for seed, name in enumerate(names):
            bench.put(keys[name], pattern(seed, 100))
        for seed, name in enumerate(names):
            assert bench.get(keys[name], 100) == pattern(seed, 100), f"key {name!r} holds another key's object"

    @promise(Level.L1, "A key is used once: a second put is refused and the first object stays")
    def test_a_key_is_used_once(self, bench: RelayBench) -> None:
        key, first = bench.key("once"), pattern(3, 5000)
        bench.put(key, first)
        for other in (pattern(4, 5000), pattern(5, 9000), pattern(6, 1), first):
            with pytest.raises(IntegrityError):
                bench.put(key, other)
            assert bench.get(key, 5000) == first, "a refused put changed the object"

    @promise(Level.L1, "Of threads that put one key at once, one stores and the others are told")
    def test_threads_putting_one_key_have_one_winner(self, bench: RelayBench) -> None:
        together = threading.Barrier(4)
        results: list[list[str]] = [[] for _ in range(4)]
        keys = [bench.key(f"contested/{n}") for n in range(10)]

        def writer(me: int) -> None:
            for key in keys:
                together.wait(30)
                try:
                    bench.put(key, pattern(me, 20_000))
                    results[me].append("stored")
                except IntegrityError:
                    results[me].append("refused")
                except Exception as exc:  # noqa: BLE001 - told to the main thread
                    results[me].append(repr(exc))

        in_threads(4, writer)
        for key, ends in zip(keys, zip(*results, strict=True), strict=True):
            assert sorted(ends) == ["refused", "refused", "refused", "stored"], f"four puts of one key: {ends}"
            assert bench.get(key, 20_000) == pattern(ends.index("stored"), 20_000), "the refused put's bytes stand"

    @pytest.mark.parametrize("wanted", [1, 99, 101, 5000])
    @promise(Level.L1, "Asking for another size than the object's is an integrity error")
    def test_another_size_than_the_objects_is_refused(self, bench: RelayBench, wanted: int) -> None:
        key, target = bench.key("sized"), Memory(bytes(wanted))
        bench.put(key, pattern(7, 100))
        with pytest.raises(IntegrityError):
            bench.relay.get(key, cut(target), soon())
        target.read()
        assert bench.get(key, 100) == pattern(7, 100), "a refused get changed the object"

    @promise(Level.L1, "An absent object is False, and the memory is not touched")
    def test_an_absent_object_is_false_and_touches_nothing(self, bench: RelayBench) -> None:
        target = Memory(b"untouched")
        found = bench.relay.get(bench.key("absent"), cut(target), soon())
        assert found is False, f"an object that never was: {found!r}"
        assert target.read() == b"untouched", "a get of nothing wrote memory"
        assert bench.relay.get_bytes(bench.key("absent-too"), soon()) is None, "a value that never was"

    @promise(Level.L1, "Removing is by force, and removing what is not there is fine")
    def test_remove_is_idempotent_and_by_force(self, bench: RelayBench) -> None:
        gone, stays = bench.key("gone"), bench.key("stays")
        for key in (gone, stays):
            bench.put(key, pattern(8, 1000))
        bench.get(gone, 1000)  # some stores protect what was just read
        bench.relay.remove([gone, bench.key("never"), gone], soon())
        assert bench.get(gone, 1000) is None, "a removed object is still there"
        for keys in ([gone], []):
            bench.relay.remove(keys, soon())
        assert bench.get(stays, 1000) == pattern(8, 1000), "another object was removed"

    @promise(Level.L1, "Threads that read one object at once all get it")
    def test_threads_reading_one_object_all_get_it(self, bench: RelayBench) -> None:
        key, content = bench.key("popular"), pattern(9, MIB)
        bench.put(key, content)
        wrong: list[str] = []

        def reader(me: int) -> None:
            for turn in range(5):
                try:
                    found = bench.get(key, MIB)
                    if found != content:
                        wrong.append(f"thread {me}, turn {turn}: {'absent' if found is None else 'other bytes'}")
                except Exception as exc:  # noqa: BLE001 - told to the main thread
                    wrong.append(f"thread {me}, turn {turn}: {exc!r}")

        in_threads(4, reader)
        assert not wrong, wrong[0]

    @promise(Level.L1, "Keys are listed by their prefix", requires=(Capability.LISTING,))
    def test_keys_are_listed_by_prefix(self, bench: RelayBench) -> None:
        for name in ("a/1", "a/2", "ab", "other"):
            bench.relay.put_if_absent(bench.key(name), b"x", soon())
        bench.put(bench.key("a/3"), b"object")
        assert bench.keys("a/") == ["a/1", "a/2", "a/3"]
        assert bench.keys("a") == ["a/1", "a/2", "a/3", "ab"]
        assert bench.keys("nothing") == []
        bench.relay.remove([bench.key("a/1"), bench.key("a/3")], soon())
        assert bench.keys("a/") == ["a/2"], "a removed key is still listed"

    @promise(Level.L1, "Another client of the same url reads what was stored, and removes it")
    def test_a_second_client_of_the_url_reads_it(self, bench: RelayBench) -> None:
        key, value, second = bench.key("shared"), bench.key("value"), bench.another()
        bench.put(key, pattern(10, 70_000))
        bench.relay.put_if_absent(value, b"value", soon())
        target = Memory(bytes(70_000))
        assert second.get(key, cut(target), soon()), "the url that a relay gives leads to another store"
        assert target.read() == pattern(10, 70_000)
        assert second.get_bytes(value, soon()) == b"value"
        second.remove([key], soon())
        assert bench.get(key, 70_000) is None, "what another client removed is still there"

    @promise(Level.L1, "Keys, values and memory that cannot be are refused by name")
    def test_bad_input_is_refused(self, bench: RelayBench) -> None:
        before = bench.stored()
        memory, key = Memory(b"data"), bench.key("ok")
        parts = cut(memory)
        bad: list[tuple[str, list[Extent]]] = [
            ("", parts),
            ("a b", parts),
            ("ü", parts),
            ("a\n", parts),
            ("x" * 201, parts),
            (key, []),
            (key, [Extent(memory.address, 0)]),
            (key, [Extent(0, 4)]),
        ]
        for wrong_key, wrong_parts in bad:
            for what, move in (("put", bench.relay.put), ("get", bench.relay.get)):
                quiet = Quiet()
                with pytest.raises(ConfigError):
                    move(wrong_key, wrong_parts, soon(), on_quiet=quiet)
                quiet.once(f"a refused {what}")
        for value in (b"", bytes(4097)):
            with pytest.raises(ConfigError):
                bench.relay.put_if_absent(key, value, soon())
        assert set(bench.stored()) <= set(before), "something refused was stored"

    @promise(Level.L1, "An object's age, where it can be told, is no more than the time since it was stored")
    def test_an_objects_age_is_a_lower_bound(self, bench: RelayBench) -> None:
        key, since = bench.key("aged"), soon(3600.0)
        bench.put(key, b"aged")
        threading.Event().wait(0.05)
        age_s = bench.relay.age_s(key)
        elapsed_s = 3600.0 - (since.remaining() or 0.0)
        assert age_s is None or 0 <= age_s <= elapsed_s + 0.01, f"{age_s} s old after {elapsed_s} s"
        assert bench.relay.age_s(bench.key("never")) is None, "an object that never was has an age"

    @promise(Level.L1, "Memory is announced and forgotten without complaint, twice as well as once")
    def test_announcing_memory_changes_nothing(self, bench: RelayBench) -> None:
        key, memory = bench.key("announced"), Memory(pattern(11, 200_000))
        for _ in range(2):
            bench.relay.register(memory.address, memory.nbytes)
        bench.relay.put(key, cut(memory), soon())
        for _ in range(2):
            bench.relay.unregister(memory.address)
        assert bench.get(key, 200_000) == pattern(11, 200_000)
