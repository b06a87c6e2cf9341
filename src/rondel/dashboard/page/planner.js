// Before you spend: who is the bottleneck, does it fit, how do weights travel. Every move of a slider is a plan of the server's.
import { Component } from "/vendor/preact.mjs";
import { ask, html, note } from "./data.js";
import { bytes, number, percent, plain, seconds } from "./format.js";

const POWERS = { gpus: [0, 12], output: [6, 17], prompts: [0, 10], group: [0, 8], prompt: [4, 15] };
const LABELS = { gpus: "devices", output: "longest answer, tokens", prompts: "groups a step", group: "answers a group", prompt: "prompt, tokens" };
const PHASES = ["generate", "logprob", "train", "sync", "wake"];

export class Planner extends Component {
  state = { words: {}, told: null, error: "", from: "" };
  componentDidMount() { this.go({}, this.state.from); }
  componentWillUnmount() { clearTimeout(this.timer); }
  set(words) {
    const all = { ...this.state.words, ...words };
    this.setState({ words: all });
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.go(all, this.state.from), 60);
  }
  async go(words, run) {
    const turn = (this.turn = {});
    try {
      const told = await ask("plan", { ...words, run });
      if (this.turn === turn) this.setState({ told, error: "" });
    } catch (error) { if (this.turn === turn) this.setState({ error: error.message }); }
  }
  begin(from) { this.setState({ words: {}, from, error: "" }); this.go({}, from); }
  render({ runs }, { told, error, words, from }) {
    if (!told) return error ? note(error, "error") : html`<p class="loading">reading …</p>`;
    const { plan, setting, choices } = told, now = name => words[name] ?? setting[name];
    return html`<div class="planner"><form class="dials" onSubmit=${e => e.preventDefault()} aria-label="what is planned">
        ${runs.length ? html`<label class="dial"><span>begin from</span><select value=${from} onChange=${e => this.begin(e.target.value)}><option value="">no recipe</option>${runs.map((r, i) => html`<option value=${i}>the recipe of ${r.name}</option>`)}</select></label>` : ""}
        ${this.choice("model", choices.model, now("model"))}${this.choice("hardware", choices.hardware, now("hardware"))}
        ${Object.keys(POWERS).map(name => this.power(name, Number(now(name))))}
        ${this.choice("place", ["shared", "split"], now("place"))}
        ${now("place") === "split" && Number(now("gpus")) > 1 ? this.slide("trainers", "of them train", 1, Math.max(1, Number(now("gpus")) - 1), Math.min(setting.trainers, Number(now("gpus")) - 1)) : ""}
        ${this.slide("staleness", "versions behind, at most", 0, 8, Number(now("staleness")))}
        ${this.slide("lora", "rank of LoRA, 0 for none", 0, 128, Number(now("lora")), 8)}
        ${this.power("micro", Number(now("micro")), [9, 16], "tokens of a pass")}
        <label class="check"><input type="checkbox" checked=${now("offload") === true || now("offload") === "yes"} onChange=${e => this.set({ offload: e.target.checked ? "yes" : "no" })} /> offload what is not at work</label>
        <button type="button" onClick=${() => this.begin(from)}>as at first</button></form>
      <div class="answers-of-plan" aria-live="polite">${error ? note(error, "error") : ""}
        <p class="headline"><b>${setting.model}</b> on ${plain(plan.devices.count)} × ${plan.devices.hardware}: a step in <b>${seconds(plan.step_seconds)}</b>, <b class=${plan.fits ? "good" : "bad"}>${plan.fits ? "it fits" : "it does not fit"}</b>, <b>${plan.split.bound}-bound</b></p>
        <section><h2>Bottleneck and split</h2><${Split} plan=${plan} setting=${setting} /></section>
        <section><h2>Memory bill of one device</h2>${plan.memory.map(bill => html`<${Bill} bill=${bill} />`)}</section>
        <section><h2>Cost of a sync</h2><${Sync} plan=${plan} /></section>
        <section><h2>Advice</h2><ul class="lines">${[...plan.advice, plan.placement].map(text => html`<li>${text}</li>`)}</ul>
          <details><summary>what was assumed</summary><ul class="lines">${plan.assumed.map(text => html`<li>${text}</li>`)}</ul></details></section></div></div>`;
  }
  choice(name, known, value) {
    return html`<label class="dial"><span>${name}</span><select value=${value} onChange=${e => this.set({ [name]: e.target.value })}>${known.includes(value) ? "" : html`<option value=${value}>${value}</option>`}${known.map(k => html`<option value=${k}>${k}</option>`)}</select></label>`;
  }
  power(name, value, [low, high] = POWERS[name], label = LABELS[name]) {
    const at = Math.min(high, Math.max(low, Math.round(Math.log2(Math.max(1, value)))));
    return html`<label class="dial"><span>${label} <b>${plain(value)}</b></span><input type="range" min=${low} max=${high} value=${at} aria-valuetext=${plain(value)} onInput=${e => this.set({ [name]: String(2 ** Number(e.target.value)), ...(name === "gpus" ? { trainers: "" } : {}) })} /></label>`;
  }
  slide(name, label, low, high, value, step = 1) {
    return html`<label class="dial"><span>${label} <b>${plain(value)}</b></span><input type="range" min=${low} max=${high} step=${step} value=${value} aria-valuetext=${plain(value)} onInput=${e => this.set({ [name]: e.target.value })} /></label>`;
  }
}

