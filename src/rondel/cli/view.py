"""rondel view: the trajectories of a run, in the terminal or as one web page that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rondel.core.types import DATA, GREEDY, POLICY
from rondel.system.files import checkpoints_in, write_text
from rondel.text.unicode import visible_text


def run(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[int | None, typer.Option("--step", help="Which step; the last one when left out.")] = None,
    group: Annotated[int | None, typer.Option("--group", help="Only the group with this number.")] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="Only rewards of at least this.")] = None,
    max_reward: Annotated[float | None, typer.Option("--max-reward", help="Only rewards of at most this.")] = None,
    errors: Annotated[
        bool, typer.Option("--errors", help="Only what failed: reward, environment, or a broken rule.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many to show in the terminal.")] = 16,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a web page instead.")] = None,
    png: Annotated[
        str | None,
        typer.Option(
            "--png",
            metavar="FILE",
            help="Write the images that a flow drew, or frames of episodes in a world, instead.",
        ),
    ] = None,
) -> None:
    """Show what the policy read and wrote."""
    from rondel.cli.episode_frames import FRAMES, acted_steps, actions_per_step, frame_grid, picture_shape
    from rondel.cli.page import render_page
    from rondel.cli.point_coverage import describe_coverage
    from rondel.core.errors import UserError
    from rondel.runtime.journal.log import journal_of, read_recipe
    from rondel.runtime.journal.store import read_step, stored_steps
    from rondel.runtime.telemetry.drawn_images import image_grid, write_png

    stored = stored_steps(folder)
    if not stored:
        journal_of(folder)
    if step is None and stored:
        step = stored[-1]
    rows = read_step(folder, 1 if step is None else step)
    if group is not None and group not in (numbers := sorted({row["group"] for row in rows})):
        raise UserError(f"step {step} has no group {group}; it has {', '.join(map(str, numbers))}")
    chosen = [r for r in rows if _matches_filter(r, group, min_reward, max_reward, errors)]
    if png is not None and (acted := [row for row in chosen if acted_steps(row) is not None][:limit]):
        recipe = read_recipe(folder)
        pictures = picture_shape(folder, recipe)
        write_png(png, frame_grid(acted, actions_per_step(folder, recipe), pictures))
        how = "which were played again and showed the same" if pictures is None else "as the policy read them"
        print(f"{png}: at most {FRAMES} frames of each of {len(acted)} episodes of step {step}, {how}")
        return
    if png is not None:
        write_png(png, image_grid(chosen))
        print(f"{png}: the images of {len(chosen)} trajectories of step {step}\n{describe_coverage(chosen)}".rstrip())
        return
    read_tokens = load_tokenizer(Path(folder))
    supervised = step is not None and step <= supervised_steps(Path(folder))
    cards = [trajectory_view(row, read_tokens, supervised=supervised) for row in chosen]
    if html is not None:
        write_text(html, render_page(f"{folder}, step {step}", cards))
        print(f"{html}: {len(cards)} trajectories of step {step}; open it in a browser")
        return
    _print_cards(cards[:limit])
    shown = min(limit, len(cards))
    others = f"; --step shows others ({stored[0]} to {stored[-1]} are stored)" if len(stored) > 1 else ""
    print(
        f"{shown} of {len(rows)} trajectories of step {step}"
        + (f", {len(cards)} match" if len(cards) < len(rows) else "")
        + others
    )
    if coverage := describe_coverage(chosen):
        print(coverage)


def _matches_filter(
    row: dict[str, Any], group: int | None, low: float | None, high: float | None, errors: bool
) -> bool:
    reward = row["reward"]
    return (
        (group is None or row["group"] == group)
        and (low is None or (reward is not None and reward >= low))
        and (high is None or (reward is not None and reward <= high))
        and (not errors or row["failed"] is not None or row["outcome"] != "ok")
    )


def supervised_steps(folder: Path) -> int:
    """How many steps of a run copy the tasks' own answers: loop.warmup.steps."""
    from rondel.runtime.journal.log import read_recipe

    warmup = read_recipe(folder).get("loop", {}).get("warmup", {})
    return int(warmup.get("steps", 0)) if isinstance(warmup, dict) else 0


