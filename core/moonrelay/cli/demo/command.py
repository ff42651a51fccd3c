"""The command's options, and what it prints at the end."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonrelay.cli.demo.settings import DemoSettings
from moonrelay.clock import SystemClock
from moonrelay.config import default_environment
from moonrelay.errors import PluginError
from moonrelay.plugins import RELAYS, TRANSFERS, Registry

if TYPE_CHECKING:
    from moonrelay.cli.demo.folders import OutputFolder
    from moonrelay.cli.demo.run import DemoRun

_NEEDED = ("torch", "diffusers", "transformers", "imageio", "PIL", "matplotlib")


def demo(
    requests: Annotated[int, typer.Option(min=1, help="Videos to make.")] = 8,
    denoise_workers: Annotated[
        int | None, typer.Option(min=1, help="Processes of the denoise stage.", show_default="2, with --preempt 1")
    ] = None,
    encode_workers: Annotated[int, typer.Option(min=1, help="Processes of the encode stage.")] = 1,
    decode_workers: Annotated[int, typer.Option(min=1, help="Processes of the decode stage.")] = 1,
    transfer_mode: Annotated[str, typer.Option(help="auto, p2p or store.")] = "auto",
    engine: Annotated[str, typer.Option(help="Direct engine: mooncake, shm, ...")] = "mooncake",
    store: Annotated[
        str | None,
        typer.Option(
            help="Relay: local (embedded), local:///folder or mooncake://host:port.",
            show_default="a Mooncake store of the demo's own",
        ),
    ] = None,
    kill: Annotated[
        str,
        typer.Option(help="kill -9 one worker of this stage in the middle of a job: encode, denoise, decode, none."),
    ] = "none",
    preempt: Annotated[
        bool,
        typer.Option(
            "--preempt", help="The last request is interactive and overtakes batch jobs: one is left at a step for it."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of a diffusers model.", show_default="a tiny random Wan, built here"),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model lives: cpu, cuda:0, ...")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="Type of the weights, as for `moonrelay worker`.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 20,
    checkpoint_every: Annotated[
        int,
        typer.Option(min=0, help="Save a denoising job's state after every so many steps, to go on from; 0 for never."),
    ] = 5,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of a video.", show_default="17, an image 1")] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Height and width in pixels.", show_default="96, an image 192")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for videos, pictures and summary.json.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first request; each further one has the next.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one torch operation, everywhere the same.")] = 1,
    timeout_s: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 900.0,
    embedding_cache: Annotated[
        str, typer.Option(help="Bound of the workers' cache of embeddings, as for `moonrelay worker`; or off.")
    ] = "64MiB",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; progress goes to stderr.")
    ] = False,
) -> None:
    """Turn prompts into videos through encode, denoise and decode processes; compare with the undivided run.

    Exits with 0 only when every result is bit-identical to what diffusers' own pipeline gives for the same seed.
    """
    settings = DemoSettings(
        requests=requests,
        encode_workers=encode_workers,
        denoise_workers=denoise_workers or (1 if preempt else 2),
        decode_workers=decode_workers,
        transfer_mode=transfer_mode,
        engine=engine,
        store=store,
        kill=kill,
        preempt=preempt,
        model=model,
        device=device,
        dtype=dtype,
        size=size,
        frames=frames,
        steps=steps,
        checkpoint_every=checkpoint_every,
        output=output,
        seed=seed,
        threads=threads,
        timeout_s=timeout_s,
        embedding_cache=embedding_cache,
    )
    check_installed(settings)
    prepare_environment(settings)
    raise typer.Exit(show(settings, as_json=as_json))


def show(settings: DemoSettings, *, as_json: bool) -> int:
    """Run the demo, write what it leaves, print the verdict.

    Returns:
        The exit code.
    """
    from rich.console import Console

    from moonrelay.cli.demo.display import make_display
    from moonrelay.cli.demo.folders import OutputFolder
    from moonrelay.cli.demo.run import DemoRun, write_summary

    clock = SystemClock()
    console = Console(stderr=as_json, highlight=False)
    with OutputFolder(settings.output) as folder:
        with make_display(console, clock) as display:
            run = DemoRun(settings, folder, display, clock)
            summary = run.run()
            display.update(run.board, "drawing")
            draw(run, folder)
        killed = summary.killed
        if settings.kill != "none" and (killed is None or not killed.survived) and summary.identical:
            summary.problem = f"no {settings.kill} worker could be killed in the middle of a job"
        if settings.preempt and not summary.yields and summary.identical:
            summary.problem = "no batch job made way for the interactive one"
        summary.seconds = clock.monotonic() - run.board.started_s
        text = write_summary(summary, folder.summary)
        if as_json:
            typer.echo(text)
        good = summary.identical and summary.problem is None
        if good:
            console.print(f"\n{summary.verdict()}", style="bold green", soft_wrap=True)
        else:
            sys.stderr.write(f"error: {summary.verdict()}\n")
        for label, path in (
            ("videos", folder.videos),
            ("contact sheet", folder.contact_sheet),
            ("timeline", folder.timeline),
            ("summary", folder.summary),
        ):
            console.print(f"{label:<14}{_short(path)}", soft_wrap=True, style="dim")
        console.print(f"{summary.seconds:.0f} s in all", style="dim")
    return 0 if good else 1


def draw(run: DemoRun, folder: OutputFolder) -> None:
    """Draw contact sheet and timeline."""
    from moonrelay.cli.demo.contact import draw_contact_sheet
    from moonrelay.cli.demo.timeline import draw_timeline

    draw_contact_sheet(run.summary, folder.contact_sheet)
    draw_timeline(run.board, run.summary, folder.timeline)


def check_installed(settings: DemoSettings) -> None:
    """Refuse early what could only fail late.

    Raises:
        PluginError: A package is missing, or no engine or relay has that name.
    """
    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        message = f"the demo needs {', '.join(missing)}; pip install 'moonrelay[demo,mooncake-cpu]'"
        raise PluginError(message)
    Registry(TRANSFERS).load(settings.engine)
    if settings.store not in (None, "local"):
        from moonrelay.relay import parse_url

        Registry(RELAYS).load(parse_url(settings.store).scheme)


def prepare_environment(settings: DemoSettings) -> None:
    """Set what the children inherit, where the user has not: no hub for a local model, and a secret of this run's."""
    import secrets

    values = {
        "MOONRELAY_AUTH_KEY": secrets.token_hex(16),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if settings.model is None or Path(settings.model).expanduser().is_dir():
        values |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    default_environment(values)


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
