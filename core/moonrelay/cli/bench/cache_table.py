"""What ``bench cache`` and ``bench checkpoint`` print: one line for each row, in words. No measuring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moonrelay.cli.sizes import say_size

if TYPE_CHECKING:
    from rich.console import Console


def show(console: Console, row: Mapping[str, object]) -> None:
    """Print one row."""
    console.print(line(row), markup=False, soft_wrap=True)


def line(row: Mapping[str, object]) -> str:
    """Return one row in words."""
    if "recovery" in row:
        return (
            f"cut off after step {row['cut_after']}: taken up at step {row['resumed_step']} in {_ms(row['resume_s'])}, "
            f"there again in {_s(row['recovered_s'])}; starting over {_s(row['started_over_s'])} ({row['ratio']})"
        )
    if "every" in row:
        return _step(row)
    if row["what"] == "one key":
        return (
            f"one key, {row['processes']} processes, encoding {_s(row['encode_s'])}: {row['encodes']} encode, "
            f"{row['different']} different result, median {_s(row['median_s'])}, last {_s(row['last_s'])}"
        )
    if row["what"] == "prompts":
        return (
            f"prompts, Zipf {row['exponent']}: memory holds {_part(row['memory_holds'])} and the store "
            f"{_part(row['store_holds'])} of {row['prompts']}; {_part(row['in_memory'])} in memory, "
            f"{_part(row['in_store'])} in the store, {_part(row['encoded'])} encoded ({_part(row['repeats'])} repeats)"
        )
    if row["what"] == "encode":
        return (
            f"encode (T5 {row['encoder']}, {_number(row['parameters']) / 1e6:.0f} M parameters): {_s(row['seconds'])}"
        )
    size = say_size(int(_number(row["entry_bytes"])))
    return f"{row['what']} of {size}: {_ms(row['seconds'])}, {_number(row['of_encode']):.2%} of encoding"


def _step(row: Mapping[str, object]) -> str:
    if row["every"] == 0:
        return f"step without checkpoints: {_ms(row['step_s'])}"
    quartiles = row["ratio_quartiles"]
    low, high = quartiles if isinstance(quartiles, tuple) else (quartiles, quartiles)
    size = say_size(int(_number(row["state_bytes"])))
    return (
        f"k = {row['every']}: {_ms(row['step_s'])}, {_more(row['ratio'])} ({_more(low)} to {_more(high)}), least "
        f"{_more(row['ratio_of_least'])}; the loop kept {_ms(row['call_s'])} a step, "
        f"{_number(row['call_of_step']):.2%}; {row['saved']} of {size} saved, {row['skipped']} skipped"
    )


def _more(ratio: object) -> str:
    return f"{_number(ratio) - 1:+.1%}"


def _number(value: object) -> float:
    return float(str(value))


def _ms(seconds: object) -> str:
    return f"{_number(seconds) * 1e3:.3g} ms"


def _s(seconds: object) -> str:
    return f"{_number(seconds):.3g} s"


def _part(value: object) -> str:
    return f"{_number(value):.0%}"
