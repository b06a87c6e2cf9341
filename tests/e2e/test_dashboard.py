"""The dashboard in a real browser: each view, each control, keys alone, both colour schemes, a
phone, hostile text, a run that grows, one of 10^6 events.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from kits.diagnose import JOB, evaluated, healthy
from kits.forked import Forked
from kits.run_folder import group
from kits.sweeps import covering
from rondel.core import events as words
from rondel.core.continuous_steps import ContinuousSteps
from rondel.core.types import Score, Trajectory
from rondel.runtime.journal.log import Journal
from rondel.runtime.journal.store import RolloutStore, annotate_step, write_step

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _long import write_long

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)"),
]

VIEWS = ("overview", "time", "books", "answers", "findings", "card", "planner")
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=2</script>'
CONTROLS = "#app a[href], #app button:not(:disabled), #app input, #app select, #app summary, #app [tabindex='0']"
LAG = 2


def step_events(step: int, spoken: str = "") -> list[words.Event]:
    """Of an asynchronous run with two groups of four a step."""
    version = step - 1
    groups = [
        group(2 * step - 2 + i, max(0, version - (step + i) % (LAG + 1)), [1.0, 0.0, None, 0.5]) for i in range(2)
    ]
    for g in groups:
        g.task.data["prompt"] = HOSTILE
        for t in g.trajectories:
            t.text = f"{HOSTILE} {step}"
    told = [
        words.GroupFinished(
            g.id, f"{spoken}{g.task.id}", g.born, True, "", g.rewards, [t.written for t in g.trajectories], 1, 1
        )
        for g in groups
    ]
    phases = {"wait": 2.0, "prepare": 0.1, "train": 1.5, "sync": 0.4}
    return [
        *(words.Admitted(g.id, g.task.id, g.born) for g in groups),
        *told,
        words.GroupsTaken(step, version, groups, LAG),
        words.WorkerTime("engine-0", {"generate": 3.0, "idle": 1.0}, {"tokens": 64.0}, [("generate", 2.0), ("idle", 1.0), ("generate", 1.0)],
                         {"rss": 3 << 30, "peak": 4 << 30, "weights": 1 << 20, "kv": 2 << 20, "critic": 0}),
        words.Synced(step, "abc", 0.4, 1 << 20, 1e-7, 0.01),
        words.Resident({"train": 4 << 30}, {"train": {"weights": 1 << 30, "moments": 2 << 30}}),
        words.StepDone(step, step, healthy(step, __import__("random").Random(step)), phases | {"step": 4.0},
                       {"issued": 2 * step + 3, "trained": 2 * step, "filtered/no <i>signal</i>": 1, "failed/timeout": 1, "in_flight": 1}),
    ]  # fmt: skip


class Growing:
    """A run folder that a test writes on."""

    def __init__(self, folder: Path, steps: int) -> None:
        import tomli_w

        self.folder, self.steps = folder, 0
        folder.mkdir(parents=True)
        job = JOB | {"loop": {"steps": 60, "max_staleness": LAG}, "place": {"kind": "split", "engines": 1}}
        (folder / "job.toml").write_text(tomli_w.dumps(job))
        self.journal = Journal(folder)
        self.journal.write(
            words.RunStarted(str(folder), "h", {"needs": [], "corrects": True, "loss": HOSTILE, "seed": 1})
        )
        self.journal.write(evaluated(0, 0.2))
        self.journal.write(words.Warned(f"slow disk {HOSTILE}"))
        for _ in range(steps):
            self.step()
        first = (2 * steps - 2, 0)
        annotate_step(folder, steps, trainer_logprobs={first: [-1.0] * 13}, advantages={first: [0.5] * 13})
        self.journal.write(evaluated(steps, 0.6))
        self.journal.write(words.Stalled(f"A waits for {HOSTILE}"))
        (folder / "checkpoints" / "step-000004").mkdir(parents=True)
        vocab = {f"w{i} ": i for i in range(999)} | {HOSTILE: 999}
        (folder / "checkpoints" / "step-000004" / "tokenizer.json").write_text(
            json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"},
                        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0 "}})
        )  # fmt: skip

    def step(self) -> None:
        self.steps += 1
        store = RolloutStore(self.folder)
        for event in step_events(self.steps):
            self.journal.write(event)
            store.write(event)
        store.close()


class Server:
    def __init__(self, *folders: Path) -> None:
        words = ["dashboard", *map(str, folders), "--port", "0"]
        self.process = Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        self.url = line.split()[1]

    def end(self) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    return Growing(base / "<b>first<", 12), Growing(base / "second", 9)


@pytest.fixture(scope="module")
def server(runs):
    server = Server(*(run.folder for run in runs))
    yield server
    assert server.end() == (0, "")


@pytest.fixture(scope="module")
def tab(browser):
    yield from opened(browser, "about:blank")


@pytest.fixture
def page(tab, server):
    """The same window for each test, in which the page begins anew."""
    tab.goto(server.url)
    tab.wait_for_selector("main#main")
    yield tab
    tab.unroute_all()
    tab.goto("about:blank")
    assert tab.faults == []


def opened(browser, url, **how):
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | how)
    page.set_default_timeout(60_000)
    page.faults = []
    page.on(
        "console",
        lambda m: (
            page.faults.append(m.text) if m.type in ("error", "warning") and "400 (Bad Request)" not in m.text else None
        ),
    )
    page.on(
        "response",
        lambda r: page.faults.append(f"{r.status} {r.url}") if r.status >= 400 and "/api/plan?" not in r.url else None,
    )  # there it is an answer
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on(
        "requestfailed",
        lambda r: (
            page.faults.append(f"{r.url} {r.failure}")
            if "news" not in r.url and "ABORTED" not in (r.failure or "")
            else None
        ),
    )
    page.goto(url)
    if url != "about:blank":
        page.wait_for_selector("main#main")
    yield page
    page.close()
    assert page.faults == []


def show(page, view: str) -> None:
    """The view, when it has what it asked for."""
    page.evaluate("name => { location.hash = `#/${name}` }", view)
    page.wait_for_selector(f"nav a[href='#/{view}'][aria-current]")
    page.wait_for_selector("main:not(:has(.loading))")


LOOKS = {
    "light on a desk": {"color_scheme": "light"},
    "dark on a phone": {"color_scheme": "dark", "viewport": {"width": 400, "height": 800}},
}
# every view in one of the two looks, by turns
BY_TURNS = [(view, list(LOOKS)[i % 2]) for i, view in enumerate(VIEWS)]


@pytest.mark.parametrize("pairs", covering(["by turns", "all"], ["by turns"]))
def test_no_violation_in_light_on_a_desk_and_in_dark_on_a_phone(browser, server, pairs):
    axe = (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    for look, how in LOOKS.items():
        for page in opened(browser, server.url, **how):
            page.evaluate(axe)
            for view in VIEWS:
                if pairs == "by turns" and (view, look) not in BY_TURNS:
                    continue
                show(page, view)
                found = page.evaluate(
                    "axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.target + ' ' + "
                    "n.failureSummary)]))"
                )
                assert found == [], (view, how)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                    f"{view} is wider than the window"
                )


def test_every_control_does_something_and_none_complains(page):
    used = 0
    for view in VIEWS:
        show(page, view)
        for at in range(200):
            page.wait_for_selector("main:not(:has(.loading))")
            controls = page.locator("main :is(button:not(:disabled), input, select, summary):visible")
            if at >= min(controls.count(), 20):  # twenty rows of a table do the same
                break
            control = controls.nth(at)
            kind = control.evaluate("e => e.tagName === 'INPUT' ? e.type : e.tagName.toLowerCase()")
            if kind in ("button", "summary", "checkbox", "radio"):
                control.click()
            elif kind == "range":
                control.press("ArrowRight")
            elif kind == "select":
                control.select_option(index=control.evaluate("e => e.options.length - 1"))
            else:
                control.fill("1" if kind == "number" else "s")
                control.press("Enter")
                control.fill("")
                control.press("Enter")
            used += 1
        page.wait_for_selector("main:not(:has(.loading))")
    assert used > 50
    show(page, "overview")
    chart = page.locator(".u-over").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 160, box["y"] + 40, steps=4)
    page.mouse.up()
    page.wait_for_selector("input[type=number][min='1']:not([value=''])")
    page.get_by_role("button", name="back").click()


def test_keys_alone_reach_every_control_and_the_focus_is_seen(page):
    for view in VIEWS:
        show(page, view)
        page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0) }")
        wanted = page.evaluate(
            "css => { const all = [...document.querySelectorAll(css)].filter(e => e.checkVisibility() && !(e.type === 'radio' && !e.checked));"
            "all.forEach((e, i) => e.dataset.stop = i); return all.length }", CONTROLS
        )  # fmt: skip
        reached = set()
        for _ in range(wanted + 3):
            page.keyboard.press("Tab")
            stop, seen = page.evaluate(
                "() => { const e = document.activeElement; return [e.dataset.stop, getComputedStyle(e).outlineStyle !== 'none'] }"
            )
            if stop is not None:
                assert seen, f"{view}: control {stop} has the focus and does not show it"
                reached.add(int(stop))
        assert len(reached) == wanted, f"{view}: {sorted(set(range(wanted)) - reached)} cannot be reached"
    show(page, "answers")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    assert page.text_content(".token").startswith("token 1 ")


def test_every_bar_has_its_width_and_its_own_colour(page):
    """One row for each phase and each worker, none empty; no two parts of a row alike."""
    show(page, "books")
    rows = page.evaluate(
        "[...document.querySelectorAll('main .account')].map(row => "
        "[row.querySelector('.who').firstChild.textContent.trim(),"
        "[...row.querySelectorAll('.stack > span')].map(s => [getComputedStyle(s).backgroundColor, "
        "s.getBoundingClientRect().width])])"
    )
    assert [name for name, _ in rows] == ["train", "engine-0"]
    for _, parts in rows:
        assert parts and all(width > 10 for _, width in parts) and len({colour for colour, _ in parts}) == len(parts)
    show(page, "time")
    keys = page.evaluate(
        "[...document.querySelectorAll('.accounts + .legend .key')].map(k => getComputedStyle(k).backgroundColor)"
    )
    assert len(keys) == len(set(keys)) > 3


def test_an_answer_stands_with_its_prompt(page):
    show(page, "answers")
    assert page.text_content("td.prompt").startswith("<img src=x")
    side = {"step": 1, "rows": [], "pick": 0, "text": ""}
    page.route("**/api/steps_of?*", lambda route: route.fulfill(json=[1]))  # no task comes twice in this run
    page.route(
        "**/api/beside?*",
        lambda route: route.fulfill(json={"task": "t", "prompt": "3 + 4 =", "sides": [side, side], "diff": []}),
    )
    page.get_by_role("button", name="look for it").click()
    assert page.locator("[aria-label='the prompt']").text_content(timeout=5000) == "3 + 4 ="


def test_an_episode_is_seen(browser, tmp_path):
    """An answer that is an episode in a world is clicked, and its frames are there."""
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: rondel[control]")
    pytest.importorskip("pygame", reason="pip install pygame-ce")
    world, rows = gymnasium.make("CartPole-v1"), []
    seen = world.reset(seed=5)[0]
    for action in (0, 1) * 8:
        rows.append([*seen, action])
        seen = world.step(action)[0]
    g = group(0, 0, [1.0, 16.0])
    g.task.data.update({"world": "CartPole-v1", "seed": 5})
    episode = g.trajectories[1] = Trajectory(score=Score(16.0), text="16 steps")
    episode.extend([0])
    steps = ContinuousSteps(np.array(rows, np.float32), observed=4)
    episode.extend([0] * 16, logprobs=[-0.5] * 16, versions=[0] * 16, steps=steps)
    run = Growing(tmp_path / "run", 1)
    write_step(run.folder, 1, [g])
    server = Server(run.folder)
    try:
        for page in opened(browser, server.url):
            show(page, "answers")
            assert page.locator("img.frames").count() == 0
            page.locator("tbody tr").nth(1).click()
            frames = page.get_by_role("img", name="frames of the episode, from its first observation to its last")
            frames.wait_for()
            assert frames.evaluate("e => e.decode().then(() => [e.naturalWidth, e.naturalHeight])") == [
                8 * 151 + 1,
                102,
            ]
    finally:
        assert server.end() == (0, "")


def test_seven_runs_over_each_other_are_told_apart(browser, tmp_path):
    """Names that are too long are cut, no head of a chart is, and the badge counts what the views of the runs list."""
    from kits.diagnose import FAULTS, write

    names = ["a" * 120, *(f"run-{i}" for i in range(6))]
    for i, name in enumerate(names):
        write(tmp_path / name, **FAULTS["held out falls, trained rises"][0] if i == 1 else {})
    server = Server(*(tmp_path / name for name in names))
    try:
        for page in opened(browser, server.url):
            page.wait_for_selector("nav .count")
            show(page, "overview")
            page.wait_for_selector(".chart canvas")
            assert (
                page.evaluate(
                    "Math.max(...[...document.querySelectorAll('header .run-name')].map(e => "
                    "e.getBoundingClientRect().width))"
                )
                < 260
            )
            assert page.evaluate(
                "[...document.querySelectorAll('.chart .name')].every(e => e.scrollWidth <= e.clientWidth + 1)"
            )
            looks = page.evaluate(
                "[...document.querySelectorAll('header .dot')].map(e => getComputedStyle(e).backgroundColor + "
                "e.className)"
            )
            assert len(set(looks)) == 7
            drawn = page.evaluate(
                "[...document.querySelector('.tile .sparks').querySelectorAll('polyline')].map(p => "
                "p.getAttribute('points'))"
            )
            tops = [min(float(point.split(",")[1]) for point in line.split()) for line in drawn]
            assert len(tops) == 7 and min(tops) == 2.0 < max(tops), "the sparks of a tile share one scale"
            badge = int(page.text_content("nav .count"))
            show(page, "findings")
            listed = 0
            for i in range(7):
                page.locator("fieldset.which input").nth(i).check()
                page.wait_for_selector("main:not(:has(.loading))")
                listed += page.locator(".findings > li").count()
            assert badge == listed == 1
    finally:
        server.end()


def test_what_a_run_wrote_is_only_text(page):
    seen = {"overview": "<b>first<", "books": "no <i>signal</i>", "findings": HOSTILE, "card": HOSTILE, "answers": "w"}
    for view in VIEWS:
        show(page, view)
        assert seen.get(view, "") in page.text_content("body")
        assert page.evaluate(
            "[window.pwned, document.querySelectorAll('#app img, #app script, #app i:not([style]):not([class]), #app b "
            "b').length]"
        ) == [None, 0]
    show(page, "answers")
    page.get_by_role("button", name="look for it").click()
    page.locator(".detail").get_by_text("None of the steps").wait_for()
    page.get_by_label("gap of log-probabilities").check()
    page.get_by_label("version").check()
    assert page.evaluate("window.pwned") is None


def test_a_step_that_is_done_appears_by_itself(page, runs):
    show(page, "overview")
    for _ in range(3):
        before = runs[0].steps
        runs[0].step()
        page.locator(f".runs li:first-child :text('step {before + 1} of')").wait_for()
    show(page, "answers")
    assert page.locator("main input[type=number]").first.input_value() == str(runs[0].steps)


def test_a_fallen_connection_is_said_and_mends(browser, runs, tmp_path):
    server = Server(runs[1].folder)
    port = server.url.rsplit(":", 1)[1]
    page = browser.new_page()
    page.goto(server.url)
    page.get_by_text("live", exact=True).wait_for()
    assert server.end() == (0, "")
    page.get_by_text("connection lost").wait_for()
    again = Forked(["dashboard", runs[1].folder, "--port", port])
    page.get_by_text("live", exact=True).wait_for()
    page.close()
    again.send_signal(signal.SIGTERM)
    assert again.wait(60) == 0


def test_without_a_run_the_planner_opens(browser):
    server = Server()
    for page in opened(browser, server.url):
        page.locator(".headline").wait_for()
        before = page.text_content(".headline")
        page.get_by_label("devices").first.press("ArrowRight")
        page.locator(".headline:has-text('32 ×')").wait_for()
        assert page.text_content(".headline") != before
        page.evaluate("location.hash = '#/overview'")
        page.get_by_text("No run is open").wait_for()
    assert server.end() == (0, "")


def test_a_long_run_opens_at_once(browser, tmp_path, capsys):
    """By a sample of its steps; the whole follows. `rondel bench dashboard` measures a million events."""
    server = Server(write_long(tmp_path / "long", 50_000))
    page = browser.new_page()
    began = time.monotonic()
    page.goto(server.url, wait_until="commit")
    page.wait_for_selector(".chart canvas")
    seconds = time.monotonic() - began
    assert "step 1,315 of 1,315" in page.text_content(".runs")
    points = page.evaluate(
        "fetch('/api/series?name=train/entropy&points=300').then(r => r.json()).then(r => r.x.length)"
    )
    assert points <= 300
    page.close()
    with capsys.disabled():
        print(f"\n50,000 events: first curves after {seconds:.2f} s")
    assert server.end() == (0, "")
