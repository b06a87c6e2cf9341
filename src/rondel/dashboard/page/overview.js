// The headline and the curves: every run over the same steps.
import { Component } from "/vendor/preact.mjs";
import { Chart, Spark } from "./chart.js";
import { empty, html, Load } from "./data.js";
import { DASH, dot, number, title } from "./format.js";

const GROUPS = [
  ["Learning", ["score/reward_mean", "eval/score", "filter/signal_fraction", "filter/dropped_fraction"]],
  ["Policy", ["train/entropy", "train/kl_to_start", "train/grad_norm", "train/clip_fraction", "train/lr", "train/loss"]],
  ["Engine against trainer", ["train/gap_max", "train/mismatch_k3", "train/mismatch_ess_token", "loop/lag_mean", "loop/lag_max", "sync/probe_gap"]],
  ["Answers", ["generate/length_mean", "generate/length_p95", "generate/truncated_fraction", "score/failed_fraction", "generate/repetition", "score/length_correlation", "episode/drift_share", "episode/out_of_budget_share"]],
  ["Speed", ["time/step", "loop/tokens_per_second", "sync/seconds", "time/wait"]],
];
const LABELS = {
  "score/reward_mean": "reward", "eval/score": "eval", "filter/signal_fraction": "signal", "filter/dropped_fraction": "dropped by a filter",
  "train/kl_to_start": "KL to the start", "train/gap_max": "engine gap, largest", "train/mismatch_k3": "engine gap, K3", "train/mismatch_ess_token": "effective sample size",
  "loop/lag_mean": "lag, mean", "loop/lag_max": "lag, largest", "sync/probe_gap": "gap on the probe after sync", "generate/length_mean": "length, mean",
  "generate/length_p95": "length, p95", "generate/truncated_fraction": "truncated", "score/failed_fraction": "reward failed", "score/length_correlation": "reward with length",
  "episode/drift_share": "drift from the template", "episode/out_of_budget_share": "out of budget",
  "time/step": "a step", "time/wait": "the learner waits", "sync/seconds": "sync", "loop/tokens_per_second": "tokens a second",
};
const MISSING = {
  eval: "set task.data.holdout", kl: "not measured", lag: "no group trained yet", gap: "not recomputed", entropy: "not measured",
};

export class Overview extends Component {
  state = { first: "", last: "", more: [] };
  names() { return [...new Set([...GROUPS.flatMap(([, names]) => names), ...this.state.more])]; }
  zoom = (first, last) => this.setState({ first, last });
  render({ runs, metrics, tick }, { first, last, more }) {
    if (!runs.length) return empty("No run is open", "rondel dashboard runs/a runs/b draws runs over each other. The planner opens without any.");
    if (runs.every(run => !run.steps)) return html`<${Headline} runs=${runs} tick=${tick} />${empty("No step yet", "Curves appear with the first step that is done; the page follows by itself.")}`;
    const warm = Math.min(...runs.map(run => run.warm)), end = Math.max(...runs.map(run => run.step));
    const from = first === "" ? (warm && warm < end ? warm + 1 : 1) : first, to = last === "" ? undefined : last;
    const known = new Map(metrics.map(m => [m.name, m]));
    const rest = metrics.filter(m => !this.names().includes(m.name));
    return html`<${Headline} runs=${runs} tick=${tick} />
      <form class="bar" onSubmit=${e => e.preventDefault()}>
        <label>steps <input type="number" min="1" max=${end} placeholder=${from} value=${first} onChange=${e => this.setState({ first: whole(e.target.value) })} /></label>
        <label>to <input type="number" min="1" placeholder=${end} value=${last} onChange=${e => this.setState({ last: whole(e.target.value) })} /></label>
        <button type="button" onClick=${() => this.setState({ first: 1, last: "" })}>all${warm ? ", supervised steps too" : ""}</button>
        <button type="button" disabled=${first === "" && last === ""} onClick=${() => this.setState({ first: "", last: "" })}>back</button>
        <span class="hint">drag over a chart to zoom</span>
        <label class="right">another metric <select value="" onChange=${e => e.target.value && this.setState({ more: [...more, e.target.value] })}>
          <option value="">choose …</option>${rest.map(m => html`<option value=${m.name}>${m.name}</option>`)}</select></label>
      </form>
      <${Load} path="series" words=${{ name: this.names(), first: from, last: to, points: 300 }} tick=${tick} high=${900}>${data =>
        [...(more.length ? [["Chosen", more]] : []), ...GROUPS].map(([group, names]) => {
          const there = names.filter(name => data.runs.some(curves => curves[name]));
          return there.length ? html`<section><h2>${group}</h2><div class="charts">${there.map(name => html`<${Chart} key=${name} soon=${GROUPS[0][1].includes(name)} id=${`chart-${name.replace("/", "-")}`} label=${LABELS[name] ?? title(name)} unit=${known.get(name)?.unit ?? ""}
            about=${`${name}: ${known.get(name)?.meaning ?? ""}`} x=${data.x} series=${curves(data, runs, name)} zoom=${this.zoom} />`)}</div></section>` : "";
        })}<//>`;
  }
}