function Split({ plan, setting }) {
  const g = plan.generate.seconds, t = plan.train.seconds, most = Math.max(g, t), apart = plan.devices.place === "split";
  const bar = (css, title, s) => html`<div class="account"><span class="who">${title} <span class="hint">${seconds(s)}</span></span><div class="stack"><span class=${css} style=${{ width: `${(100 * s) / most}%` }}></span></div></div>`;
  return html`${bar("k-generate", `generate${apart ? `, ${plan.devices.generate} devices` : ""}`, g)}${bar("k-train", `train${apart ? `, ${plan.devices.train} devices` : ""}`, t)}
    <p>${plan.split.text}.</p>
    <div class="scroll" tabindex="0" role="region" aria-label="rates"><table class="numbers narrow"><tbody><tr><th scope="row">tokens generated a second</th><td class="n">${plain(Math.round(plan.generate.tokens_per_second))}</td></tr><tr><th scope="row">tokens trained a second</th><td class="n">${plain(Math.round(plan.train.tokens_per_second))}</td></tr>
    <tr><th scope="row">the longest answer alone</th><td class="n">${seconds(plan.generate.longest_answer_seconds)}</td></tr>${setting.gpus > 1 ? html`<tr><th scope="row">best split, engines : trainers</th><td class="n">${plan.split.engines} : ${plan.split.trainers}</td></tr><tr><th scope="row">asynchronous by synchronous</th><td class="n">${number(plan.split.gain_async)}×</td></tr>` : ""}</tbody></table></div>`;
}

function Bill({ bill }) {
  const who = Object.keys(bill.rows), most = Math.max(bill.of, bill.peak);
  return html`<h3>${bill.pool} <span class="hint">${bytes(bill.of)} each; ${bill.room >= 0 ? `${bytes(bill.room)} free` : html`<b class="bad">${bytes(-bill.room)} too much</b>`} in ${bill.peak_phase}</span></h3>
    <div class="bill">${PHASES.map(phase => html`<div class="account"><span class="who">${phase} <span class="hint">${bytes(bill.total[phase])}</span></span><div class="stack room" role="img" aria-label=${`${phase}: ${bytes(bill.total[phase])} of ${bytes(bill.of)}`}>${who.map((w, i) => bill.rows[w][phase] > 0 && html`<span class=${`m-${i % 10}`} style=${{ width: `${(100 * bill.rows[w][phase]) / most}%` }} title=${`${w} ${bytes(bill.rows[w][phase])}`}></span>`)}<i class="capacity" style=${{ left: `${(100 * bill.of) / most}%` }} title=${`${bytes(bill.of)}`}></i></div></div>`)}</div>
    <p class="legend">${who.map((w, i) => html`<span><span class=${`key m-${i % 10}`}></span>${w} ${bytes(Math.max(...PHASES.map(p => bill.rows[w][p])))}</span>`)}</p>`;
}

function Sync({ plan }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="ways of the weights"><table class="numbers"><thead><tr><th>transport</th><th class="n">on the learner's path</th><th class="n">engines stand still</th><th>why</th></tr></thead><tbody>${plan.sync.map((way, i) => html`<tr><th scope="row">${way.kind}${i ? "" : html` <span class="hint">quickest</span>`}</th><td class="n">${seconds(way.seconds)}</td><td class="n">${seconds(way.pause)}</td><td>${way.why}</td></tr>`)}</tbody></table></div>
    <p class="hint">What is in flight: ${Object.entries(plan.interrupt).map(([how, s]) => `${how} ${seconds(s)}`).join(", ")}; ${percent(Math.min(1, plan.sync[0].seconds / plan.step_seconds))} of a step is sync.</p>`;
}
