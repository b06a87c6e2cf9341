// How old what is trained is, what became of every group, and who holds the memory.
import { empty, html, Load } from "./data.js";
import { bytes, percent, plain } from "./format.js";

export function Books({ of, run, tick }) {
  if (!of.steps) return empty("No step yet", "The ledger is told with each step.");
  return html`<${Load} key=${run} path="books" words=${{ run, first: of.warm && of.warm < of.step ? of.warm + 1 : 1, last: of.step }} tick=${tick} high=${500}>${data => html`<div class="columns">
    <section><h2>Lag of what was trained</h2><${Lag} lags=${data.lags} limit=${data.limit} /></section>
    <section><h2>Ledger of groups</h2><${Ledger} book=${data.ledger} /></section>
    <section class="wide"><h2>Memory of a shared device</h2><${Memory} memory=${data.memory} /></section>
    <section class="wide"><h2>Memory of each worker</h2><${Workers} workers=${data.workers} /></section></div>`}<//>`;
}

function Lag({ lags, limit }) {
  const ages = Object.keys(lags).map(Number);
  if (!ages.length) return empty("Nothing was trained yet", "Every trained group is counted by the versions between its admission and its training.");
  const top = Math.max(...ages, limit ?? 0), rows = Array.from({ length: Math.min(top, 63) + 1 }, (_, i) => i), most = Math.max(...Object.values(lags));
  return html`<p class="hint">versions between admission and training; the limit, loop.max_staleness, is ${limit === null ? "not told" : plain(limit)}</p>
    <table class="bars"><thead><tr><th>versions</th><th>groups</th><th class="n">share</th></tr></thead><tbody>${rows.map(age => html`<tr class=${age === limit ? "limit" : ""}><th scope="row" class="n">${age}</th><td><span class="fill bg-0" style=${{ width: `${(100 * (lags[age] ?? 0)) / most}%` }}></span>${age === limit ? html`<span class="mark">limit</span>` : ""}</td><td class="n">${percent(lags[age] ?? 0)}</td></tr>`)}</tbody></table>`;
}

function Ledger({ book }) {
  if (!book.issued) return empty("No group was issued yet", "The ledger begins with the RL phase.");
  const parts = Object.entries(book).filter(([name]) => name !== "issued"), sum = parts.reduce((n, [, v]) => n + v, 0);
  const kind = name => (name === "trained" ? "k-kept" : name === "in_flight" ? "k-wait" : name.startsWith("failed") ? "k-failed" : "k-dropped");
  const order = name => ["trained", "filtered", "failed", "in_flight"].findIndex(first => name.startsWith(first));
  parts.sort((a, b) => order(a[0]) - order(b[0]));
  return html`<div class="stack tall" role="img" aria-label=${parts.map(([n, v]) => `${n} ${v}`).join(", ")}>${parts.map(([name, n]) => n > 0 && html`<span class=${kind(name)} style=${{ width: `${(100 * n) / book.issued}%` }} title=${`${name} ${plain(n)}`}></span>`)}</div>
    <table class="numbers"><thead><tr><th>what became of them</th><th class="n">groups</th><th class="n">share</th></tr></thead><tbody>${parts.map(([name, n]) => html`<tr><th scope="row"><span class=${`key ${kind(name)}`}></span>${name.replace("/", ": ").replace("_", " ")}</th><td class="n">${plain(n)}</td><td class="n">${percent(n / book.issued)}</td></tr>`)}
    <tr class="sum"><th scope="row">issued</th><td class="n">${plain(book.issued)}</td><td class="n">${sum === book.issued ? "it adds up" : html`<b class="bad">they add up to ${plain(sum)}</b>`}</td></tr></tbody></table>`;
}

const WHO = ["weights", "master", "masters", "gradients", "moments", "optimizer", "reference", "critic", "kv_cache", "kv", "cache"];
const TOTALS = ["rss", "peak"]; // of a whole process, which nobody of WHO is a part of in a way that adds up
const said = name => name.replaceAll("_", " ");

// {phase or worker: {who: bytes}} as one bar each on one scale; what is over to the peak stays empty.
function Bars({ held, about, most }) {
  const rows = Object.keys(held), named = new Set(rows.flatMap(p => Object.keys(held[p]).filter(w => !TOTALS.includes(w) && held[p][w])));
  const who = [...named].sort((a, b) => (WHO.indexOf(a) + 99) % 99 - (WHO.indexOf(b) + 99) % 99);
  const of = p => who.filter(w => held[p][w]);
  return html`${rows.map(p => html`<div class="account"><span class="who">${p} <span class="hint">${about(held[p])}</span></span><div class="stack" role="img" aria-label=${`${p}: ${about(held[p])}; ${of(p).map(w => `${said(w)} ${bytes(held[p][w])}`).join(", ")}`}>${of(p).map(w => html`<span class=${`m-${who.indexOf(w) % 10}`} style=${{ width: `${(100 * held[p][w]) / most}%` }} title=${`${said(w)} ${bytes(held[p][w])}`}></span>`)}</div></div>`)}
    <p class="legend">${who.map((w, i) => html`<span><span class=${`key m-${i % 10}`}></span>${said(w)}</span>`)}</p>`;
}

const together = held => Object.entries(held).reduce((n, [w, v]) => n + (TOTALS.includes(w) ? 0 : v), 0);

function Memory({ memory }) {
  const phases = Object.keys(memory);
  if (!phases.length) return empty("Not measured here", "Peaks are told of a device that trainer and engine share (place.kind = shared). The planner tab has the bill that is to be expected.");
  const most = Math.max(1, ...phases.map(p => Math.max(memory[p].peak ?? 0, together(memory[p]))));
  return html`<p class="hint">held at the end of a phase, newest step; the whole width is ${bytes(most)}</p><${Bars} held=${memory} most=${most} about=${h => `peak ${bytes(h.peak ?? 0)}`} />`;
}

function Workers({ workers }) {
  const names = Object.keys(workers);
  if (!names.length) return empty("No worker has told", "Each worker tells what it holds with every step.");
  const most = Math.max(1, ...names.map(n => together(workers[n])));
  return html`<p class="hint">what each holds, newest step; the whole width is ${bytes(most)}</p><${Bars} held=${workers} most=${most}
    about=${h => [h.rss ? `process ${bytes(h.rss)}` : "", h.peak ? `at most ${bytes(h.peak)}` : ""].filter(Boolean).join(", ")} />`;
}
