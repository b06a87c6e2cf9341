// The reader: the answers of a step as a table, one of them token by token, and the same task at another step.
import { Component } from "/vendor/preact.mjs";
import { ask, empty, html, Load, note } from "./data.js";
import { DASH, number, plain } from "./format.js";

const MOST = 400; // lines of the table
const COLUMNS = [["task", "task", ""], ["prompt", "prompt", ""], ["reward", "reward", "n"], ["length", "tokens", "n"], ["gap", "gap", "n"], ["lag", "lag", "n"], ["finish", "ended by", ""], ["error", "error", ""]];
const SHADES = { mask: "who wrote it", version: "version", gap: "gap of log-probabilities", advantage: "advantage" };

export class Answers extends Component {
  state = { step: "", at: 0, task: "", min: "", max: "", gap: "", shortest: "", longest: "", errors: false, by: "at", down: false, shade: "mask" };
  set = change => this.setState(change);
  componentDidUpdate(before) { if (before.run !== this.props.run) this.setState({ step: "", at: 0 }); }
  render({ run, of }, s) {
    return html`<${Load} key=${run} path="rollouts" words=${{ run, step: s.step }} tick=${s.step === "" ? of.step : ""} rest=${2000} high=${500}>${data => {
      if (data.step === null) return empty("No answers are stored yet", "Every trained answer is kept in rollouts/ of the run folder, a file a step.");
      const found = chosen(data.rows, s), at = found.some(r => r.at === s.at) ? s.at : found[0]?.at;
      return html`<form class="bar" onSubmit=${e => e.preventDefault()}>
          <label>step <input type="number" min=${data.stored[0]} max=${data.stored[1]} value=${data.step} onChange=${e => this.set({ step: e.target.value, at: 0 })} /></label>
          <label class="slide">of ${plain(data.stored[0])} to ${plain(data.stored[1])} <input type="range" aria-label="step" min=${data.stored[0]} max=${data.stored[1]} value=${data.step} onChange=${e => this.set({ step: e.target.value, at: 0 })} /></label>
          <button type="button" disabled=${s.step === ""} onClick=${() => this.set({ step: "", at: 0 })}>newest</button>
          <label>task or prompt <input type="search" size="12" value=${s.task} onInput=${e => this.set({ task: e.target.value })} /></label>
          ${pair("reward", s.min, s.max, (min, max) => this.set({ min, max }))}
          ${pair("tokens", s.shortest, s.longest, (shortest, longest) => this.set({ shortest, longest }))}
          <label>gap from <input type="number" step="any" min="0" value=${s.gap} onInput=${e => this.set({ gap: e.target.value })} /></label>
          <label class="check"><input type="checkbox" checked=${s.errors} onChange=${e => this.set({ errors: e.target.checked })} /> only errors</label></form>
        <div class="reader"><div class="list"><p class="hint">${plain(found.length)} of ${plain(data.rows.length)} answers of step ${plain(data.step)}${found.length > MOST ? `, the first ${MOST} shown` : ""}</p>
          <div class="scroll tall" tabindex="0" role="region" aria-label="answers of the step"><table class="numbers rows"><thead><tr>${COLUMNS.map(([key, title, kind]) => html`<th class=${kind} aria-sort=${s.by === key ? (s.down ? "descending" : "ascending") : undefined}><button type="button" onClick=${() => this.set({ by: key, down: s.by === key ? !s.down : key !== "task" && key !== "prompt" })}>${title}${s.by === key ? (s.down ? " ↓" : " ↑") : ""}</button></th>`)}</tr></thead>
            <tbody>${found.slice(0, MOST).map(r => html`<tr key=${r.at} class=${r.at === at ? "now" : ""} onClick=${() => this.set({ at: r.at })}><th scope="row" title=${r.task}><button type="button" aria-pressed=${r.at === at} onClick=${() => this.set({ at: r.at })}>${r.task}</button></th><td class="prompt" title=${r.prompt}>${r.prompt}</td>
              <td class="n">${number(r.reward)}</td><td class="n">${plain(r.length)}</td><td class="n">${r.gap === null ? DASH : number(r.gap)}</td><td class="n">${r.lag ?? DASH}</td><td>${r.finish ?? DASH}</td><td class=${r.error ? "bad" : ""}>${r.error ?? ""}</td></tr>`)}</tbody></table></div></div>
          <div class="detail">${at === undefined ? empty("No answer is left", "Widen the filters.") : html`<${Answer} key=${`${run}.${data.step}.${at}`} run=${run} step=${data.step} at=${at} shade=${s.shade} set=${this.set} rows=${data.rows} />`}</div></div>`;
    }}<//>`;
  }
}

