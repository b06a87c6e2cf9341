// What is wrong, in the order in which to look at it: the rules of `rondel diagnose`, and what the run itself said.
import { empty, html, Load, note } from "./data.js";
import { plain } from "./format.js";

const MARK = { error: "✕", warning: "▲", note: "●" };

export function Findings({ run, of, tick }) {
  return html`<${Load} key=${run} path="findings" words=${{ run }} tick=${tick} rest=${1500} high=${300}>${data => html`
    <section><h2>Findings</h2>${data.reading ? note(`The rules wait until the whole journal has been read (${Math.floor(100 * of.read)} %).`) : data.findings.length ? html`<ol class="findings">${data.findings.map(f => html`<li class=${f.severity}>
      <h3><span class="sign" aria-hidden="true">${MARK[f.severity]}</span> ${f.name.replaceAll("_", " ")} <span class="hint">${f.severity}</span></h3><p>${f.evidence}</p><p class="hint">${f.meaning}</p><p class="next"><span>next</span> ${f.action}</p></li>`)}</ol>`
      : empty("Nothing found", "No rule sees a fault in this run. They look at numbers; read some answers too.")}</section>
    ${data.broke ? html`<section><h2>It broke</h2><pre>${data.broke}</pre></section>` : ""}
    ${data.stalls.length ? html`<section><h2>Waits that passed their deadline</h2><ul class="lines">${data.stalls.map(([step, text]) => html`<li><span class="hint">after step ${plain(step)}</span> ${text}</li>`)}</ul></section>` : ""}
    <section><h2>What the run said</h2>${data.said.length ? html`<ul class="lines">${data.said.map(([step, text]) => html`<li><span class="hint">step ${plain(step)}</span> ${text}</li>`)}</ul>` : html`<p class="hint">No warning.</p>`}</section>`}<//>`;
}