function curves(data, runs, name) {
  const drawn = [];
  data.runs.forEach((of, run) => { if (of[name]) drawn.push({ run, name, title: runs[run]?.name, ...of[name] }); });
  return drawn;
}

const whole = text => (text === "" ? "" : Math.max(1, Math.round(Number(text)) || 1));

function Headline({ runs, tick }) {
  const keys = Object.keys(runs[0].head);
  const names = keys.map(key => runs[0].head[key].metric);
  const warm = Math.min(...runs.map(run => run.warm));
  return html`<${Load} path="series" words=${{ name: names, points: 60, first: warm + 1 }} tick=${tick} rest=${1500} high=${112}>${data => html`<ul class="tiles">${keys.map(key => {
    const reading = runs.some(run => run.state === "reading");
    const worst = runs.map(run => run.head[key]).find(h => h.alarm === "error") ?? runs.map(run => run.head[key]).find(h => h.alarm) ?? runs[0].head[key];
    return html`<li class=${`tile ${worst.alarm}`}><button type="button" onClick=${() => show(worst.metric)} title="to its chart">
      <span class="name">${worst.title}</span>
      ${runs.map((run, i) => html`<span class="big"><span class=${runs.length > 1 ? dot(i) : ""}></span>${value(run.head[key], key)}</span>`)}
      <span class="under" title=${worst.why.length ? `${runs[runs.findIndex(run => run.head[key] === worst)].name}: ${worst.why.join(", ")}` : ""}>${worst.alarm ? html`<b>${worst.alarm === "error" ? "✕" : "▲"} ${worst.why[0]}</b>` : runs.every(run => run.head[key].value === null) ? (runs.every(run => run.step <= run.warm) && key !== "eval" ? "supervised so far" : reading ? "still reading" : MISSING[key] ?? "no number yet") : key === "lag" && worst.limit !== null && runs.length === 1 ? `limit ${number(worst.limit)}` : worst.k3 && runs.length === 1 ? `K3 ${number(worst.k3.now)}, bound ${number(worst.k3.bound)}` : ["share", "number", "reward"].includes(worst.unit) ? " " : worst.unit}</span>
      <span class="sparks">${data.runs.map((of, i) => of[worst.metric] && html`<${Spark} values=${of[worst.metric].mean} all=${data.runs.flatMap(one => one[worst.metric]?.mean ?? [])} run=${i} />`)}</span></button></li>`;
  })}</ul>`}<//>`;
}

const value = (head, key) => (head.value === null ? DASH : key === "lag" && head.limit !== null ? `${number(head.value)} / ${number(head.limit)}` : number(head.value, head.unit));

function show(metric) {
  const chart = document.getElementById(`chart-${metric.replace("/", "-")}`);
  chart?.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}
