"""rondel sandbox: what can contain code of a policy here; an image for containers; boxes that a killed run left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rondel.core.errors import ConfigError, SandboxError, UserError
from rondel.core.registry import one_of

ACTIONS = ("check", "image", "clean")


def run(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="check: what works here; image: build one; clean: end what is left.")
    ] = "check",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="image: the folder to write; it must not exist.")
    ] = None,
    debian: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="image: a Debian package beside python3; again for more.")
    ] = None,
    pypi: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="image: a package of PyPI, as numpy==2.4.1; again for more."),
    ] = None,
    lock: Annotated[
        Path | None, typer.Option(metavar="FILE", help="image: packages.json of an image, to build the same again.")
    ] = None,
    image: Annotated[str, typer.Option(metavar="DIR", help="check: try containers of this image, too.")] = "",
) -> None:
    """Show what contains code here; build an image; end left boxes.

    check starts a box of every kind that needs no setting. image takes packages from Debian and PyPI and no others;
    equal packages make an equal digest. clean ends boxes of services that a killed run left, and removes its temporary
    files.
    """
    one_of("ACTION", action, ACTIONS)
    if action == "image":
        build(out, debian or [], pypi or [], lock)
    elif action == "clean":
        clean()
    else:
        check(image)


def check(image: str) -> None:
    from rondel.runtime.sandbox.recipe import describe, sandbox_of

    container: dict[str, Any] = {"kind": "container", **({"image": image} if image else {})}
    specs: list[dict[str, Any]] = [{"kind": "namespaces"}, {"kind": "bubblewrap"}]
    specs += [{**container, "tool": tool} for tool in ("crun", "runc", "podman", "docker")]
    specs += [{"kind": "gvisor", "image": image or "-"}, {"kind": "microvm", "kernel": "-", "root": "-"}]
    for spec in specs:
        name = " ".join(spec.get(key, "") for key in ("kind", "tool")).strip()
        if spec.get("tool") in ("crun", "runc") and not image:
            print(f"  -   {name}: name an image to try it, --image DIR")
            continue
        try:
            print(f"  ok  {describe(sandbox_of(spec))}")
        except (SandboxError, ConfigError) as error:
            print(f"  no  {name}: {error}")


def build(out: Path | None, debian: list[str], pypi: list[str], lock: Path | None) -> None:
    from rondel.runtime.sandbox.image_build import build_image

    if out is None:
        raise UserError("rondel sandbox image needs --out DIR, the folder of the image")
    if lock is not None and (debian or pypi):
        raise UserError("--lock names every package: leave out --debian and --pypi")
    began = time.perf_counter()
    digest = build_image(out, debian=debian, pypi=pypi, lock=lock)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {digest}, {size / 1e6:.0f} MB in {time.perf_counter() - began:.0f} s")
    print(f'next    sandbox = {{ kind = "container", image = "{out}" }} in task.env or task.reward')


def clean() -> None:
    from rondel.runtime.sandbox.leftovers import end_left_boxes, left_boxes
    from rondel.runtime.sandbox.machine import remove_dead_configs
    from rondel.runtime.sandbox.oci_runtime import remove_old_bundles
    from rondel.runtime.sandbox.providers import delete_box
    from rondel.runtime.sandbox.relay import remove_dead_relays
    from rondel.runtime.sandbox.snapshot import remove_dead_copies

    left = left_boxes()
    for _, row in left:
        print(f"{row['provider']} {row['name']} at {row['url']}")
    print(f"{end_left_boxes(delete_box)} of {len(left)} boxes ended")
    kinds = (remove_old_bundles, remove_dead_copies, remove_dead_configs, remove_dead_relays)
    removed = [path for remove in kinds for path in remove()]
    for path in removed:
        print(path)
    print(f"{len(removed)} temporary files and folders removed")
