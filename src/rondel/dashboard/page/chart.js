// One curve a run over steps: uPlot on a canvas, its values in the head of the figure, where the pointer is or else the newest.
import { Component } from "/vendor/preact.mjs";
import { html } from "./data.js";
import { DASH, number, plain } from "./format.js";

const uPlot = globalThis.uPlot; // of /vendor/uPlot.min.js, which is a script and no module
const HEIGHT = 132;
const dark = matchMedia("(prefers-color-scheme: dark)");

export class Chart extends Component {
  state = { at: null };
  componentDidMount() {
    this.seen = new IntersectionObserver(entries => { if (entries.some(e => e.isIntersecting)) { this.seen.disconnect(); this.draw(); } }, { rootMargin: "300px" });
    if (this.props.soon) this.draw();
    else this.seen.observe(this.box); // a chart that nobody has come to costs nothing
    this.sizes = new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.box.clientWidth, height: HEIGHT }));
    this.sizes.observe(this.box);
    this.again = () => this.plot && this.draw();
    dark.addEventListener("change", this.again);
  }
  componentDidUpdate(before) {
    if ((before.x === this.props.x && before.unit === this.props.unit) || !this.plot) return;
    if (this.shape() === this.drawn) this.plot.setData(this.columns());
    else this.draw();
  }
  componentWillUnmount() {
    this.plot?.destroy();
    this.seen.disconnect();
    this.sizes.disconnect();
    dark.removeEventListener("change", this.again);
  }
  shape() { return JSON.stringify([this.log(), this.props.unit, this.props.x.length > 60, this.props.series.map(s => [s.run, s.name, !!s.low])]); }
  many() { return this.props.series.length > 2; } // then bands and points would only hide the lines
  banded(s) { return !!s.low && !this.many(); }
  columns() { return [this.props.x, ...this.props.series.flatMap(s => (this.banded(s) ? [s.mean, s.low, s.high] : [s.mean]))]; }
  log() {
    const all = this.props.series.flatMap(s => s.mean).filter(v => v !== null);
    return all.length > 0 && Math.min(...all) > 0 && Math.max(...all) > 500 * Math.min(...all);
  }
  draw() {
    this.plot?.destroy();
    const css = getComputedStyle(document.documentElement), of = name => css.getPropertyValue(name).trim();
    const series = [{}], bands = [];
    for (const s of this.props.series) {
      const stroke = of(`--run-${s.run % 6}`), few = !this.many() && (this.props.x.length <= 60 || s.mean.filter(v => v !== null).length <= 40);
      series.push({ stroke, width: 1.5, dash: dashed(s.run), spanGaps: true, points: { show: few, size: 4, fill: stroke } });
      if (!this.banded(s)) continue;
      const none = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      series.push(none, none);
      bands.push({ series: [series.length - 1, series.length - 2], fill: `${stroke}2e` });
    }
    const axis = { stroke: of("--quiet"), grid: { stroke: of("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 3 };
    const tens = (u, splits) => splits.map(v => (v > 0 && Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-6 ? v : null));
    const values = (u, ticks) => ticks.map(v => (v === null ? "" : this.props.unit === "share" ? `${short(plain(100 * v))} %` : short(number(v, this.props.unit))));
    this.drawn = this.shape();
    this.plot = new uPlot({
      width: this.box.clientWidth || 300, height: HEIGHT, legend: { show: false }, padding: [6, 8, 0, 0], series, bands,
      scales: { x: { time: false }, y: { distr: this.log() ? 3 : 1, range: this.log() ? undefined : (u, low, high) => ranged(low, high, this.props.unit === "share") } },
      axes: [{ ...axis, size: 22, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 1e6], values: (u, t) => t.map(plain) }, { ...axis, size: 56, values, ...(this.log() ? { filter: tens, grid: { ...axis.grid, filter: tens } } : {}) }],
      cursor: { y: false, sync: { key: "steps" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      hooks: {
        setCursor: [u => this.setState({ at: u.cursor.idx ?? null })],
        setSelect: [u => {
          if (u.select.width < 4) return;
          const [a, b] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          this.props.zoom?.(Math.max(1, Math.round(a)), Math.max(1, Math.round(b)));
        }],
      },
    }, this.columns(), this.box);
  }
  render({ name, label, unit, about, series, x, id }, { at }) {
    const told = series.map(s => [s.run, at === null ? newest(s.mean) : s.mean[at]]);
    const spoken = series.map(s => `${s.title ?? ""} ${number(newest(s.mean), unit)}`).join(", ");
    return html`<figure class="chart" id=${id}>
      <figcaption title=${about} class=${told.length > 2 ? "many" : ""}><span class="name">${label}</span>${unit && !["share", "number", label, "norm", "rate"].includes(unit) ? html`<span class="unit">${unit}</span>` : ""}${this.props.series.length && this.log() ? html`<span class="unit">log</span>` : ""}
        <span class="values">${at !== null && x[at] !== undefined ? html`<span class="unit">step ${plain(Math.round(x[at]))}</span>` : ""}${told.map(([run, value]) => html`<span class=${`value run-${run % 6}${run > 5 ? " again" : ""}`} title=${series.find(s => s.run === run)?.title}>${value === null || value === undefined ? DASH : number(value, unit)}</span>`)}</span></figcaption>
      <div class="plot" role="img" aria-label=${`${label} over steps; newest: ${spoken}`} ref=${box => (this.box = box)}></div>
    </figure>`;
  }
}

// Six colours; the seventh run has the first one, dashed.
const dashed = run => (run < 6 ? undefined : run < 12 ? [6, 3] : [2, 3]);

const short = text => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
const newest = values => { for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i]; return null; };

// Some air; never a flat line on an edge, and no axis below 0 for what is never negative.
function ranged(low, high, share) {
  if (low === null || (low === 0 && high === 0)) return [0, 1];
  const air = (high - low || Math.abs(high) || 1) * 0.08;
  if (share && low >= 0 && high <= 1 && (low === high || high + air > 1)) return [low === high ? 0 : Math.max(0, low - air), 1];
  return [low >= 0 && low - air < 0 ? 0 : low - air, high + air];
}

// `all`: the values of every run beside it, which share one scale.
export function Spark({ values, all = values, run = 0 }) {
  const known = values.map((v, i) => [i, v]).filter(([, v]) => v !== null && v !== undefined);
  if (known.length < 2) return html`<svg class="spark" aria-hidden="true" viewBox="0 0 100 24"></svg>`;
  const numbers = all.filter(v => v !== null && v !== undefined), low = Math.min(...numbers), span = Math.max(...numbers) - low || 1;
  const points = known.map(([i, v]) => `${((100 * i) / (values.length - 1)).toFixed(1)},${(22 - (20 * (v - low)) / span).toFixed(1)}`).join(" ");
  return html`<svg class="spark" aria-hidden="true" viewBox="0 0 100 24" preserveAspectRatio="none"><polyline class=${`stroke-${run % 6}`} stroke-dasharray=${run < 6 ? undefined : "4 2"} points=${points} /></svg>`;
}
