// Where the time goes: every worker's account, which is 100 %, and the newest steps as the five stages saw them.
import { Component } from "/vendor/preact.mjs";
import { empty, html, Load, note } from "./data.js";
import { number, percent, seconds } from "./format.js";

const ORDER = ["generate", "score", "annotate", "prepare", "train", "step", "publish", "send", "sync", "hand_over", "move", "milestone", "save", "load", "held", "asleep", "refusing", "wait", "idle"];
const by = kind => (ORDER.includes(kind) ? ORDER.indexOf(kind) : ORDER.length);
const css = kind => (ORDER.includes(kind) ? `k-${kind}` : "k-other");

export class Time extends Component {
  state = { steps: 4 };
  render({ of, run, tick, runs }, { steps }) {
    if (!of.steps) return empty("No step yet", "Accounts are told with each step.");
    return html`<${Load} key=${run} path="time" words=${{ run, steps, first: of.warm && of.warm < of.step ? of.warm + 1 : 1, last: of.step }} tick=${tick} high=${500}>${data => html`
      <section><h2>Of every worker, 100 %</h2>
        <p class="hint">${of.sampled ? `from ${of.sampled} steps, while the whole is read` : `${seconds(data.seconds)} of steps${of.warm ? " after the supervised phase" : ""}`}</p>
        <${Accounts} accounts=${data.accounts} /></section>
      <section><h2>The newest steps, stage by stage</h2>
        <form class="bar" onSubmit=${e => e.preventDefault()}><label>steps shown <input type="range" min="1" max="30" value=${steps} aria-valuetext=${`${steps} steps`} onInput=${e => this.setState({ steps: Number(e.target.value) })} /></label><output>${steps}</output></form>
        ${data.timeline ? html`<${Timeline} told=${data.timeline} kinds=${data.kinds} />` : of.state === "reading" ? note("Drawn when the whole journal has been read.") : empty("Nothing to draw", "The journal holds no step near its end.")}</section>
      <section><h2>The same as numbers</h2><${Numbers} accounts=${data.accounts} kinds=${data.kinds} /></section>`}<//>`;
  }
}

const seenIn = accounts => [...new Set(accounts.flatMap(a => Object.keys(a.shares)))].sort((a, b) => by(a) - by(b));
const called = worker => (worker === "controller" ? "the learner's path" : worker);

function Accounts({ accounts }) {
  if (!accounts.length) return empty("No account", "Engines of others keep none.");
  const seen = seenIn(accounts);
  return html`<div class="accounts">${accounts.map(a => html`<div class="account"><span class="who">${called(a.worker)}</span>
      <div class="stack" role="img" aria-label=${`${a.worker}: ${Object.entries(a.shares).map(([k, s]) => `${k} ${percent(s)}`).join(", ")}`}>${seen.filter(k => a.shares[k]).map(k => html`<span class=${css(k)} style=${{ width: `${100 * a.shares[k]}%` }} title=${`${k} ${percent(a.shares[k])}`}></span>`)}</div></div>`)}</div>
    <p class="legend">${seen.map(k => html`<span><span class=${`key ${css(k)}`}></span>${k.replace("_", " ")}</span>`)}</p>`;
}

