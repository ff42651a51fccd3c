"""Runs one stage in a process of its own and reports what it loaded: ``stage_process.py STAGE MODEL FOLDER``."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

opened: list[str] = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)


def main(stage: str, model: str, folder: str) -> None:
    import numpy as np
    import torch

    from moonrelay_diffusers import GenerationRequest, load_stage
    from moonrelay_diffusers.numerics import deterministic_setup

    deterministic_setup(1)
    work = Path(folder)
    if stage == "encode":
        encode = load_stage(model, "encode")
        request = GenerationRequest.from_payload(json.loads((work / "request.json").read_text()))
        torch.save(encode.run(request), work / "conditioning.pt")
    elif stage == "denoise":
        denoise = load_stage(model, "denoise")
        tree = torch.load(work / "conditioning.pt", weights_only=True)
        torch.save({"latents": denoise.run(tree), "params": tree["params"]}, work / "latents.pt")
    else:
        decode = load_stage(model, "decode")
        tree = torch.load(work / "latents.pt", weights_only=True)
        cut = 2 if decode.incremental else 1
        np.save(work / "frames.npy", decode.run_chunks(tree["latents"].split(2, dim=cut), tree["params"]))
    alive = {type(thing).__name__ for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)}
    root = Path(model).resolve()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if len(line.split()) > 5}
    touched = {Path(name).resolve() for name in {*opened, *mapped} if not name.isdecimal()}
    files = sorted(str(name.relative_to(root)) for name in touched if name.is_relative_to(root) and name.is_file())
    print(json.dumps({"modules": sorted(alive), "files": files}))


if __name__ == "__main__":
    main(*sys.argv[1:])