def trajectory_view(row: dict[str, Any], read_tokens: Any = None, *, supervised: bool = False) -> dict[str, Any]:
    """What both views show of one row: title, facts, and pieces of text with who wrote
    them: [(True, "12"), (False, "...")].
    """
    told = (
        "the task's own answer, not scored"
        if supervised
        else "no reward"
        if row["reward"] is None
        else f"reward {row['reward']:g}"
    )
    facts = [
        f"group {row['group']}",
        f"sample {row['sample']}",
        told,
        f"{sum(row['mask'])} tokens {'shown' if supervised else 'written'}",
        f"finish {row['finish_reason']}",
    ]
    if row["agent"]:
        own = row["policy"] in (POLICY, DATA, GREEDY, row["agent"])
        facts.insert(2, row["agent"] if own else f"{row['agent']}, played by {row['policy']}")
    if row["parent"] is not None:
        facts.insert(2, f"branch of {row['parent']}")
    if not supervised and (distance := logprob_gap(row)) is not None:
        facts.append(f"gap {distance:.1e}")
    if not supervised and row["trained_at"] is not None:
        facts.append(f"lag {row['trained_at'] - row['born']}")
    if len(row["reward_parts"]) > 1:
        facts.append(", ".join(f"{name} {value:g}" for name, value in row["reward_parts"].items()))
    if row["failed"] is not None:
        facts.append(f"reward failed: {row['failed']} {row['failed_detail'] or ''}".strip())
    if row["outcome"] != "ok":
        facts.append(f"{row['outcome'].replace('_', ' ')}: {row['outcome_reason']}")
    if drift := row["drift"]:
        facts.append(f"drift ({drift['kind']}) from token {drift['at']}, in turn {drift['turn']}")
    return {
        "task": row["task"],
        "facts": facts,
        "pieces": token_pieces(row, read_tokens),
        "answer": row["task_data"].get("answer"),
    }


def logprob_gap(row: dict[str, Any]) -> float | None:
    """Largest |log p(trainer) - log p(engine)| over what the policy wrote; None if the trainer's side is not stored."""
    if row["trainer_logprobs"] is None:
        return None
    both = zip(row["mask"], row["trainer_logprobs"], row["behavior_logprobs"])
    return max((abs(trainer - engine) for written, trainer, engine in both if written), default=0.0)


def token_pieces(row: dict[str, Any], read_tokens: Any) -> list[tuple[bool, str]]:
    """Token by token where the run folder has a tokenizer, else the task's prompt and the stored text."""
    if read_tokens is None:
        return [(False, prompt_text(row["task_data"])), (True, _describe_answer(row))]
    from itertools import groupby

    sees = [-1] * len(row["tokens"])
    for i, place in enumerate(row["media"]):
        sees[place.start : place.end] = [i] * place.image.tokens
    out: list[tuple[bool, str]] = []
    for (written, i), run in groupby(zip(row["mask"], sees, row["tokens"]), key=lambda token: token[:2]):
        if (
            written and row["steps"] is not None and row["steps"].dtype == "float32"
        ):  # its tokens are the numbers of steps
            text = _describe_answer(row)
        else:
            text = row["media"][i].image.name if i >= 0 else read_tokens([token for _, _, token in run])
        out = [*out[:-1], (written, out[-1][1] + text)] if out and out[-1][0] == written else [*out, (written, text)]
    return out


def _describe_answer(row: dict[str, Any]) -> str:
    """The point that a flow drew: an image in characters where it is one, else its first numbers."""
    from rondel.runtime.telemetry.drawn_images import as_image, draw_as_text, last_point

    point = last_point(row)
    image = None if point is None else as_image(point)
    return str(row["text"]) if image is None else f"\n{draw_as_text(image)}\n"


def prompt_text(data: dict[str, Any]) -> str:
    from rondel.core.media import message_text

    if "messages" in data:
        return "\n".join(f"{m.get('role', '')}: {message_text(m.get('content', ''))}" for m in data["messages"])
    return str(data.get("prompt", data))


def tokenizer_file(folder: Path) -> Path | None:
    """That of the newest checkpoint which has one."""
    files = [
        file for path in checkpoints_in(folder / "checkpoints").values() if (file := path / "tokenizer.json").is_file()
    ]
    return files[-1] if files else None


def load_tokenizer(folder: Path) -> Any:
    """ids -> text by the newest checkpoint's tokenizer.json, or None."""
    if (file := tokenizer_file(folder)) is None:
        return None
    try:
        from tokenizers import Tokenizer  # what transformers uses; importing it alone is a hundred times faster

        known = Tokenizer.from_file(str(file))
    except Exception as error:
        print(f"note: {file} cannot be read ({error}); showing the stored text instead")
        return None
    return lambda ids: known.decode(ids, skip_special_tokens=False)


def _print_cards(cards: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for card in cards:
        console.print(
            Text(visible_text(f"{card['task']}  "), style="bold") + Text(visible_text(" · ".join(card["facts"]))),
            soft_wrap=True,
        )
        body = Text()
        for written, text in card["pieces"]:
            body.append(
                visible_text(text) + "\n" * (not written and not text.endswith("\n")),
                style="green" if written else "dim",
            )
        console.print(body, soft_wrap=True)
        if card["answer"] is not None:
            console.print(Text(visible_text(f"answer: {card['answer']}"), style="dim"), soft_wrap=True)
        console.print()