const pair = (name, low, high, set) => html`<span class="pair"><label>${name} from <input type="number" step="any" value=${low} onInput=${e => set(e.target.value, high)} /></label><label>to <input type="number" step="any" aria-label=${`${name} to`} value=${high} onInput=${e => set(low, e.target.value)} /></label></span>`;

function chosen(rows, s) {
  const within = (value, low, high) => (low === "" || (value !== null && value >= Number(low))) && (high === "" || (value !== null && value <= Number(high)));
  const found = rows.filter(r => within(r.reward, s.min, s.max) && within(r.length, s.shortest, s.longest) && within(r.gap, s.gap, "") && (!s.errors || r.error) && `${r.task} ${r.prompt}`.toLowerCase().includes(s.task.toLowerCase()));
  const value = r => r[s.by] ?? (typeof rows[0]?.[s.by] === "string" ? "" : -Infinity);
  return s.by === "at" ? found : found.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.at - b.at) * (s.down ? -1 : 1));
}

class Answer extends Component {
  state = { told: null, error: "", here: null };
  componentDidMount() { this.more(0); }
  async more(first) {
    const { run, step, at } = this.props;
    try {
      const told = await ask("answer", { run, step, at, first });
      this.setState(({ told: before }) => ({ told: before && first ? { ...told, first: 0, tokens: [...before.tokens, ...told.tokens] } : told }));
    } catch (error) { this.setState({ error: error.message }); }
  }
  keyed = event => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.setState(({ here, told }) => ({ here: Math.max(0, Math.min(told.tokens.length - 1, (here ?? -1) + step)) }));
  };
  render({ run, step, shade, set, rows, at }, { told, error, here }) {
    if (error) return note(error, "error");
    if (!told) return html`<p class="loading">reading …</p>`;
    const row = rows.find(r => r.at === at), paint = painter(shade, told), token = here !== null ? told.tokens[here] : null;
    return html`<h2 class="task">${told.task}</h2><p class="hint">${told.facts.join(" · ")}${told.answer !== null && told.answer !== undefined ? ` · answer: ${told.answer}` : ""}</p>
      ${told.episode ? html`<${Load} path="frames" words=${{ run, step, at }} high=${90}>${data => html`<img class="frames" src=${data.png} alt="frames of the episode, from its first observation to its last" />`}<//>` : ""}
      ${told.image ? html`<img class="frames" src=${told.image} alt="the image that was drawn" />` : ""}
      <fieldset class="which"><legend>colour</legend>${Object.entries(SHADES).map(([key, title]) => html`<label><input type="radio" name="shade" checked=${shade === key} onChange=${() => set({ shade: key })} />${title}</label>`)}</fieldset>
      <p class="legend">${paint.legend.map(([css, text]) => html`<span><span class=${`key ${css}`}></span>${text}</span>`)}</p>
      ${told.spelled ? "" : note("No checkpoint of this run has a tokenizer yet: tokens are shown by number, and the text below them.")}
      <div class="tokens" tabindex="0" role="group" aria-label="tokens; arrow keys go from one to the next" onKeyDown=${this.keyed} onMouseOver=${e => e.target.dataset?.i && this.setState({ here: Number(e.target.dataset.i) })}>${told.tokens.map((t, i) => html`<span data-i=${i} class=${`${paint.of(t)}${i === here ? " here" : ""}`}>${t[0]}</span>`)}</div>
      <p class="token" aria-live="polite">${token ? about(token, here) : "point at a token, or use the arrow keys"}</p>
      ${told.tokens.length < told.of ? html`<button type="button" onClick=${() => this.more(told.tokens.length)}>more: ${plain(told.tokens.length)} of ${plain(told.of)} tokens are shown</button>` : ""}
      ${told.spelled ? "" : html`<pre tabindex="0" aria-label="the text">${told.prompt}\n\n${told.text ?? ""}</pre>`}
      <${Beside} key=${told.task} run=${run} task=${told.task} step=${step} pick=${rows.filter(r => r.task === told.task).findIndex(r => r.at === row?.at)} />`;
  }
}

const about = ([text, mask, version, behavior, trainer, advantage], i) => [
  `token ${i + 1} ${JSON.stringify(text)}`, mask ? `written by version ${version}` : "read",
  ...(mask && behavior !== null ? [`log p ${behavior.toFixed(3)}`] : []), ...(mask && trainer !== null ? [`trainer ${trainer.toFixed(3)}`] : []), ...(mask && trainer !== null && behavior !== null ? [`gap ${number(Math.abs(trainer - behavior))}`] : []),
  ...(mask && advantage !== null ? [`advantage ${number(advantage)}`] : [])].join(" · ");

function painter(shade, told) {
  if (shade === "version") {
    const known = [...new Set(told.tokens.filter(t => t[1]).map(t => t[2]))].sort((a, b) => a - b);
    return { legend: [["t-read", "read"], ...known.slice(0, 12).map(v => [`t-v${known.indexOf(v) % 6}`, `version ${v}${told.now !== null ? `, ${told.now - v} behind` : ""}`])], of: t => (t[1] ? `t-v${known.indexOf(t[2]) % 6}` : "t-read") };
  }
  if (shade === "gap") {
    const steps = [1e-5, 1e-3, 1e-2, 1e-1], names = ["to 1e-5", "to 0.001", "to 0.01", "to 0.1", "above"];
    if (told.tokens.every(t => t[3] === null || t[4] === null)) return { legend: [["t-read", "no token has log-probabilities of both sides"]], of: () => "t-read" };
    return { legend: [["t-read", "read"], ...names.map((n, i) => [`t-g${i}`, n])], of: t => (t[1] && t[3] !== null && t[4] !== null ? `t-g${steps.filter(s => Math.abs(t[4] - t[3]) > s).length}` : "t-read") };
  }
  if (shade === "advantage") {
    if (told.tokens.every(t => t[5] === null)) return { legend: [["t-read", "advantages are not stored"]], of: () => "t-read" };
    return { legend: [["t-read", "read"], ["t-less", "made less likely"], ["t-none", "0"], ["t-more", "made likelier"]], of: t => (t[1] && t[5] !== null ? (t[5] > 0 ? "t-more" : t[5] < 0 ? "t-less" : "t-none") : "t-read") };
  }
  return { legend: [["t-read", "read"], ["t-wrote", "written by the policy"]], of: t => (t[1] ? "t-wrote" : "t-read") };
}

// The same task at another step: rewards of both groups, and what differs between two answers.
class Beside extends Component {
  state = { steps: null, other: "", mine: Math.max(0, this.props.pick), theirs: 0, error: "" };
  async find() {
    const { run, task, step } = this.props;
    try {
      const steps = (await ask("steps_of", { run, task, step })).filter(s => s !== step);
      this.setState({ steps, other: steps.filter(s => s < step).pop() ?? steps[0] ?? "" });
    } catch (error) { this.setState({ error: error.message }); }
  }
  render({ run, task, step }, { steps, other, mine, theirs, error }) {
    return html`<section><h2>The same task at another step</h2>${error ? note(error, "error") : ""}
      ${steps === null ? html`<button type="button" onClick=${() => this.find()}>look for it</button>` : !steps.length ? html`<p class="hint">None of the steps around this one has it.</p>` : html`
      <form class="bar" onSubmit=${e => e.preventDefault()}><label>beside step <select value=${other} onChange=${e => this.setState({ other: Number(e.target.value), theirs: 0 })}>${steps.map(s => html`<option value=${s}>${s}</option>`)}</select></label></form>
      <${Load} path="beside" words=${{ run, task, a: other, b: step, pick_a: theirs, pick_b: mine }} high=${160}>${data => html`<pre tabindex="0" aria-label="the prompt">${data.prompt}</pre><div class="columns">${data.sides.map((side, k) => html`<div><h3>step ${plain(side.step)} <span class="hint">mean reward ${number(mean(side.rows.map(r => r.reward)))}</span></h3>
        <div class="chips">${side.rows.map((r, i) => html`<button type="button" aria-pressed=${i === side.pick} aria-label=${`answer ${i + 1} of step ${side.step}, reward ${number(r.reward)}`} onClick=${() => this.setState(k ? { mine: i } : { theirs: i })}>${number(r.reward)}</button>`)}</div></div>`)}</div>
        <div class="tokens diff" tabindex="0" role="group" aria-label="what differs">${data.diff.length ? data.diff.map(([what, text]) => (what === "gone" ? html`<del>${text}</del>` : what === "new" ? html`<ins>${text}</ins>` : html`<span>${text}</span>`)) : html`<span class="hint">both are empty</span>`}</div>
        <p class="legend"><span><span class="key t-less"></span>only at step ${plain(other)}</span><span><span class="key t-more"></span>only at step ${plain(step)}</span></p>`}<//>`}</section>`;
  }
}

const mean = values => { const known = values.filter(v => v !== null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
