// The frame: who is here, which view, whether the server is. Views are functions of what it tells.
import { Component, render } from "/vendor/preact.mjs";
import { Answers } from "./answers.js";
import { Books } from "./books.js";
import { Card } from "./card.js";
import { ask, html, listen } from "./data.js";
import { Findings } from "./findings.js";
import { dot, plain } from "./format.js";
import { Overview } from "./overview.js";
import { Planner } from "./planner.js";
import { Time } from "./time.js";

const VIEWS = {
  overview: ["Overview", Overview], time: ["Time", Time], books: ["Lag, ledger, memory", Books], answers: ["Answers", Answers],
  findings: ["Findings", Findings], card: ["Card", Card], planner: ["Planner", Planner],
};
const OF_ONE = new Set(["time", "books", "answers", "findings", "card"]); // views of one run at a time

class App extends Component {
  state = { runs: null, metrics: [], lost: false, view: here(), run: 0, error: "" };
  componentDidMount() {
    addEventListener("hashchange", () => { this.setState({ view: here() }); scrollTo(0, 0); });
    this.told();
    listen(runs => { this.setState({ runs }); this.names(); }, lost => this.state.lost !== lost && this.setState({ lost }));
  }
  async told() {
    try {
      const { runs, metrics } = await ask("state");
      this.asked = performance.now();
      this.setState({ runs, metrics, view: !runs.length && !location.hash ? "planner" : this.state.view });
    } catch (error) { this.setState({ error: error.message }); }
  }
  async names() {
    if (performance.now() - (this.asked ?? 0) < 5000) return;
    this.asked = performance.now();
    try { this.setState({ metrics: (await ask("state")).metrics }); } catch { this.asked = 0; }
  }
  render(_, { runs, metrics, lost, view, run, error }) {
    if (error) return html`<main class="page"><p class="note error" role="alert">${error}</p></main>`;
    if (!runs) return html`<main class="page"><p class="loading">reading …</p></main>`;
    const View = VIEWS[view][1], now = Math.min(run, Math.max(0, runs.length - 1));
    document.title = `${runs.map(r => r.name).join(", ") || "Planner"} · Rondel`;
    const alarms = runs.reduce((n, r) => n + found(r), 0), grave = runs.some(r => r.alarms.error + r.alarms.warning);
    return html`<a class="skip" href="#main" onClick=${e => { e.preventDefault(); document.getElementById("main").focus(); }}>to the content</a>
      <header>
        <h1><a href="#/overview">Rondel</a></h1>
        <ul class="runs" aria-label="runs">${runs.map((r, i) => html`<li><span class=${dot(i)}></span><b class="run-name" title=${r.folder}>${r.name}</b>
          <span class=${`state ${r.state.split(" ")[0]}`}>${r.state === "reading" ? `reading ${Math.floor(100 * r.read)} %${r.sampled ? `, ${r.sampled} steps shown` : ""}` : r.state}</span>
          <span class="steps">step ${plain(r.step)}${r.planned ? ` of ${plain(r.planned)}` : ""}${r.warm && r.step < r.warm ? ", supervised" : ""}</span></li>`)}</ul>
        <p class="link" role="status">${lost ? html`<span class="down">connection lost, trying again</span>` : html`<span class="up">live</span>`}</p>
        <nav aria-label="views">${Object.entries(VIEWS).map(([key, [title]]) => html`<a href=${`#/${key}`} aria-current=${key === view ? "page" : undefined}>${title}${key === "findings" && alarms ? html` <span class=${`count${grave ? "" : " mild"}`}>${alarms}</span>` : ""}</a>`)}</nav>
      </header>
      <main id="main" class="page" tabindex="-1">
        ${OF_ONE.has(view) && runs.length > 1 ? html`<fieldset class="which"><legend>run</legend>${runs.map((r, i) => html`<label><input type="radio" name="run" checked=${i === now} onChange=${() => this.setState({ run: i })} /><span class=${dot(i)}></span><span class="run-name" title=${r.folder}>${r.name}</span>${view === "findings" ? html` <span class="hint">${found(r)}</span>` : ""}</label>`)}</fieldset>` : ""}
        <${View} key=${view} runs=${runs} run=${now} of=${runs[now]} metrics=${metrics} tick=${ticked(runs)} />
      </main>`;
  }
}

const found = r => r.alarms.error + r.alarms.warning + r.alarms.note; // as many as the view lists
const here = () => { const name = location.hash.replace("#/", ""); return name in VIEWS ? name : "overview"; };
const ticked = runs => runs.map(r => `${r.state === "reading" ? "" : r.changes}.${r.state}`).join();

render(html`<${App} />`, document.getElementById("app"));
