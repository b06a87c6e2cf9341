// The run card, and of several runs the keys in which their recipes differ.
import { empty, html, Load, note } from "./data.js";
import { dot, percent, plain, seconds } from "./format.js";

export function Card({ run, tick, of }) {
  return html`<${Load} key=${run} path="card" words=${{ run }} tick=${`${run}.${of.state}.${of.step}`} rest=${5000} high=${500}>${data => html`<${Differs} differs=${data.differs} names=${data.names} />
    ${data.card ? html`<${Report} run=${run} card=${data.card} written=${data.written} />` : empty("No card yet", data.large ? "It is written when the run ends; of a journal as long as this, rondel card writes it at any time." : "It is made from the first events on.")}`}<//>`;
}

function Differs({ differs, names }) {
  const keys = Object.keys(differs);
  if (names.length < 2) return "";
  return html`<section><h2>Where the recipes differ</h2>${keys.length ? html`<div class="scroll" tabindex="0" role="region" aria-label="differences"><table class="numbers"><thead><tr><th>key</th>${names.map((n, i) => html`<th><span class=${dot(i)}></span><span class="run-name" title=${n}>${n}</span></th>`)}</tr></thead>
    <tbody>${keys.map(key => html`<tr><th scope="row"><code>${key}</code></th>${differs[key].map(v => html`<td>${said(v)}</td>`)}</tr>`)}</tbody></table></div>` : html`<p class="hint">Equal recipes, but for the run folder.</p>`}</section>`;
}

const said = v => (v === null ? "" : typeof v === "object" ? JSON.stringify(v) : String(v));
const scored = (e, of) => (e ? html`<b>${of(e.score)}</b> <span class="hint">${of(e.low)} to ${of(e.high)}, ${e.n} tasks, step ${plain(e.step)}</span>` : html`<span class="hint">not evaluated</span>`);

function Report({ run, card, written }) {
  const of = card.score_is_share === false ? plain : percent;
  const rows = (title, entries) => entries.length > 0 && html`<section><h2>${title}</h2><dl class="facts">${entries.map(([k, v]) => html`<dt>${k}</dt><dd>${v}</dd>`)}</dl></section>`;
  return html`${written ? "" : note("The run has not ended; this is its card as of now.")}
    ${rows("Result", [["held out, before", scored(card.eval_before, of)], ["held out, after", scored(card.eval_after, of)], ["steps", plain(card.steps)], ["trained groups", plain(card.trained_groups)], ["time", seconds(card.seconds)], ["cost", `${card.cost.device_hours} device-hours on ${card.cost.devices} device${card.cost.devices === 1 ? "" : "s"}`], ["ended", card.ended], ["resumed", plain(card.resumes)]])}
    ${card.images ? html`<section><h2>What it drew</h2><${Load} path="images" words=${{ run }} high=${90}>${data => html`<p class="hint">above: step ${plain(data.first)}, below: step ${plain(data.last)}; a prompt a line</p><img class="frames" src=${data.png} alt="images of the first and of the last step" />`}<//></section>` : ""}
    ${rows("Nine questions", Object.entries(card.questions))}
    <section><h2>Loss</h2><pre tabindex="0" aria-label="the formula of the loss">${card.loss}</pre></section>
    ${rows("To do it again", [...Object.entries(card.seeds).map(([k, v]) => [`seed, ${k}`, said(v)]), ...Object.entries(card.data).map(([k, v]) => [k, said(v)])])}
    ${card.samples_after.length ? html`<section><h2>Answers after</h2>${card.samples_after.slice(0, 4).map(s => html`<pre tabindex="0" aria-label="a sample">${`prompt  ${s.prompt ?? ""}\nwrote   ${s.text ?? ""}\nanswer  ${s.answer ?? ""}\nreward  ${s.reward ?? "not computed"}`}</pre>`)}</section>` : ""}
    <section><h2>Recipe</h2><details><summary>every key, resolved</summary><pre tabindex="0" aria-label="the recipe">${JSON.stringify(card.recipe, null, 2)}</pre></details></section>`;
}
