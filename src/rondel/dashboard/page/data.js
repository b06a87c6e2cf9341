// What the page knows: fetched as JSON, told by server-sent events, and drawn again when it changes.
import { Component, h } from "/vendor/preact.mjs";
import htm from "/vendor/htm.mjs";

export const html = htm.bind(h);

export async function ask(path, words = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(words))
    for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined && one !== null && one !== "") query.append(name, one);
  const reply = await fetch(`/api/${path}?${query}`);
  const body = await reply.json().catch(() => ({ error: `the server answered ${reply.status}` }));
  if (!reply.ok) throw new Error(body.error || `the server answered ${reply.status}`);
  return body;
}

// Word of every change; `lost(true)` while the connection is down. The browser reconnects by itself.
export function listen(told, lost) {
  const source = new EventSource("/api/news");
  source.onmessage = event => { lost(false); told(JSON.parse(event.data)); };
  source.onopen = () => lost(false);
  source.onerror = () => lost(true);
  addEventListener("pagehide", () => source.close());
}

// <Load path words tick>${data => ...}</Load>: asks when words or tick change, at most every `rest` ms, and keeps what it has meanwhile.
export class Load extends Component {
  state = { data: null, error: "" };
  last = 0;
  componentDidMount() { this.soon(0); }
  componentDidUpdate(before) {
    if (JSON.stringify(before.words) !== JSON.stringify(this.props.words)) this.soon(0);
    else if (before.tick !== this.props.tick) this.soon(Math.max(0, (this.props.rest ?? 700) - (performance.now() - this.last)));
  }
  componentWillUnmount() { clearTimeout(this.timer); this.turn = null; }
  soon(wait) {
    if (wait && this.waiting) return;
    clearTimeout(this.timer);
    this.waiting = wait > 0;
    this.timer = setTimeout(() => { this.waiting = false; this.go(); }, wait);
  }
  async go() {
    const turn = (this.turn = {});
    this.last = performance.now();
    try {
      const data = await ask(this.props.path, this.props.words);
      if (this.turn === turn) this.setState({ data, error: "" });
    } catch (error) {
      if (this.turn === turn) this.setState({ error: error.message });
    }
  }
  render({ children, high }, { data, error }) {
    const draw = Array.isArray(children) ? children[0] : children;
    if (error) return html`<div>${note(error, "error")}${data && draw(data)}</div>`;
    return data ? draw(data) : html`<div class="loading" style=${{ minHeight: `${high ?? 120}px` }}><span>reading …</span></div>`;
  }
}

export const note = (text, kind = "") => html`<p class=${`note ${kind}`} role=${kind === "error" ? "alert" : undefined}>${text}</p>`;
export const empty = (title, text) => html`<div class="empty"><strong>${title}</strong><p>${text}</p></div>`;