function Numbers({ accounts, kinds }) {
  const seen = seenIn(accounts);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="accounts as numbers"><table class="numbers narrow"><thead><tr><th>share of its time</th>${accounts.map(a => html`<th class="n">${called(a.worker)}</th>`)}</tr></thead>
      <tbody>${seen.map(k => html`<tr><th scope="row" title=${kinds[k] ?? ""}><span class=${`key ${css(k)}`}></span>${k.replace("_", " ")} <span class="hint">${kinds[k] ?? ""}</span></th>${accounts.map(a => html`<td class="n">${a.shares[k] ? percent(a.shares[k]) : ""}</td>`)}</tr>`)}
      <tr class="sum"><th scope="row">together</th>${accounts.map(a => html`<td class="n">${percent(Object.values(a.shares).reduce((x, y) => x + y, 0))}</td>`)}</tr></tbody></table></div>`;
}

// Lanes from the top: who generates, what was scored and filtered, what waits in the buffer, who trains, what syncs.
function Timeline({ told }) {
  const { tracks, groups, steps } = told;
  const begin = Math.min(...steps.map(([, at]) => at), ...Object.values(tracks).flatMap(t => t.slice(0, 1).map(([, at]) => at)));
  const span = Math.max(1e-6, told.seconds - begin), x = at => Math.max(0, (1000 * (at - begin)) / span), w = s => Math.max(0.6, (1000 * s) / span);
  const learner = tracks.controller ?? [], workers = Object.keys(tracks).filter(name => name !== "controller").sort();
  const engines = workers.filter(name => name.startsWith("engine")), trainers = workers.filter(name => !name.startsWith("engine"));
  const syncs = learner.filter(([kind]) => kind === "sync"), rest = learner.filter(([kind]) => kind !== "sync");
  const ends = groups.filter(([, , what]) => what !== "in the buffer" && what !== "trained" && what !== "unfinished");
  const kept = ends.filter(([, , what]) => what === "kept"), buffered = groups.filter(([, , what]) => what === "in the buffer");
  const lane = slices => slices.map(([kind, at, s]) => html`<rect class=${css(kind)} x=${x(at)} y="1" width=${w(s)} height="18"><title>${kind.replace("_", " ")} ${seconds(s)}</title></rect>`);
  const lanes = [
    ...engines.map((name, i) => [i ? "" : "Generate", name, lane(tracks[name])]),
    ...(engines.length ? [] : [["Generate", "the learner waits for it", lane(rest.filter(([kind]) => kind === "wait"))]]),
    ["Score", "mean reward of a group", ends.map(([, at, what, reward]) => reward !== null && html`<rect class="k-score" x=${x(at)} y=${19 - 16 * Math.min(1, Math.max(0.06, reward))} width="1.6" height=${16 * Math.min(1, Math.max(0.06, reward))}><title>reward ${number(reward)}</title></rect>`)],
    ["Filter", `${kept.length} kept, ${ends.length - kept.length} not`, ends.map(([, at, what]) => html`<rect class=${what === "kept" ? "k-kept" : "k-dropped"} x=${x(at)} y=${what === "kept" ? 11 : 1} width="1.6" height="8"><title>${what}</title></rect>`)],
    ["", "in the buffer", buffered.length ? html`<path class="k-buffer" d=${filled(buffered, x)}><title>groups that wait to be trained, at most ${most(buffered)}</title></path>` : ""],
    ["Train", "the learner", lane(engines.length ? rest : rest.filter(([kind]) => kind !== "wait"))],
    ...trainers.map(name => ["", name, lane(tracks[name])]),
    ["Sync", "weights to the engines", lane(syncs)],
  ];
  const seen = [...new Set(Object.values(tracks).flatMap(t => t.map(([kind]) => kind)))].sort((a, b) => by(a) - by(b));
  return html`<div class="timeline" role="img" aria-label=${`${steps.length} steps over ${seconds(span)}`}>
    <div class="lane ruler"><span></span><div>${steps.filter((_, i) => i % Math.ceil(steps.length / 8) === 0).map(([name, at]) => html`<i style=${{ left: `${x(at) / 10}%` }}>${name}</i>`)}</div></div>
    ${lanes.map(([stage, who, drawn]) => html`<div class="lane"><span><b>${stage}</b><small>${who}</small></span><svg viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true">${steps.map(([, at]) => html`<line class="mark" x1=${x(at)} x2=${x(at)} y1="0" y2="20" />`)}${drawn}</svg></div>`)}
    <div class="lane ruler"><span></span><div><i class="end">${seconds(span)}</i></div></div></div>
    <p class="legend">${seen.map(kind => html`<span><span class=${`key ${css(kind)}`}></span>${kind.replace("_", " ")}</span>`)}<span><span class="key k-kept"></span>kept</span><span><span class="key k-dropped"></span>dropped or failed</span></p>`;
}

function moves(groups) { return groups.flatMap(([a, b]) => [[a, 1], [b, -1]]).sort((p, q) => p[0] - q[0] || p[1] - q[1]); }
function most(groups) { let n = 0, top = 1; for (const [, d] of moves(groups)) top = Math.max(top, (n += d)); return top; }
function filled(groups, x) {
  const top = most(groups);
  let n = 0, path = "M0 20";
  for (const [at, d] of moves(groups)) { path += `L${x(at).toFixed(1)} ${20 - (18 * n) / top}`; n += d; path += `L${x(at).toFixed(1)} ${20 - (18 * n) / top}`; }
  return `${path}L1000 20Z`;
}
